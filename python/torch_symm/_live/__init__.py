"""``torch-symm top`` and ``SYMM_STATS_INTERVAL``: a table of the last calls of all ranks of a node, while the job runs.

With ``SYMM_STATS_INTERVAL=seconds``, each rank writes its last 2000 calls at that interval to ``stats-<pid>.json`` in
the directory of traces, with the contents of a dump of `torch_symm.trace`. It removes the file when it exits. The first
rank prints the table. ``torch-symm top PID`` reads the same files.

When the first rank exits, it prints the counts of all its calls.

Modules, from leaf to root: `table`, `summary`, `files`, `publisher`; the command is `torch_symm.tools.top`.
"""

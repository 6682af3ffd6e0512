"""``torch-symm top`` and ``SYMM_STATS``: the last calls of all ranks of a host as a table, while the job runs.

With ``SYMM_STATS=seconds`` each rank writes its last 2000 calls, what a dump of `torch_symm.trace` holds, every so many
seconds as ``stats-<pid>.json`` to the folder of traces, and removes the file at its end; the first rank prints the
table. ``torch-symm top PID`` reads the same files.

When the first rank ends, it prints the counts of all calls that it made, however many.

Modules, from leaf to root: `table`, `summary`, `files`, `live`; the command is `torch_symm.tools.top`.
"""

"""Says whether torch-symm works on this machine, and what to do where it does not.

    python -m torch_symm doctor --help

Whatever may hang or end a process, the native part, CUDA and groups of ranks, runs in child processes with a deadline.
Modules, from leaf to root: `report`, `limits`, `cgroup`, `host`; `gpus`, `probe` and `rank`, which the
children run; `probed`, `library`, `devices`, `trial`, `command`.
"""

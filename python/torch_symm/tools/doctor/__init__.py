"""Reports whether torch-symm works on this machine, and the remedy if it does not.

    python -m torch_symm doctor --help

Code that may hang or end a process (the native part, CUDA and groups of ranks) runs in child processes with a deadline.
Modules, from leaf to root: `report`, `limits`, `cgroup`, `host`, `calls`; `gpus`, `native_probe` and `rank`, which the
children run; `probe_result`, `library`, `devices`, `smoke_test`, `command`.
"""

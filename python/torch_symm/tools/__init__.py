"""The commands of ``torch-symm``. They use the backend, which imports nothing of them.

Modules: `command`, what the commands share; `hello` with the ranks that it starts, `hello_rank`; `run`, `top`, `trace`;
and a package for each of `bench`, `check`, `doctor`, `topo` and `tune`.
"""

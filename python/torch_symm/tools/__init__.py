"""The commands of ``torch-symm``. They use the backend, which imports none of them.

Modules: `command`, the common parts of commands; `hello` with its ranks, `hello_rank`; `run`, `top`, `trace`; and a
package for each of `bench`, `check`, `doctor`, `topo` and `tune`.
"""

"""Commands that start ranks: ``torch-symm hello`` tries this machine, ``torch-symm run`` starts a program by torchrun.

Modules: `hello` with the ranks that it starts, `rank`; `run`.
"""

"""``torch-symm topo``: cores, caches, memory nodes and GPUs of this node, their connections, and the algorithms.

A child process, the same as in doctor, queries the GPUs, so that a broken driver does not end this process.

Modules, from leaf to root: `cpu`, `pairs`, `plot`, `command`.
"""

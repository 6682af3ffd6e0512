"""``torch-symm topo``: cores, caches, memory nodes and GPUs of this node, their connections, and the consequences.

The child that doctor starts also queries the GPUs, so that a broken driver ends a child and not this process.

Modules, from leaf to root: `cpu`, `pairs`, `plot`, `command`.
"""

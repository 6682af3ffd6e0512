"""``torch-symm topo``: cores, caches, memory nodes and GPUs of this host, what connects them, and what that means.

What GPUs are like is found by the child that doctor starts, too, so that a broken driver ends a child and not this.

Modules, from leaf to root: `cpu`, `pairs`, `plot`, `command`.
"""

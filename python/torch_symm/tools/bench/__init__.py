"""``torch-symm bench``: collectives with the flags and columns of nccl-tests, on CPU and CUDA tensors.

A run is cells (an operation, a type, a reduction, a root and a size each) times sides (backends) times a clock: bursts
of calls on CPU (`timing`, `rank`), events and graphs on GPUs (`gpu`). How a cell is measured on CPU:

1. Every rank process holds a group of the same ranks for each side. All sides use the same tensors.
2. Each side makes one call that is checked, and ``-w`` untimed calls, whose time determines the length of its bursts.
3. Blocks of calls of the sides alternate, so that noise of the machine affects all of them. All ranks start a block
   together; within a burst (at most 64 calls) there is no barrier: each rank makes blocking calls back to back and
   reads the clock once after each, so that the durations add up. If a call takes less than 5 ms, an untimed call opens
   the burst and absorbs the skew of its start. With ``--seconds``, calls that take less than 10 µs are timed in batches
   of 8, because reading the clock takes 0.06 µs.
4. Iteration ``i`` took the longest time that any rank spent in it. Median and p99 are over iterations.
5. Tensors are filled again, and outputs poisoned, before each burst, outside the timing. The results of the first
   ``-c`` calls are compared with exact values. With ``--seconds``, so are all calls of all_reduce, because each call
   uses the result of the call before, and one call of every other operation after each burst.

Conventions for sizes and bus bandwidth: `ops`. Memory limit: `limits`. Modules, from leaf to root: `units`, `pattern`,
`ops`, `limits`, `machine`, `background_load`, `request`, `record`, `timing`, `rank`, `launch`, `links`, `gpu`, `cuda`,
`with_products`, `columns`, `axes`, `plot`, `command`.
"""

"""Measures a backend against another one, every collective, in one run and in the same processes.

    python -m torch_symm.tools.bench --help

How a cell (operation, dtype, size, number of ranks) is measured:

1. Every rank process holds two groups of the same ranks, one per side. Both sides work on the same tensors.
2. Each side is warmed up once and checked, then estimated with a few calls.
3. Blocks of calls of the two sides alternate, so that noise of the machine hits both. All ranks start a block
   together; within a burst (at most 64 calls) there is no barrier: each rank makes blocking calls back to back and
   reads the clock once after each, so that the durations add up. Calls below 10 µs are timed in batches of 8, since
   reading the clock takes 0.06 µs. Below 5 ms an untimed call opens the burst and absorbs the skew of its start.
4. Iteration ``i`` took the longest time that any rank spent in it. Median and p99 are taken over iterations (p99 of
   fewer than 100 iterations is their maximum; p99 of a batched cell is that of batch means).
5. Tensors are filled anew, and outputs poisoned, before each burst, outside the timing. After each burst the result is
   compared with the exact expected value. The timed all_reduce calls feed each other, so all of them are checked.

Conventions for sizes and bus bandwidth: `ops`. Memory limit: `limits`. Targets: `targets`. Modules, from leaf to root:
`units`, `pattern`, `ops`, `limits`, `targets`, `machine`, `record`, `timing`, `rank`, `launch`, `table`, `plot`,
``__main__``.
"""

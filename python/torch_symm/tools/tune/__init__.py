"""Measures what collectives cost on the machine at hand, and how well that predicts what they cost later.

    python -m torch_symm tune --help

How a point (ranks of a group, collective, size) is measured:

1. Every rank is a process. All groups of a size work at once, as the groups along a dimension of a mesh do.
2. All ranks start a burst of calls together; an untimed call absorbs the skew. A burst takes the time of its slowest
   rank, call by call (calls below 100 µs in batches of up to 16).
3. All points are visited in turn, several times over, so that a moment in which the machine is slow does not fall on
   one of them. A visit gives a median; of a launch the least counts: what else the machine does only adds time.
4. All ranks are started anew three times, since some launches are faster than others by a factor of two at some sizes,
   all through. The point is the median of the launches.

Calibration measures every power of two from 1 KB to 256 MB, steps of √2 where tensors leave the caches, and both sides
of each size at which another algorithm takes over. The check measures sizes halfway between. Before, thresholds between
algorithms are searched for; of GPUs in CUDA graphs. Modules, from leaf to root: `points`, `rank`,
`launch`, `profile`, `thresholds`, `thresholds_cpu`, `thresholds_cuda`, `report`, `check`, `plot`, `plans`, `hosts`,
`command`.

`hosts` measures what is between hosts, in a job that torchrun has started on them.
"""

"""Measures the cost of collectives on this machine, and how well that predicts their later cost.

    python -m torch_symm tune --help

How a point (ranks of a group, collective, size) is measured:

1. Every rank is a process. All groups of a size run at once, like the groups along a dimension of a mesh.
2. All ranks start a burst of calls together; an untimed call absorbs the skew. A burst takes the time of its slowest
   rank, call by call (calls below 100 µs in batches of up to 16).
3. All points are visited in turn, several times over, so that a slow moment of the machine does not affect only one of
   them. A visit gives a median; the minimum of a launch counts, because other work of the machine only adds time.
4. There are three launches, each with new rank processes, because at some sizes, some launches are faster than others
   by a factor of two throughout. The point is the median of the launches.

Calibration measures every power of two from 1 KB to 256 MB, steps of √2 where tensors outgrow the caches, and both
sides of each size at which the algorithm changes. The check measures sizes halfway between. Calibration first
determines the thresholds between algorithms; on GPUs, with calls in CUDA graphs.

Modules, from leaf to root: `measurement_points`, `rank`, `launch`, `profile`, `thresholds`, `thresholds_cpu`,
`thresholds_cuda`, `report`, `check`, `plot`, `redistribution`, `inter_node`, `command`.

`inter_node` measures the network between nodes, in a job that torchrun has started on them.
"""

"""``torch-symm bench``: collectives with the flags and columns of nccl-tests, on CPU and CUDA tensors.

What is measured, and how, is the same as in the other benchmarks of this package: operations and exact values of
`..ops`, bursts of `..timing`; on GPUs all of `..gpu`. Here are what nccl-tests' users know:
a size from ``-b`` to ``-e`` after the other, ``-n`` calls after ``-w`` untimed ones, one row.

Bus bandwidth: ``busbw = algbw × factor``, factors of ``doc/PERFORMANCE.md`` of NVIDIA's nccl-tests, in `ops.OPS`.

Modules, from leaf to root: `request`, `record`, `rank`, `launch`, `cuda`, `columns`, `plot`; and `bench.command`.
"""

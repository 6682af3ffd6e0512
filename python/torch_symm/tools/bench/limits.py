"""The memory limit of a cell: the bytes that must move, divided by the copy bandwidth of all ranks at once.

Two counts, both in `ops.OPS`, as multiples of the size S (see `ops`), summed over all ranks:

* ``floor``: every input byte read once and every output byte written once. No algorithm on ordinary tensors is faster
  once the tensors exceed the cache.
* ``staged``: in addition, every byte that moves from one rank to another is written once into shared memory and read
  once by each reader: the cost of private tensors if Linux does not copy them and staging does not stay in the cache.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import torch

from .ops import OPS

# Size of each of a rank's two buffers, larger than its share of the last-level cache on the measured machines.
COPY_BYTES = 64 << 20
# Below this size, tensors may stay in the cache, and a memory limit is meaningless.
SMALLEST = 16 << 20
REPEATS = 3
TRIALS = 2 * REPEATS


def measure_copy(align: Callable[[], None], seconds: float = 0.15) -> list[float]:
    """Returns this rank's copy rates while the others copy as well, in bytes touched (read + written) per second.

    Tries torch's ``copy_`` and libc's ``memmove`` (which bypasses the cache on writes). ``align`` starts all ranks
    together. There are ``TRIALS`` rates; the sum over ranks of one trial is the machine's rate in it.
    """
    source = torch.ones(COPY_BYTES, dtype=torch.uint8)
    target = torch.zeros(COPY_BYTES, dtype=torch.uint8)

    def by_libc() -> None:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), COPY_BYTES)

    def by_torch() -> None:
        target.copy_(source)

    rates = []
    for copy in (by_torch, by_libc):
        for _ in range(REPEATS):
            align()
            start = time.perf_counter()
            elapsed, copies = 0.0, 0
            while elapsed < seconds:
                copy()
                copies += 1
                elapsed = time.perf_counter() - start
            rates.append(2 * COPY_BYTES * copies / elapsed)
    return rates


def limit_us(op: str, size: int, world: int, bytes_per_second: float, *, staged: bool) -> float | None:
    """Returns the µs that ``op`` of ``size`` bytes needs at ``bytes_per_second``; None if memory sets no limit."""
    if size < SMALLEST or bytes_per_second <= 0.0:
        return None
    moved = (OPS[op].staged if staged else OPS[op].floor)(world) * size
    return moved / bytes_per_second * 1e6 if moved > 0.0 else None

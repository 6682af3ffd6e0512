"""The sizes that are measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from torch_symm._describe import OPS as OPS

#: The costs of redistribution steps outside their collectives: a short step with a collective, a short one without, and
#: a copy of a rank's data while all ranks copy.
STEP, SLICE, COPY = "P -> R", "R -> S(0)", "copy"
SMALLEST, LARGEST = 1 << 10, 256 << 20
STEP_BYTES = 1 << 10
#: Size of a copy, so large that the time to start the copy is negligible.
COPY_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
#: Where the tensors of all ranks outgrow a last-level cache, times rise tenfold within a few doublings.
CACHE_EDGE = range(1 << 20, 64 << 20)
ITEM = 4


class Priced(Protocol):
    """Knows the algorithm for a size."""

    def price(self, op: str, bytes: float, dim: int) -> tuple[float, str, str]:
        """Returns µs, algorithm and source."""


@dataclass(frozen=True)
class Point:
    """``op`` in groups of ``ranks`` on tensors of ``bytes``: the longest that a rank passes or gets."""

    ranks: int
    op: str
    bytes: int


def group_sizes(world: int) -> tuple[int, ...]:
    """Returns sizes of equal groups into which ``world`` ranks can be divided, like dimensions of a mesh."""
    return tuple(ranks for ranks in range(2, world + 1) if world % ranks == 0)


def calibrated(largest: int = LARGEST) -> list[int]:
    """Returns sizes to calibrate, up to ``largest``: doublings, and half-way steps where tensors outgrow the caches."""
    sizes = [SMALLEST << shift for shift in range((largest // SMALLEST).bit_length())]
    halves = [int(size * math.sqrt(2)) for size in sizes[:-1] if size in CACHE_EDGE]
    return sorted(sizes + halves)


def checked(largest: int = LARGEST) -> list[int]:
    """Returns sizes to check: halfway between the calibrated ones, on a scale of ratios."""
    return [math.isqrt(low * high) for low, high in pairwise(calibrated(largest))]


def points(worlds: Iterable[int], ops: Iterable[str], sizes: Iterable[int]) -> list[Point]:
    """Returns every size with every collective and group, in whole elements for each rank."""
    sizes = list(sizes)
    return [Point(ranks, op, rounded(size, ranks)) for ranks in worlds for op in ops for size in sizes]


def local(device: str, world: int) -> list[Point]:
    """Returns the points of :data:`STEP`, :data:`SLICE` and :data:`COPY`, and of the step's collective."""
    sizes = {STEP: STEP_BYTES, SLICE: STEP_BYTES, "all_reduce": STEP_BYTES, COPY: COPY_BYTES[device]}
    return [Point(world, op, rounded(size, world)) for op, size in sizes.items()]


def rounded(size: int, ranks: int) -> int:
    """Rounds up to a size that can be divided into equal parts for ``ranks``."""
    unit = ITEM * ranks
    return -(-size // unit) * unit


def switches(point: Point, above: Point, prices: Priced) -> list[Point]:
    """Returns the last size of each algorithm and the first of the next, between ``point`` and ``above``."""

    def algorithm(size: int) -> str:
        return prices.price(point.op, size, 0)[1]

    unit = ITEM * point.ranks
    found: list[Point] = []
    low, high = point.bytes, above.bytes
    while algorithm(low) != algorithm(high):
        last = _last(low, high, unit, algorithm)
        found += [Point(point.ranks, point.op, size) for size in (last, last + unit)]
        low = last + unit
    return [new for new in found if new not in (point, above)]


def _last(low: int, high: int, unit: int, algorithm: Callable[[int], str]) -> int:
    """Returns the last size from ``low``, in steps of ``unit``, with the algorithm of ``low``; ``high`` has another."""
    name = algorithm(low)
    while high - low > unit:
        middle = low + (high - low) // (2 * unit) * unit
        low, high = (middle, high) if algorithm(middle) == name else (low, middle)
    return low

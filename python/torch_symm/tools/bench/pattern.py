"""Test values whose sums are exact in every benchmarked dtype, so that results are compared with ``==``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce

import torch

# A prime, so that a segment at a wrong power-of-two offset is noticed.
PERIOD = 1009
TILE = PERIOD * 1024


class WrongResult(AssertionError):
    """A backend returned something other than the exact expected value; ``count``: number of wrong elements."""

    def __init__(self, text: str, count: int = 1) -> None:
        """``text``: names the first wrong element."""
        super().__init__(text)
        self.count = count


def largest(dtype: torch.dtype) -> int:
    """Returns the largest test value: at most 256, so exact even in bfloat16; not the maximum, the poison of uint8."""
    return min(256, torch.iinfo(dtype).max - 1) if not dtype.is_floating_point else 256


def _values(rank: int, start: int, count: int, world: int, redop: str, limit: int) -> torch.Tensor:
    """Returns elements ``start .. start + count`` of the tensor of ``rank``, as float64 integers.

    The reduction ``redop`` of all ranks' values is an integer of at most ``limit``, and therefore exact: a sum stays
    below ``limit + 1`` because values stay below ``(limit + 1) / world``, or are 0 from rank ``limit`` on; an average
    is one of multiples of ``world``; in a product, only as many factors are 2 as ``limit`` allows.
    """
    index = torch.arange(start, start + count, dtype=torch.int64) % PERIOD
    # The difference between ranks' values changes every seven elements; otherwise many ranks would make all sums equal.
    spread = index * 37 + (17 + index // 7) * rank
    if redop == "prod":
        doubling = rank < limit.bit_length() - 1
        return 1 + (spread % 2 * doubling).to(torch.float64)
    if redop == "avg" and world * world > limit:
        return _few_summands(index, rank, world, limit).to(torch.float64)
    step = world if redop == "avg" else 1
    modulus = max(2, min(31, 1 + limit // (world * step)))
    summand = redop != "sum" or rank < limit
    return ((spread % modulus) * (step * summand)).to(torch.float64)


def _few_summands(index: torch.Tensor, rank: int, world: int, limit: int) -> torch.Tensor:
    """Returns values for averages of so many ranks that the sum of their multiples of ``world`` could exceed ``limit``.

    For each element one rank has a multiple of ``world``, and the others have 0. If even ``world`` exceeds ``limit``,
    which happens in int8, the values of each two neighbours cancel out.
    """
    if world <= limit:
        return (index // 7 % world == rank) * (index * 37 % (1 + limit // world)) * world
    paired = rank ^ 1 < world
    return (1 + (index * 37 + rank // 2) % 31) * (paired * (1 - 2 * (rank % 2)))


def _combined(values: Sequence[torch.Tensor], redop: str) -> torch.Tensor:
    combine = {"prod": torch.mul, "min": torch.minimum, "max": torch.maximum}.get(redop, torch.add)
    total = reduce(combine, values)
    return total / len(values) if redop == "avg" else total


def pieces(tensor: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
    """Returns views of ``count`` elements each (the last may be shorter) that make up the flat ``tensor``."""
    return (tensor[start : start + count] for start in range(0, tensor.numel(), count))


class Pattern:
    """The expected elements from ``start`` of a tensor: the values of ``ranks``, combined with the reduction.

    Keeps at most ``TILE`` elements; longer tensors repeat it.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        start: int,
        count: int,
        world: int,
        dtype: torch.dtype,
        redop: str = "sum",
        device: torch.device | None = None,
    ) -> None:
        """Combines ``count`` elements from ``start`` with ``redop``, in a job of ``world`` ranks."""
        length, limit = min(count, TILE), largest(dtype)
        values = [_values(rank, start, length, world, redop, limit) for rank in ranks]
        self._tile = (_combined(values, redop) if len(values) > 1 else values[0]).to(device, dtype)

    def fill(self, tensor: torch.Tensor) -> None:
        """Writes the pattern into the flat ``tensor``."""
        for part in pieces(tensor, TILE):
            part.copy_(self._tile[: part.numel()])

    def check(self, tensor: torch.Tensor, what: str, scale: float = 1.0) -> None:
        """Compares the flat ``tensor`` with the pattern times ``scale`` (a power of two, so exact).

        Raises:
            WrongResult: names ``what``, the first wrong element and both values; counts all wrong elements.
        """
        tile = self._tile if scale == 1.0 else self._tile * scale
        first, count = "", 0
        for number, part in enumerate(pieces(tensor, TILE)):
            wanted = tile[: part.numel()]
            if torch.equal(part, wanted):
                continue
            wrong = (part != wanted).nonzero()
            where = int(wrong[0])
            first = first or (
                f"{what}: element {number * TILE + where} of {tensor.numel()} is {part[where].item()}, "
                f"expected {wanted[where].item()}"
            )
            count += wrong.numel()
        if count:
            raise WrongResult(first, count)


def check_parts(parts: Sequence[Pattern], tensors: Iterable[torch.Tensor], what: str) -> None:
    """Compares the part of each rank.

    Raises:
        WrongResult: names ``what`` and the first wrong element; counts the wrong elements of all parts.
    """
    found: list[WrongResult] = []
    for rank, tensor in enumerate(tensors):
        try:
            parts[rank].check(tensor, f"{what}, part of rank {rank}")
        except WrongResult as wrong:
            found.append(wrong)
    if found:
        raise WrongResult(str(found[0]), sum(wrong.count for wrong in found))

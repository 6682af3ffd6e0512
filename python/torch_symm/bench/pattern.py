"""Test values whose sums are exact in every benchmarked dtype, so that results are compared with ``==``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

# A prime, so that a segment put at the wrong power-of-two offset is noticed.
PERIOD = 1009
TILE = PERIOD * 1024


class WrongResult(AssertionError):
    """A backend returned something else than the exact expected value."""


def _values(rank: int, start: int, count: int, world: int) -> torch.Tensor:
    """Elements ``start .. start + count`` of the tensor of ``rank``, as float64 integers.

    They stay below ``257 / world``: a sum over all ranks is at most 256, exact even in bfloat16.
    """
    modulus = min(31, 1 + 256 // world)
    index = torch.arange(start, start + count, dtype=torch.int64) % PERIOD
    return ((index * 5 + rank * 17) % modulus).to(torch.float64)


def pieces(tensor: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
    """Views of ``count`` elements each (the last may be shorter) that make up the flat ``tensor``."""
    return (tensor[start : start + count] for start in range(0, tensor.numel(), count))


class Pattern:
    """What a span of a tensor should hold: the sum over ``ranks`` of their values from ``start`` on.

    Keeps at most ``TILE`` elements; longer tensors repeat it.
    """

    def __init__(self, ranks: Sequence[int], start: int, count: int, world: int, dtype: torch.dtype) -> None:
        """``count`` elements from ``start`` on, in a job of ``world`` ranks."""
        total = torch.zeros(min(count, TILE), dtype=torch.float64)
        for rank in ranks:
            total += _values(rank, start, total.numel(), world)
        self._tile = total.to(dtype)

    def fill(self, tensor: torch.Tensor) -> None:
        """Writes the pattern into the flat ``tensor``."""
        for part in pieces(tensor, TILE):
            part.copy_(self._tile[: part.numel()])

    def check(self, tensor: torch.Tensor, what: str, scale: float = 1.0) -> None:
        """Compares the flat ``tensor`` with the pattern times ``scale`` (a power of two, so exact).

        Raises:
            WrongResult: names ``what``, the first wrong element and both values.
        """
        tile = self._tile if scale == 1.0 else self._tile * scale
        for number, part in enumerate(pieces(tensor, TILE)):
            wanted = tile[: part.numel()]
            if not torch.equal(part, wanted):
                where = int((part != wanted).nonzero()[0])
                raise WrongResult(
                    f"{what}: element {number * TILE + where} of {tensor.numel()} is {part[where].item()}, "
                    f"expected {wanted[where].item()}"
                )

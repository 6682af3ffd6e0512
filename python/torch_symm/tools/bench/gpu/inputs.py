"""Random inputs that every rank can compute for every other, their float64 reference; memory and calls of a side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..pattern import pieces

# Number of elements that are made and compared at a time; bounds the memory of the float64 reference.
PIECE = 1 << 24
POISON = float("nan")
#: Types with random values and bounds for their sums.
RANDOM = ("bf16", "f32")


@dataclass(frozen=True)
class Inputs:
    """The tensors of all ranks in one cell: ``count`` elements each, uniform in [-1, 1)."""

    world: int
    count: int
    dtype: torch.dtype
    device: torch.device
    seed: int

    def piece(self, rank: int, number: int) -> torch.Tensor:
        """Returns at most ``PIECE`` elements of the tensor of ``rank``, from ``number * PIECE``."""
        generator = torch.Generator(self.device).manual_seed((self.seed * 1009 + rank) * 8191 + number)
        count = min(PIECE, self.count - number * PIECE)
        values = torch.empty(count, dtype=torch.float32, device=self.device)
        return values.uniform_(-1.0, 1.0, generator=generator).to(self.dtype)

    def fill(self, tensor: torch.Tensor, rank: int) -> None:
        """Writes the whole tensor of ``rank`` into the flat ``tensor``."""
        for number, part in enumerate(pieces(tensor, PIECE)):
            part.copy_(self.piece(rank, number))

    def _pieces(self, ranks: Sequence[int], start: int, count: int) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Yields the parts of elements ``start .. start + count`` per rank, each with its offset from ``start``."""
        for number in range(start // PIECE, -(-(start + count) // PIECE)):
            first, last = max(start, number * PIECE), min(start + count, (number + 1) * PIECE)
            within = slice(first - number * PIECE, last - number * PIECE)
            yield first - start, [self.piece(rank, number)[within] for rank in ranks]

    def compare_sum(self, got: torch.Tensor, start: int = 0, calls: int = 1) -> str | None:
        """Returns why ``got`` is not the sum of all ranks' elements from ``start``; None if it is.

        ``calls``: number of calls in place; each call after the first sums ``world`` equal tensors. The bound allows a
        rounding to the dtype at every step, as in some backends.
        """
        scale = float(self.world) ** (calls - 1)
        bound = self.world * calls * torch.finfo(self.dtype).eps
        for offset, parts in self._pieces(range(self.world), start, got.numel()):
            wanted = torch.zeros_like(parts[0], dtype=torch.float64)
            size = torch.zeros_like(wanted)
            for part in parts:
                wanted += part
                size += part.abs()
            found = got[offset : offset + wanted.numel()].to(torch.float64)
            # Written so that NaN counts as wrong.
            wrong = ~((found - wanted * scale).abs() <= size * (scale * bound))
            if bool(wrong.any()):
                return _first(wrong, found, wanted * scale, offset, got.numel())
        return None

    def compare_copy(self, got: torch.Tensor, rank: int, start: int = 0) -> str | None:
        """Returns why ``got`` is not the tensor of ``rank`` from ``start``; None if it is."""
        for offset, (wanted,) in self._pieces([rank], start, got.numel()):
            found = got[offset : offset + wanted.numel()]
            if not torch.equal(found, wanted):
                return _first(found != wanted, found, wanted, offset, got.numel())
        return None


def _first(wrong: torch.Tensor, found: torch.Tensor, wanted: torch.Tensor, offset: int, count: int) -> str:
    where = int(wrong.nonzero()[0])
    return (
        f"{int(wrong.sum())} elements wrong, the first is {offset + where} of {count}: "
        f"{found[where].item():.6g}, should be {wanted[where].item():.6g}"
    )


@dataclass(frozen=True)
class Place:
    """Memory for one cell on one side: flat tensors of bytes, ``source`` and ``target``, at least the cell's size."""

    source: torch.Tensor
    target: torch.Tensor

    def given(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """``count`` elements of ``source``."""
        return self.source[: count * dtype.itemsize].view(dtype)

    def taken(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """``count`` elements of ``target``."""
        return self.target[: count * dtype.itemsize].view(dtype)


@dataclass(frozen=True)
class Setting:
    """The inputs of a builder. ``pristine`` holds this rank's input.

    ``in_place``: the input of an all-gather is a part of its output.
    """

    rank: int
    inputs: Inputs
    pristine: torch.Tensor
    group: dist.ProcessGroup
    place: Place
    in_place: bool = False

    @property
    def world(self) -> int:
        """Number of ranks in the group."""
        return self.inputs.world

    @property
    def share(self) -> int:
        """Number of elements of one rank's part."""
        return self.inputs.count // self.world

    def given(self, count: int) -> torch.Tensor:
        """An input or in-place tensor."""
        return self.place.given(self.inputs.dtype, count)

    def taken(self, count: int) -> torch.Tensor:
        """An output."""
        return self.place.taken(self.inputs.dtype, count)


@dataclass(frozen=True)
class GpuCall:
    """One operation on one side. ``check(k)`` returns the error after ``reset`` and ``k`` of ``run``, or None."""

    reset: Callable[[], object]
    run: Callable[[], object]
    check: Callable[[int], str | None]

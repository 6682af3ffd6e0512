"""One call of a collective on one rank: inputs, memory layouts, expected results; and what a sweep over many found."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from expected import FLOATS, assert_same, name, seeded
from pool import device

#: Above this, values are made with fewer steps.
MANY = 100_000


@lru_cache(maxsize=256)
def values(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    """Random values, the same on every rank. Not to be changed."""
    if count > MANY and dtype in FLOATS:
        generator = torch.Generator().manual_seed(seed)
        return torch.empty(count, dtype=torch.float32).uniform_(-4, 4, generator=generator).to(dtype)
    return seeded(dtype, (count,), seed)


#: How many elements the memory has, and where in it the tensor lies.
LAYOUTS: dict[str, tuple[Callable[[int], int], Callable[[torch.Tensor], torch.Tensor]]] = {
    "contiguous": (lambda count: count, lambda base: base),
    "offset": (lambda count: count + 1, lambda base: base[1:]),
    "strided": (lambda count: 2 * count, lambda base: base[::2]),
    "transposed": (lambda count: count, lambda base: base.view(2, -1).t() if base.numel() % 2 == 0 else base),
}


@dataclass
class Placed:
    """A tensor in memory of its own. ``before``: all of that memory, on the host."""

    base: torch.Tensor
    before: torch.Tensor
    look: Callable[[torch.Tensor], torch.Tensor]

    @property
    def view(self) -> torch.Tensor:
        """The tensor."""
        return self.look(self.base)

    def check(self, wanted: torch.Tensor, about: str) -> None:
        """Fails unless the tensor holds ``wanted`` in logical order, and everything around it is as it was."""
        right = self.before.clone()
        place = self.look(right)
        place.copy_(wanted.reshape(place.shape))
        assert_same(self.base.cpu(), right, about)


class Case:
    """One call on one rank; ``same`` compares."""

    def __init__(self, rank: int, world: int, dtype: torch.dtype, count: int, layout: str, asynchronous: bool) -> None:
        self.rank, self.world, self.dtype, self.count = rank, world, dtype, count
        self.layout, self.asynchronous = layout, asynchronous
        self.root = (count + len(name(dtype))) % world
        self.about = f"{name(dtype)} x{count} {layout}{' async' if asynchronous else ''}, rank {rank}"

    def given(self, rank: int | None = None, count: int | None = None) -> torch.Tensor:
        """What a rank gives where it gives ``count`` elements."""
        return values(self.dtype, self.count if count is None else count, 7 + (self.rank if rank is None else rank))

    def wide(self, rank: int | None = None) -> torch.Tensor:
        """What a rank gives where it has ``count`` elements for each."""
        return values(self.dtype, self.count * self.world, 70 + (self.rank if rank is None else rank))

    def parts(self, taker: int) -> list[torch.Tensor]:
        """What every rank has for ``taker``."""
        return [self.wide(giver)[taker * self.count : (taker + 1) * self.count] for giver in range(self.world)]

    def all(self) -> list[torch.Tensor]:
        """What every rank gives."""
        return [self.given(rank) for rank in range(self.world)]

    def place(self, flat: torch.Tensor) -> Placed:
        """``flat`` in memory of this case's layout."""
        elements, look = LAYOUTS[self.layout]
        before = torch.ones(elements(flat.numel())).to(self.dtype)
        part = look(before)
        part.copy_(flat.reshape(part.shape))
        # A copy on the CPU, too, where `to` would give the same memory.
        return Placed(before.clone().to(device()), before, look)

    def blank(self, count: int | None = None) -> Placed:
        """Ones, to be overwritten."""
        return self.place(torch.ones(self.count if count is None else count).to(self.dtype))

    def call(self, function: Callable[..., dist.Work | None], *args: object, **options: object) -> None:
        """Calls, and waits if the case is asynchronous."""
        work = function(*args, async_op=self.asynchronous, **options)
        if self.asynchronous:
            assert work is not None, "async_op=True gave no work"
            work.wait()

    def same(self, placed: Placed, wanted: torch.Tensor) -> None:
        """Bit for bit."""
        placed.check(wanted, self.about)


class Findings:
    """What went wrong in the cases of a sweep, which goes on after each: a rank that stops leaves others waiting."""

    SHOWN = 12

    def __init__(self) -> None:
        self._found: list[str] = []
        self._cases = 0

    @contextmanager
    def case(self, about: str) -> Iterator[None]:
        """One case. A failure of the group ends the sweep."""
        self._cases += 1
        try:
            yield
        except dist.DistBackendError:
            self._found.append(about)
            traceback.print_exc()
            raise AssertionError(self._text("failed, the group in the last")) from None
        except (AssertionError, NotImplementedError, ValueError, TypeError, RuntimeError) as error:
            self._found.append(f"{about}: {type(error).__name__}: {str(error)[:300]}")

    def close(self) -> int:
        """The number of cases; fails if one did."""
        if self._found:
            raise AssertionError(self._text("wrong"))
        return self._cases

    def _text(self, what: str) -> str:
        return f"{len(self._found)} of {self._cases} cases {what}:\n  " + "\n  ".join(self._found[-self.SHOWN :])

"""One call of a collective on one rank: inputs, memory layouts, expected results; and the findings of a sweep."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import expected
import torch
import torch.distributed as dist
from expected import FLOATS, assert_same, assert_same_bits, name, seeded

#: Number of elements above which values are made with fewer steps.
MANY = 100_000
#: The factor of each rank for PREMUL_SUM.
FACTORS = (0.5, 1 / 3, -7.0, 1e-3, 2.0, -0.25, 3.0, 1.5) * 8
CPU = torch.device("cpu")

Look = Callable[[torch.Tensor], torch.Tensor]
#: The result of a reduction op on the inputs of all ranks, given the ranks' factors.
Reference = Callable[[str, Sequence[torch.Tensor], Sequence[float]], torch.Tensor]


@cache
def values(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    """Random values, the same on every rank. Callers must not change them."""
    if count > MANY and dtype in FLOATS:
        generator = torch.Generator().manual_seed(seed)
        return torch.empty(count, dtype=torch.float32).uniform_(-4, 4, generator=generator).to(dtype)
    return seeded(dtype, (count,), seed)


@cache
def wide(dtype: torch.dtype, count: int, seed: int, world: int) -> torch.Tensor:
    """``count`` values for each rank: the same values, rotated by its number. Callers must not change them."""
    return torch.cat([rotated(values(dtype, count, seed), taker) for taker in range(world)])


def rotated(flat: torch.Tensor, taker: int) -> torch.Tensor:
    at = (taker + 1) % max(flat.numel(), 1)
    return torch.cat([flat[at:], flat[:at]])


@cache
def reduced(reference: Reference, op: str, dtype: torch.dtype, count: int, seed: int, world: int) -> torch.Tensor:
    """The reduction of the inputs of all ranks. Callers must not change it."""
    return reference(op, [values(dtype, count, seed + rank) for rank in range(world)], FACTORS[:world])


@cache
def long_inputs(dtype: torch.dtype, count: int, world: int) -> list[torch.Tensor]:
    """The inputs of all ranks, with all of the type's precision. Callers must not change them."""
    return [seeded(dtype, (count,), rank) for rank in range(world)]


@cache
def long_sum(reference: Reference, op: str, dtype: torch.dtype, count: int, world: int) -> torch.Tensor:
    """The reduction of ``long_inputs``."""
    return reference(op, long_inputs(dtype, count, world), FACTORS[:world])


@contextmanager
def shared() -> Iterator[None]:
    """Within this context, forked ranks inherit the values above; at its end the values are dropped."""
    try:
        yield
    finally:
        for made in (values, wide, reduced, long_inputs, long_sum):
            made.cache_clear()


#: For a number of elements, the size of the memory in elements; and the tensor in that memory. See also `holds`.
LAYOUTS: dict[str, tuple[Callable[[int], int], Look]] = {
    "contiguous": (lambda count: count, lambda base: base),
    "offset": (lambda count: count + 1, lambda base: base[1:]),
    "strided": (lambda count: 2 * count, lambda base: base[::2]),
    "transposed": (lambda count: count, lambda base: base.view(2, -1).t() if base.numel() % 2 == 0 else base),
    # Layouts that only CPU tensors have.
    "scalar": (lambda count: 1, lambda base: base.view(())),
    "columns": (lambda count: count // 4 * 9, lambda base: base.view(-1, 9)[:, 2:6]),
    "channels_last": (lambda count: count, lambda base: base.view(2, -1, 2, 3).permute(0, 3, 1, 2)),
}
#: The layouts of ranks 0, 1, 2 … in "mixed".
MIXED = ("contiguous", "channels_last", "strided", "offset")


@dataclass
class Placed:
    """A tensor in memory of its own. ``before``: a copy of that memory on the host, which a check changes."""

    base: torch.Tensor
    before: torch.Tensor
    look: Look

    @property
    def view(self) -> torch.Tensor:
        """The tensor."""
        return self.look(self.base)

    def check(self, wanted: torch.Tensor, about: str) -> None:
        """Fails unless the tensor holds ``wanted`` in logical order, and everything around it is as it was."""
        place = self.look(self.before)
        place.copy_(wanted.reshape(place.shape))
        if self.base.device.type == "cpu":
            assert_same_bits(self.base, self.before, about)
        else:
            assert_same(self.base.cpu(), self.before, about)


@dataclass
class Misaligned:
    """A tensor at an odd address, filled and compared as bytes, because not all of torch's operators can read it."""

    memory: bytearray
    view: torch.Tensor

    @classmethod
    def of(cls, flat: torch.Tensor) -> Misaligned:
        """A copy of ``flat``, with a byte of zeros on each side."""
        memory = bytearray(1) + bytearray(expected.bits(flat).numpy()) + bytearray(1)
        return cls(memory, torch.frombuffer(memory, dtype=flat.dtype, count=flat.numel(), offset=1))

    def check(self, wanted: torch.Tensor, about: str) -> None:
        """As ``Placed.check``."""
        assert self.memory[0] == self.memory[-1] == 0, f"{about}: a byte beside the tensor was written"
        assert_same_bits(torch.frombuffer(bytearray(self.memory[1:-1]), dtype=wanted.dtype), wanted, about)


@dataclass
class Case:
    """One call on one rank; ``same`` compares.

    ``op``: the reduction, if the call reduces. ``seed``: the seed of rank 0's values, with the next one for each rank.
    ``empty`` and ``empty_result``: make the memory of tensors.
    """

    rank: int
    world: int
    dtype: torch.dtype
    count: int
    layout: str = "contiguous"
    asynchronous: bool = False
    op: str = "SUM"
    reference: Reference = expected.reduced
    device: torch.device = CPU
    group: dist.ProcessGroup | None = None
    root: int = -1
    seed: int = 7
    empty: Callable[..., torch.Tensor] = torch.empty
    empty_result: Callable[..., torch.Tensor] | None = None

    def __post_init__(self) -> None:
        if self.root < 0:
            self.root = (self.count + len(name(self.dtype))) % self.world
        self.about = (
            f"{self.op} {name(self.dtype)} x{self.count} {self.layout}{' async' if self.asynchronous else ''}, "
            f"root {self.root}, rank {self.rank} of {self.world}"
        )
        if self.layout == "mixed":
            self.layout = MIXED[self.rank % len(MIXED)]

    @property
    def redop(self) -> dist.ReduceOp:
        """The reduction, with this rank's factor."""
        return expected.op_of(self.op, FACTORS[self.rank])

    def given(self, rank: int | None = None, count: int | None = None) -> torch.Tensor:
        """The input of a rank, with ``count`` elements."""
        seed = self.seed + (self.rank if rank is None else rank)
        return values(self.dtype, self.count if count is None else count, seed)

    def wide(self, rank: int | None = None, count: int | None = None) -> torch.Tensor:
        """The input of a rank that has ``count`` elements for each rank."""
        seed = self.seed + (self.rank if rank is None else rank)
        return wide(self.dtype, self.count if count is None else count, seed, self.world)

    def parts(self, taker: int, count: int | None = None) -> list[torch.Tensor]:
        """The inputs of every rank for ``taker``."""
        count = self.count if count is None else count
        return [self.wide(giver, count)[taker * count : (taker + 1) * count] for giver in range(self.world)]

    def all(self) -> list[torch.Tensor]:
        """The inputs of all ranks."""
        return [self.given(rank) for rank in range(self.world)]

    def total(self, count: int | None = None) -> torch.Tensor:
        """The reduction of all ranks' inputs."""
        count = self.count if count is None else count
        return reduced(self.reference, self.op, self.dtype, count, self.seed, self.world)

    def total_of(self, taker: int, count: int | None = None) -> torch.Tensor:
        """The reduction of all ranks' inputs for ``taker``."""
        return rotated(self.total(count), taker)

    def place(self, flat: torch.Tensor, empty: Callable[..., torch.Tensor] | None = None) -> Placed | Misaligned:
        """``flat`` in memory of this case's layout."""
        if self.layout == "misaligned" and flat.numel():
            return Misaligned.of(flat)
        elements, look = LAYOUTS[self.layout if holds(self.layout, flat.numel()) else "contiguous"]
        before = torch.ones(elements(flat.numel()), dtype=self.dtype)
        part = look(before)
        part.copy_(flat.reshape(part.shape))
        # Always a copy: on the CPU, `to` would return the same memory.
        base = (empty or self.empty)(before.numel(), dtype=self.dtype, device=self.device).copy_(before)
        return Placed(base, before, look)

    def blank(self, count: int | None = None) -> Placed | Misaligned:
        """Memory for a result, filled with ones."""
        return self.place(torch.ones(self.count if count is None else count, dtype=self.dtype), self.empty_result)

    def call(self, function: Callable[..., dist.Work | None], *args: object, **options: object) -> None:
        """Calls, and waits if the case is asynchronous."""
        work = function(*args, async_op=self.asynchronous, group=self.group, **options)
        if self.asynchronous:
            assert work is not None, "async_op=True gave no work"
            self.finish(work)

    def finish(self, work: dist.Work) -> None:
        """Waits for an asynchronous call."""
        work.wait()

    def same(self, placed: Placed | Misaligned, wanted: torch.Tensor) -> None:
        """Fails unless the tensors are equal bit by bit."""
        placed.check(wanted, self.about)


def holds(layout: str, count: int) -> bool:
    """Returns true if this many elements can have the layout; otherwise they are contiguous."""
    if layout == "scalar":
        return count == 1
    return layout in LAYOUTS and count % {"transposed": 2, "columns": 4, "channels_last": 12}.get(layout, 1) == 0


class Findings:
    """The errors in a sweep of cases. It continues after an error, because a rank that stops leaves others waiting."""

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
        """The number of cases; raises an error if one of them failed."""
        if self._found:
            raise AssertionError(self._text("wrong"))
        return self._cases

    def _text(self, what: str) -> str:
        return f"{len(self._found)} of {self._cases} cases {what}:\n  " + "\n  ".join(self._found[-self.SHOWN :])

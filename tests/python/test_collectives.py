"""Every collective, dtype, world size, shape and layout, synchronous and asynchronous, against its definition.

All cases of one collective and world size share one group; the inputs are made once, before the ranks are forked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

import expected
import pytest
import torch
import torch.distributed as dist
from expected import DTYPES, assert_same_bits
from ranks import run_ranks

WORLDS = (1, 2, 3, 4)
LAYOUTS = ("contiguous", "transposed", "channels_last", "offset")


def shape_of(size: str, dtype: torch.dtype) -> tuple[int, ...]:
    if size == "empty":
        return (0, 3)
    if size == "scalar":
        return ()
    if size == "odd":
        return (2, 3, 5, 7)
    bytes_of = {"medium": 9_000, "large": 1_100_000}[size]
    return (2, bytes_of // dtype.itemsize // 30 + 1, 3, 5)


def layouts(size: str, dtype: torch.dtype) -> tuple[str, ...]:
    if size in ("empty", "scalar"):
        return ("contiguous", "offset")
    if size == "large":
        # The copies in and out are the same for all sizes.
        return ("contiguous", "transposed") if dtype in (torch.float32, torch.bfloat16) else ("contiguous",)
    return LAYOUTS


def cases() -> Iterator[tuple[torch.dtype, str, str, bool]]:
    """dtype, size, layout, asynchronous."""
    for dtype in DTYPES:
        for size in ("empty", "scalar", "odd", "medium", "large"):
            for layout in layouts(size, dtype):
                for asynchronous in (False, True) if size != "large" else (dtype.itemsize % 2 == 0,):
                    yield dtype, size, layout, asynchronous


@cache
def own(dtype: torch.dtype, size: str, rank: int) -> torch.Tensor:
    """What ``rank`` gives where it gives one tensor."""
    return expected.seeded(dtype, shape_of(size, dtype), 7 + rank)


def piece(dtype: torch.dtype, size: str, giver: int, taker: int) -> torch.Tensor:
    """What ``giver`` has for ``taker``: its own tensor, rotated."""
    tensor = own(dtype, size, giver)
    flat = tensor.reshape(-1)
    return torch.cat([flat[taker + 1 :], flat[: taker + 1]]).reshape(tensor.shape) if tensor.numel() else tensor.clone()


@cache
def total(dtype: torch.dtype, size: str, world: int, taker: int | None = None) -> torch.Tensor:
    """The sum of what all ranks give, to all or to ``taker``."""
    give = own if taker is None else partial(piece, taker=taker)
    return expected.reduced("SUM", [give(dtype, size, giver) for giver in range(world)])


def laid(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """A copy of ``tensor`` in memory of its own."""
    if layout == "offset":
        room = torch.empty(tensor.numel() + 3, dtype=tensor.dtype)
        return room[3:].view(tensor.shape).copy_(tensor)
    if layout == "transposed" and tensor.dim() > 1:
        room = torch.empty(tuple(reversed(tensor.shape)), dtype=tensor.dtype)
        return room.permute(*reversed(range(tensor.dim()))).copy_(tensor)
    if layout == "channels_last" and tensor.dim() == 4:
        return torch.empty(tensor.shape, dtype=tensor.dtype, memory_format=torch.channels_last).copy_(tensor)
    return tensor.clone(memory_format=torch.contiguous_format)


def blank(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Of the same sizes and layout, with other values."""
    return laid(torch.ones_like(tensor), layout)


class Case:
    """One call on one rank."""

    def __init__(self, rank: int, world: int, dtype: torch.dtype, size: str, layout: str, asynchronous: bool) -> None:
        self.rank, self.world, self.dtype, self.size = rank, world, dtype, size
        self.layout, self.asynchronous = layout, asynchronous
        self.root = (len(expected.name(dtype)) + len(size)) % world

    def own(self, rank: int | None = None) -> torch.Tensor:
        return own(self.dtype, self.size, self.rank if rank is None else rank)

    def piece(self, giver: int, taker: int) -> torch.Tensor:
        return piece(self.dtype, self.size, giver, taker)

    def lay(self, tensor: torch.Tensor) -> torch.Tensor:
        return laid(tensor, self.layout)

    def blanks(self) -> list[torch.Tensor]:
        return [blank(self.own(), self.layout) for _ in range(self.world)]

    def stacked(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(tensors) if self.size != "odd" or self.asynchronous else torch.cat(tensors)

    def call(self, function: Callable[..., dist.Work | None], *args: object, **options: object) -> None:
        work = function(*args, async_op=self.asynchronous, **options)
        if self.asynchronous:
            work.wait()

    def same(self, got: torch.Tensor | list[torch.Tensor], wanted: torch.Tensor | list[torch.Tensor]) -> None:
        about = (
            f"{expected.name(self.dtype)} {self.size} {self.layout} asynchronous={self.asynchronous} rank {self.rank}"
        )
        pairs = [(got, wanted)] if isinstance(got, torch.Tensor) else zip(got, wanted, strict=True)
        for index, (a, b) in enumerate(pairs):
            assert_same_bits(a, b, f"{about} [{index}]")

    def broadcast(self) -> None:
        tensor = self.lay(self.own())
        self.call(dist.broadcast, tensor, self.root)
        self.same(tensor, self.own(self.root))

    def all_reduce(self) -> None:
        tensor = self.lay(self.own())
        self.call(dist.all_reduce, tensor)
        self.same(tensor, total(self.dtype, self.size, self.world))

    def reduce(self) -> None:
        tensor = self.lay(self.own())
        self.call(dist.reduce, tensor, self.root)
        if self.rank == self.root:
            self.same(tensor, total(self.dtype, self.size, self.world))

    def all_gather(self) -> None:
        outputs, tensor = self.blanks(), self.lay(self.own())
        self.call(dist.all_gather, outputs, tensor)
        self.same([*outputs, tensor], [*map(self.own, range(self.world)), self.own()])

    def all_gather_into_tensor(self) -> None:
        wanted = self.stacked([self.own(rank) for rank in range(self.world)])
        output, tensor = blank(wanted, self.layout), self.lay(self.own())
        self.call(dist.all_gather_into_tensor, output, tensor)
        self.same([output, tensor], [wanted, self.own()])

    def gather(self) -> None:
        outputs = self.blanks() if self.rank == self.root else None
        self.call(dist.gather, self.lay(self.own()), outputs, self.root)
        if outputs is not None:
            self.same(outputs, [self.own(rank) for rank in range(self.world)])

    def scatter(self) -> None:
        output = blank(self.own(), self.layout)
        inputs = [self.lay(self.piece(self.root, taker)) for taker in range(self.world)]
        self.call(dist.scatter, output, inputs if self.rank == self.root else None, self.root)
        self.same(output, self.piece(self.root, self.rank))

    def reduce_scatter(self) -> None:
        output = blank(self.own(), self.layout)
        inputs = [self.lay(self.piece(self.rank, taker)) for taker in range(self.world)]
        self.call(dist.reduce_scatter, output, inputs)
        self.same(output, total(self.dtype, self.size, self.world, self.rank))

    def reduce_scatter_tensor(self) -> None:
        output = blank(self.own(), self.layout)
        inputs = self.lay(self.stacked([self.piece(self.rank, taker) for taker in range(self.world)]))
        self.call(dist.reduce_scatter_tensor, output, inputs)
        self.same(output, total(self.dtype, self.size, self.world, self.rank))

    def all_to_all(self) -> None:
        outputs = self.blanks()
        inputs = [self.lay(self.piece(self.rank, taker)) for taker in range(self.world)]
        self.call(dist.all_to_all, outputs, inputs)
        self.same(outputs, [self.piece(giver, self.rank) for giver in range(self.world)])

    def all_to_all_single(self) -> None:
        wanted = torch.stack([self.piece(giver, self.rank) for giver in range(self.world)])
        inputs = self.lay(torch.stack([self.piece(self.rank, taker) for taker in range(self.world)]))
        output = blank(wanted, self.layout)
        self.call(dist.all_to_all_single, output, inputs)
        self.same(output, wanted)


COLLECTIVES = (
    "broadcast",
    "all_reduce",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
)


def every_case(rank: int, world: int, collective: str) -> int:
    count = 0
    for case in cases():
        getattr(Case(rank, world, *case), collective)()
        count += 1
    return count


def prepare(world: int) -> None:
    """Fills the caches that forked ranks share."""
    for dtype in DTYPES:
        for size in ("empty", "scalar", "odd", "medium", "large"):
            total(dtype, size, world)
            for rank in range(world):
                own(dtype, size, rank)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("world", WORLDS)
def test_every_case(world: int, collective: str) -> None:
    prepare(world)
    if "reduce_scatter" in collective:
        for dtype in DTYPES:
            for size in ("empty", "scalar", "odd", "medium", "large"):
                for taker in range(world):
                    total(dtype, size, world, taker)
    counts = run_ranks(every_case, world, collective, timeout=100)
    assert set(counts) == {len(list(cases()))}


def in_place(rank: int, world: int) -> None:
    for dtype in DTYPES:
        for size in ("empty", "scalar", "odd", "medium", "large"):
            for asynchronous in (False, True):
                case = Case(rank, world, dtype, size, "contiguous", asynchronous)
                whole = torch.stack([case.own(r) if r == rank else torch.zeros_like(case.own()) for r in range(world)])
                case.call(dist.all_gather_into_tensor, whole, whole[rank])
                case.same(whole, torch.stack([case.own(r) for r in range(world)]))

                parts = [case.piece(rank, taker) for taker in range(world)]
                whole = torch.stack(parts)
                case.call(dist.all_gather, list(whole.unbind()), whole[rank])
                case.same(whole, torch.stack([case.piece(r, r) for r in range(world)]))

                whole = torch.stack(parts)
                case.call(dist.reduce_scatter_tensor, whole[rank], whole)
                case.same(whole[rank], total(dtype, size, world, rank))

                whole = torch.stack(parts)
                wanted = torch.stack([case.piece(giver, rank) for giver in range(world)])
                case.call(dist.all_to_all_single, whole, whole)
                case.same(whole, wanted)

                whole = torch.stack(parts)
                case.call(dist.all_to_all, list(whole.unbind()), list(whole.unbind()))
                case.same(whole, wanted)


@pytest.mark.parametrize("world", (2, 4))
def test_in_place(world: int) -> None:
    prepare(world)
    run_ranks(in_place, world, timeout=100)


def uneven(rank: int, world: int) -> None:
    """Lengths r * step for rank r: the first gives nothing."""
    for dtype in (torch.float32, torch.int8, torch.bfloat16, torch.float8_e5m2, torch.bool, torch.complex128):
        for step in (1, 37, 5_000, 150_000):
            lengths = [r * step for r in range(world)]
            about = f"{expected.name(dtype)} step {step} rank {rank}"

            def values(seed: int, length: int, dtype: torch.dtype = dtype) -> torch.Tensor:
                return expected.seeded(dtype, (length,), seed)

            outputs = [torch.zeros(length, dtype=dtype) for length in lengths]
            dist.all_gather(outputs, values(rank, lengths[rank]))
            for r, output in enumerate(outputs):
                assert_same_bits(output, values(r, lengths[r]), f"all_gather {about}")

            output = torch.zeros(lengths[rank], dtype=dtype)
            dist.reduce_scatter(output, [values(10 * rank + to, lengths[to]) for to in range(world)])
            wanted = expected.reduced("SUM", [values(10 * giver + rank, lengths[rank]) for giver in range(world)])
            assert_same_bits(output, wanted, f"reduce_scatter {about}")


def test_uneven_lists() -> None:
    run_ranks(uneven, 4)


def coalesced_lists(rank: int, world: int) -> None:
    shapes = ((3,), (2, 2), (40_000,), (0,))
    inputs = [torch.full(shape, float(rank + 10 * i)) for i, shape in enumerate(shapes)]
    outputs = [[torch.zeros(shape) for shape in shapes] for _ in range(world)]
    dist.all_gather_coalesced(outputs, inputs)
    for giver, tensors in enumerate(outputs):
        for i, tensor in enumerate(tensors):
            assert (tensor == giver + 10 * i).all()


def test_all_gather_coalesced() -> None:
    run_ranks(coalesced_lists, 3)


def objects(rank: int, world: int) -> None:
    mine = {"rank": rank, "blob": "x" * (rank * 5000)}
    everyone = [{"rank": r, "blob": "x" * (r * 5000)} for r in range(world)]
    got = [None] * world
    dist.all_gather_object(got, mine)
    assert got == everyone
    got = [None] * world if rank == 1 else None
    dist.gather_object(mine, got, dst=1)
    assert got == (everyone if rank == 1 else None)
    got = everyone[:2] if rank == 0 else [None, None]
    dist.broadcast_object_list(got, src=0)
    assert got == everyone[:2]
    got = [None]
    dist.scatter_object_list(got, everyone if rank == 2 else [None] * world, src=2)
    assert got == [mine]
    dist.barrier()


def test_object_collectives() -> None:
    run_ranks(objects, 3)


def above_2_31_elements(rank: int, world: int) -> None:
    count = 2**31 + 5
    tensor = torch.zeros(count, dtype=torch.uint8)
    tensor[0] = tensor[2**31 - 1] = tensor[2**31] = tensor[-1] = rank + 1
    dist.all_reduce(tensor)
    assert [int(tensor[i]) for i in (0, 1, 2**31 - 1, 2**31, -2, -1)] == [3, 0, 3, 3, 0, 3]
    assert int(torch.count_nonzero(tensor)) == 4


def test_tensors_above_2_31_elements() -> None:
    run_ranks(above_2_31_elements, 2, timeout=100)

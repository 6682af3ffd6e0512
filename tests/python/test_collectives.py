"""Every collective, on every dtype, shape and layout, at 1 to 4 ranks, against values computed from all inputs."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
import torch.distributed as dist
from ranks import run_ranks, values

SUM = dist.ReduceOp.SUM
# Elements; around the message that fits beside its flag, around a chunk, and past several.
LONG = (1 << 20) + 3
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (7,), (3, 0, 2), (5, 13), (2, 3, 4, 5), (2039,), (8200,))
LAYOUTS = ("contiguous", "transposed", "strided", "channels_last", "offset", "misaligned")


class Pool:
    """Deterministic values: every rank can compute every other rank's input."""

    def __init__(self, world: int, longest: int) -> None:
        self.world = world
        self.size = longest + 97
        self.bases: dict[tuple[torch.dtype, int], torch.Tensor] = {}

    def _base(self, dtype: torch.dtype, rank: int) -> torch.Tensor:
        key = (dtype, rank)
        if key not in self.bases:
            generator = torch.Generator().manual_seed(1000 * rank + 17)
            if dtype == torch.bool:
                base = torch.rand(self.size, generator=generator) > 0.4
            elif dtype in reference.INTEGERS:
                width = torch.empty(0, dtype=dtype).element_size()
                base = torch.randint(0, 256, (self.size * width,), generator=generator, dtype=torch.uint8).view(dtype)
            elif dtype.is_complex:
                base = torch.randn(self.size, generator=generator, dtype=dtype)
            else:
                base = (torch.randn(self.size, generator=generator) * 3).to(dtype)
            self.bases[key] = base
        return self.bases[key]

    def flat(self, dtype: torch.dtype, rank: int, count: int, case: int) -> torch.Tensor:
        start = (case * 13 + 5 * rank) % 97
        return self._base(dtype, rank)[start : start + count]


def laid_out(flat: torch.Tensor, shape: tuple[int, ...], layout: str) -> torch.Tensor:
    """A fresh tensor of ``shape`` that holds ``flat`` in logical order and lies in memory as ``layout`` says."""
    count = flat.numel()
    if layout == "transposed" and len(shape) >= 2:
        result = torch.empty(shape[::-1], dtype=flat.dtype).permute(*reversed(range(len(shape))))
    elif layout == "strided":
        result = torch.zeros((*shape, 2), dtype=flat.dtype)[..., 1]
    elif layout == "channels_last" and len(shape) == 4:
        result = torch.empty(shape, dtype=flat.dtype, memory_format=torch.channels_last)
    elif layout == "offset":
        result = torch.zeros(count + 3, dtype=flat.dtype)[3:].view(shape)
    elif layout == "misaligned" and count:
        # Filled as bytes: torch's own copy of some types needs alignment.
        buffer = bytearray(1) + bytearray(reference.as_bytes(flat).numpy())
        return torch.frombuffer(buffer, dtype=flat.dtype, count=count, offset=1).view(shape)
    else:
        result = torch.empty(shape, dtype=flat.dtype)
    if flat.element_size() == 1:
        # As bytes: float8 would be converted.
        result.view(torch.uint8).copy_(flat.view(torch.uint8).view(shape))
    else:
        result.copy_(flat.view(shape))
    return result


class Case:
    """One call on one dtype, shape and layout; knows all ranks' inputs."""

    def __init__(
        self,
        pool: Pool,
        rank: int,
        number: int,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        layout: str,
        asynchronous: bool,
    ):
        self.pool, self.rank, self.world, self.number = pool, rank, pool.world, number
        self.dtype, self.shape, self.layout, self.asynchronous = dtype, shape, layout, asynchronous
        self.count = math.prod(shape)

    def input(self, rank: int, parts: int = 1) -> torch.Tensor:
        return self.pool.flat(self.dtype, rank, self.count * parts, self.number)

    def tensor(self, flat: torch.Tensor, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        return laid_out(flat, self.shape if shape is None else shape, self.layout)

    def blank(self, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        shape = self.shape if shape is None else shape
        return laid_out(torch.zeros(math.prod(shape), dtype=torch.uint8).to(self.dtype), shape, self.layout)

    def wait(self, work: Any) -> None:
        if self.asynchronous:
            assert work is not None
            work.wait()

    def check(self, got: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
        if not reference.same_bits(got, expected):
            a, b = got.contiguous().view(-1), expected.contiguous().view(-1)
            where = "sizes differ"
            if a.numel() == b.numel():
                wrong = (
                    (reference.as_bytes(a).view(a.numel(), -1) != reference.as_bytes(b).view(a.numel(), -1))
                    .any(1)
                    .nonzero()
                )
                first = int(wrong[0])
                where = f"{len(wrong)} of {a.numel()} wrong, first at {first}: got {a[first]}, expected {b[first]}"
            raise AssertionError(f"{what} {where}")


def stacked(case: Case, parts: int) -> tuple[int, ...]:
    """The shape of ``parts`` tensors of the case's shape joined along the first dimension."""
    return (parts * case.shape[0], *case.shape[1:]) if case.shape else (parts,)


def all_reduce(case: Case) -> None:
    mine = case.tensor(case.input(case.rank))
    case.wait(dist.all_reduce(mine, async_op=case.asynchronous))
    case.check(mine, reference.reduced([case.input(r) for r in range(case.world)], SUM))


def reduce(case: Case) -> None:
    root = case.number % case.world
    mine = case.tensor(case.input(case.rank))
    case.wait(dist.reduce(mine, root, async_op=case.asynchronous))
    if case.rank == root:
        case.check(mine, reference.reduced([case.input(r) for r in range(case.world)], SUM))
    else:
        case.check(mine, case.input(case.rank), "a tensor on another rank than the root changed:")


def broadcast(case: Case) -> None:
    root = case.number % case.world
    mine = case.tensor(case.input(case.rank))
    case.wait(dist.broadcast(mine, root, async_op=case.asynchronous))
    case.check(mine, case.input(root))


def all_gather(case: Case) -> None:
    mine = case.tensor(case.input(case.rank))
    outputs = [case.blank() for _ in range(case.world)]
    case.wait(dist.all_gather(outputs, mine, async_op=case.asynchronous))
    for rank, output in enumerate(outputs):
        case.check(output, case.input(rank), f"from rank {rank}:")


def all_gather_uneven(case: Case) -> None:
    rows = [1 + (case.number + rank) % 3 for rank in range(case.world)]
    shapes = [(row, *case.shape) for row in rows]
    flats = [case.pool.flat(case.dtype, rank, case.count * rows[rank], case.number) for rank in range(case.world)]
    outputs = [case.blank(shape) for shape in shapes]
    mine = case.tensor(flats[case.rank], shapes[case.rank])
    case.wait(dist.all_gather(outputs, mine, async_op=case.asynchronous))
    for rank, output in enumerate(outputs):
        case.check(output, flats[rank], f"from rank {rank}:")


def all_gather_into_tensor(case: Case) -> None:
    # Joined along dimension 0, and stacked.
    for shape in (stacked(case, case.world), (case.world, *case.shape)):
        output = case.blank(shape)
        mine = case.tensor(case.input(case.rank))
        case.wait(dist.all_gather_into_tensor(output, mine, async_op=case.asynchronous))
        case.check(output, torch.cat([case.input(rank) for rank in range(case.world)]), f"shape {shape}:")


def all_gather_in_place(case: Case) -> None:
    """The input is this rank's part of the output."""
    whole = torch.empty(case.world * case.count, dtype=case.dtype)
    mine = whole[case.rank * case.count : (case.rank + 1) * case.count]
    mine.copy_(case.input(case.rank))
    case.wait(dist.all_gather_into_tensor(whole, mine, async_op=case.asynchronous))
    case.check(whole, torch.cat([case.input(rank) for rank in range(case.world)]))


def reduce_scatter(case: Case) -> None:
    flats = [case.input(rank, case.world) for rank in range(case.world)]
    mine = (
        [case.tensor(part) for part in flats[case.rank].tensor_split(case.world)]
        if case.count
        else [case.blank() for _ in range(case.world)]
    )
    output = case.blank()
    case.wait(dist.reduce_scatter(output, mine, async_op=case.asynchronous))
    own = slice(case.rank * case.count, (case.rank + 1) * case.count)
    case.check(output, reference.reduced([flat[own] for flat in flats], SUM))


def reduce_scatter_uneven(case: Case) -> None:
    rows = [1 + (case.number + rank) % 3 for rank in range(case.world)]
    start = [case.count * sum(rows[:rank]) for rank in range(case.world + 1)]
    flats = [case.pool.flat(case.dtype, rank, start[-1], case.number) for rank in range(case.world)]
    mine = [case.tensor(flats[case.rank][start[r] : start[r + 1]], (rows[r], *case.shape)) for r in range(case.world)]
    output = case.blank((rows[case.rank], *case.shape))
    case.wait(dist.reduce_scatter(output, mine, async_op=case.asynchronous))
    case.check(output, reference.reduced([flat[start[case.rank] : start[case.rank + 1]] for flat in flats], SUM))


def reduce_scatter_tensor(case: Case) -> None:
    flats = [case.input(rank, case.world) for rank in range(case.world)]
    own = slice(case.rank * case.count, (case.rank + 1) * case.count)
    expected = reference.reduced([flat[own] for flat in flats], SUM)
    for shape in (stacked(case, case.world), (case.world, *case.shape)):
        output = case.blank()
        mine = case.tensor(flats[case.rank], shape)
        case.wait(dist.reduce_scatter_tensor(output, mine, async_op=case.asynchronous))
        case.check(output, expected, f"shape {shape}:")
        case.check(mine, flats[case.rank], "the input changed:")


def reduce_scatter_in_place(case: Case) -> None:
    """The output is this rank's part of the input."""
    flats = [case.input(rank, case.world) for rank in range(case.world)]
    own = slice(case.rank * case.count, (case.rank + 1) * case.count)
    whole = flats[case.rank].clone()
    case.wait(dist.reduce_scatter_tensor(whole[own], whole, async_op=case.asynchronous))
    case.check(whole[own], reference.reduced([flat[own] for flat in flats], SUM))


def gather(case: Case) -> None:
    root = case.number % case.world
    outputs = [case.blank() for _ in range(case.world)] if case.rank == root else None
    mine = case.tensor(case.input(case.rank))
    case.wait(dist.gather(mine, outputs, root, async_op=case.asynchronous))
    for rank, output in enumerate(outputs or []):
        case.check(output, case.input(rank), f"from rank {rank}:")


def scatter(case: Case) -> None:
    root = case.number % case.world
    parts = [case.pool.flat(case.dtype, rank, case.count, case.number + 1) for rank in range(case.world)]
    mine = [case.tensor(part) for part in parts] if case.rank == root else None
    output = case.blank()
    case.wait(dist.scatter(output, mine, root, async_op=case.asynchronous))
    case.check(output, parts[case.rank])


def all_to_all(case: Case) -> None:
    """Lists whose shapes differ between pairs of ranks."""
    rows = [[(case.number + a + 2 * b) % 3 for b in range(case.world)] for a in range(case.world)]

    def part(a: int, b: int) -> torch.Tensor:
        return case.pool.flat(case.dtype, a, case.count * rows[a][b], case.number + b)

    inputs = [case.tensor(part(case.rank, b), (rows[case.rank][b], *case.shape)) for b in range(case.world)]
    outputs = [case.blank((rows[a][case.rank], *case.shape)) for a in range(case.world)]
    case.wait(dist.all_to_all(outputs, inputs, async_op=case.asynchronous))
    for a, output in enumerate(outputs):
        case.check(output, part(a, case.rank), f"from rank {a}:")


def all_to_all_single(case: Case) -> None:
    shape = stacked(case, case.world)
    mine = case.tensor(case.input(case.rank, case.world), shape)
    output = case.blank(shape)
    case.wait(dist.all_to_all_single(output, mine, async_op=case.asynchronous))
    own = slice(case.rank * case.count, (case.rank + 1) * case.count)
    case.check(output, torch.cat([case.input(rank, case.world)[own] for rank in range(case.world)]))


def all_to_all_single_splits(case: Case) -> None:
    rows = [[(case.number + a + 2 * b) % 3 for b in range(case.world)] for a in range(case.world)]
    sends, receives = rows[case.rank], [rows[a][case.rank] for a in range(case.world)]

    def whole(a: int) -> torch.Tensor:
        return case.pool.flat(case.dtype, a, case.count * sum(rows[a]), case.number)

    mine = case.tensor(whole(case.rank), (sum(sends), *case.shape))
    output = case.blank((sum(receives), *case.shape))
    case.wait(dist.all_to_all_single(output, mine, receives, sends, async_op=case.asynchronous))
    parts = [
        whole(a)[case.count * sum(rows[a][: case.rank]) : case.count * sum(rows[a][: case.rank + 1])]
        for a in range(case.world)
    ]
    case.check(output, torch.cat(parts))


MOVING: tuple[Callable[[Case], None], ...] = (
    broadcast,
    all_gather,
    all_gather_uneven,
    all_gather_into_tensor,
    gather,
    scatter,
    all_to_all,
    all_to_all_single,
    all_to_all_single_splits,
)
REDUCING: tuple[Callable[[Case], None], ...] = (
    all_reduce,
    reduce,
    reduce_scatter,
    reduce_scatter_uneven,
    reduce_scatter_tensor,
)


def run_cases(
    rank: int, world: int, calls: Any, cases: Iterator[tuple[torch.dtype, tuple[int, ...], str]], longest: int
) -> list[str]:
    """Runs each call on each case, alternately synchronous and asynchronous; says what went wrong."""
    pool = Pool(world, longest * world)
    wrong = []
    number = 0
    for dtype, shape, layout in cases:
        for call in calls:
            number += 1
            asynchronous = number % 2 == 1
            case = Case(pool, rank, number, dtype, shape, layout, asynchronous)
            try:
                call(case)
            except AssertionError as error:
                wrong.append(f"{call.__name__} {reference.name(dtype)} {shape} {layout} async={asynchronous}: {error}")
            except Exception as error:
                where = f"{call.__name__} {reference.name(dtype)} {shape} {layout} async={asynchronous}"
                raise RuntimeError(f"{where}: {error}\nbefore it: {wrong}") from error
    return wrong


def report(outcomes: Any) -> None:
    lines = [f"rank {rank}: {line}" for rank, wrong in enumerate(values(outcomes)) for line in wrong]
    assert not lines, f"{len(lines)} wrong\n" + "\n".join(lines[:30])


@pytest.mark.parametrize("dtype", reference.ALL, ids=reference.name)
@pytest.mark.parametrize("world", (1, 2, 3, 4))
def test_small(world: int, dtype: torch.dtype) -> None:
    """Every collective on every shape and layout up to some KB."""

    def cases() -> Iterator[tuple[torch.dtype, tuple[int, ...], str]]:
        for shape in SHAPES:
            yield dtype, shape, "contiguous"
        for layout in LAYOUTS[1:]:
            yield dtype, (2, 3, 4, 5), layout
            yield dtype, (5, 13), layout

    report(run_ranks(world, lambda rank: run_cases(rank, world, (*MOVING, *REDUCING), cases(), 8200 * 3)))


@pytest.mark.parametrize("dtype", reference.ALL, ids=reference.name)
@pytest.mark.parametrize("world", (2, 3, 4))
def test_long(world: int, dtype: torch.dtype) -> None:
    """Messages of several chunks: past 1 MB for the narrow types, with an odd tail."""
    count = LONG // torch.empty(0, dtype=dtype).element_size() + 3
    calls = (all_reduce, broadcast, reduce_scatter_tensor, all_gather_into_tensor, all_to_all_single)
    report(run_ranks(world, lambda rank: run_cases(rank, world, calls, iter([(dtype, (count,), "contiguous")]), count)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_long_layouts(layout: str) -> None:
    """Layouts that are copied in and back, in several chunks."""
    shape = (7, 33, 37, 41)
    calls = (*MOVING, *REDUCING)
    dtypes = (torch.float32, torch.bfloat16)
    cases = [(dtype, shape, layout) for dtype in dtypes]
    report(run_ranks(3, lambda rank: run_cases(rank, 3, calls, iter(cases), math.prod(shape) * 3), timeout=60))


@pytest.mark.parametrize("world", (2, 3, 4))
def test_in_place(world: int) -> None:
    """Input and output overlap as torch allows."""
    cases = [(torch.float32, (count,), "contiguous") for count in (1, 7, 2039, 8200, LONG // 4)]
    calls = (all_gather_in_place, reduce_scatter_in_place)
    report(run_ranks(world, lambda rank: run_cases(rank, world, calls, iter(cases), LONG // 4)))


def test_ranks_with_different_layouts() -> None:
    """Elements meet by position in the tensor, however each rank has laid it out."""

    def body(rank: int) -> None:
        for shape in ((2, 3, 4, 5), (4, 16, 64, 65)):
            count = math.prod(shape)
            flats = [torch.arange(count, dtype=torch.float32) + r for r in range(3)]
            mine = laid_out(flats[rank], shape, ("contiguous", "channels_last", "strided")[rank])
            dist.all_reduce(mine)
            assert reference.same_bits(mine, sum(flats[1:], flats[0]))
            mine = laid_out(flats[rank], shape, ("contiguous", "channels_last", "strided")[rank])
            dist.broadcast(mine, 1)
            assert reference.same_bits(mine, flats[1])

    run_ranks(3, body)


def test_views_leave_their_neighbours_alone() -> None:
    """Only the elements of the tensor are written."""

    def body(rank: int) -> None:
        for rows in (5, 2000):
            whole = torch.full((rows, 9), -1.0)
            part = whole[:, 2:7]
            part.fill_(rank + 1.0)
            dist.all_reduce(part)
            assert bool((part == 6).all())
            assert bool((whole[:, :2] == -1).all()) and bool((whole[:, 7:] == -1).all())
            whole = torch.full((rows, 9), -1.0)
            dist.all_gather_into_tensor(whole[:3, 1:3].t(), torch.full((2,), float(rank)))
            assert whole[:3, 1:3].t().reshape(-1).tolist() == [0, 0, 1, 1, 2, 2]
            assert float(whole.sum()) == 6 - (rows * 9 - 6)

    run_ranks(3, body)


def test_overlapping_memory_is_refused() -> None:
    """An expanded tensor has one element in many places: writing to it would be wrong."""

    def body(rank: int) -> str:
        expanded = torch.ones(1).expand(4)
        with pytest.raises((ValueError, RuntimeError)) as info:
            dist.all_reduce(expanded)
        tensor = torch.ones(4)
        dist.all_reduce(tensor)
        assert float(tensor.sum()) == 8
        return str(info.value)

    for message in values(run_ranks(2, body)):
        assert "share memory" in message, message


def test_more_ranks_than_cores() -> None:
    """Eight ranks take turns on the cores; nobody starves."""

    def body(rank: int) -> None:
        for count in (1, 1000, 100_000):
            for _ in range(5):
                tensor = torch.full((count,), float(rank))
                dist.all_reduce(tensor)
                assert bool((tensor == 28).all())

    run_ranks(8, body)


def test_barrier_holds_everybody() -> None:
    """Nobody passes a barrier before the last one has reached it."""

    def body(rank: int) -> None:
        folder = Path(os.environ["RANKS_FOLDER"])
        for turn in range(4):
            if rank == turn % 4:
                time.sleep(0.05)
            (folder / f"came-{turn}-{rank}").touch()
            dist.barrier()
            assert len(list(folder.glob(f"came-{turn}-*"))) == 4

    run_ranks(4, body)

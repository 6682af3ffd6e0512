"""Every collective on several nodes compared with the two-level definition: bit for bit, on every rank."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import expected
import pytest
import torch
import torch.distributed as dist
from cases import FACTORS, Case, Reference, long_inputs, long_sum, shared
from collectives import MOVING, ON_CPU, REDUCING, ROOTED, make, prefixes, run
from launch import nodes_of, on_nodes, run_nodes

#: Numbers of elements: none, one, a few, and, in float32, enough for one rail and for all rails.
COUNTS = (0, 1, 37, 4099, 33_001)
#: Lengths of a reduction: within a slot, on one rail, on all rails, with few pipeline steps and with many.
LENGTHS = (*(10**power for power in range(5)), 32 << 10, (32 << 10) + 1, *(10**power for power in range(5, 8)))
#: Number of bytes that all rails carry together, in several pipeline steps.
LONG = 300_000
FLOAT32 = torch.float32
SERVED = [(op, dtype) for dtype in expected.DTYPES for op in expected.OPS if expected.served(op, dtype)]


@lru_cache
def two_level(layout: Sequence[int]) -> Reference:
    """The expected results for nodes with these numbers of ranks."""
    return partial(expected.two_level, nodes=nodes_of(layout))


def reducing(
    reductions: Sequence[tuple[str, torch.dtype, int]], rank: int, world: int, **options: Any
) -> Iterator[tuple[str, Case]]:
    """Every form of each reduction: its op, type and number of elements."""
    for op, dtype, count in reductions:
        for form in REDUCING:
            yield form, Case(rank, world, dtype, count, op=op, root=world - 1, **options)


def moving(rank: int, world: int) -> Iterator[tuple[str, Case]]:
    for dtype, count in [(FLOAT32, count) for count in COUNTS] + [(torch.int8, 37), (torch.complex128, 5)]:
        for form in MOVING:
            yield form, Case(rank, world, dtype, count)
        for root in range(world):
            for form in ROOTED:
                yield form, Case(rank, world, dtype, count, root=root)


def reductions(rank: int, world: int, layout: Sequence[int]) -> Iterator[tuple[str, Case]]:
    few = [(op, FLOAT32, count) for op in ("SUM", "AVG", "PREMUL_SUM") for count in COUNTS]
    few += [(op, dtype, 37) for op, dtype in SERVED] + [("SUM", torch.bfloat16, 300_001)]
    return reducing(few, rank, world, reference=two_level(layout))


def everything(rank: int, world: int, layout: Sequence[int]) -> None:
    reference = two_level(layout)
    run(reductions(rank, world, layout))
    run(moving(rank, world))
    run(
        (form, Case(rank, world, FLOAT32, 1200, how, asynchronous, reference=reference))
        for form in ON_CPU
        for how, asynchronous in (("contiguous", True), ("offset", False))
    )
    run([("all_reduce", Case(rank, world, FLOAT32, 1200, "transposed", reference=reference))])
    many = [torch.full((1200,), float(rank + number)) for number in range(5)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in many]
    dist.barrier()
    for number, work in enumerate(works):
        (got,) = work.get_future().wait()
        work.wait()
        wanted = world * number + world * (world - 1) / 2
        assert bool((got == wanted).all()) and bool((many[number] == wanted).all())
    dist.group.WORLD._get_backend(torch.device("cpu")).monitored_barrier()
    everybody: list[Any] = [None] * world
    dist.all_gather_object(everybody, {"rank": rank})
    assert everybody == [{"rank": other} for other in range(world)]


@pytest.mark.parametrize("layout", [(2, 2), (3, 1), (1, 1), (2, 3, 1), (1, 2, 1, 1)], ids=str)
def test_collectives(layout: Sequence[int]) -> None:
    with shared():
        make(reductions(0, sum(layout), layout))
        run_nodes(everything, layout, layout)


def long_cases(rank: int, world: int, layout: Sequence[int]) -> Iterator[tuple[str, Case]]:
    return (
        (form, Case(rank, world, dtype, LONG // dtype.itemsize + 3, op=op, root=world - 1, reference=two_level(layout)))
        for op, dtype in SERVED
        for form in ("all_reduce", "reduce", "reduce_scatter_tensor")
    )


def long_reductions(rank: int, world: int, layout: Sequence[int]) -> None:
    run(long_cases(rank, world, layout))


@pytest.mark.parametrize("layout", [(2, 2), pytest.param((2, 1, 1), marks=pytest.mark.slow)], ids=str)
def test_long_reductions_of_every_type(layout: Sequence[int]) -> None:
    with shared():
        make(long_cases(0, sum(layout), layout))
        run_nodes(long_reductions, layout, layout)


def every_length(rank: int, world: int, layout: Sequence[int], dtypes: Sequence[torch.dtype]) -> None:
    prefixes(rank, world, two_level(layout), LENGTHS, dtypes)


THREE = (FLOAT32, torch.bfloat16, torch.int8)


@pytest.mark.parametrize(
    ("layout", "dtypes"),
    [((2, 2), THREE), ((1, 2, 1), (torch.float16,)), pytest.param((1, 1, 2), THREE, marks=pytest.mark.slow)],
    ids=["two nodes", "three nodes", "three nodes, every type"],
)
def test_sums_of_every_length(layout: Sequence[int], dtypes: Sequence[torch.dtype]) -> None:
    with shared():
        for dtype in dtypes:
            long_sum(two_level(layout), "SUM", dtype, LENGTHS[-1], sum(layout))
        run_nodes(every_length, layout, layout, dtypes)


def every_op(rank: int, world: int, layout: Sequence[int], dtypes: Sequence[torch.dtype]) -> None:
    """Every operation on every length but the longest, which only adds pipeline steps; ``every_length`` has it."""
    for op, dtype in [(op, dtype) for op, dtype in SERVED if dtype in dtypes]:
        own = long_inputs(dtype, LENGTHS[-2], world)[rank]
        wanted = long_sum(two_level(layout), op, dtype, LENGTHS[-2], world)
        for length in LENGTHS[:-1]:
            dist.all_reduce(got := own[:length].clone(), expected.op_of(op, FACTORS[rank]))
            expected.assert_same(got, wanted[:length], (op, dtype, length))


def peak() -> int:
    """The largest number of bytes of memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@on_nodes(2, 2)
def test_an_all_gather_into_a_list_takes_no_memory_of_its_length(rank: int, world_size: int) -> None:
    own, whole = (
        torch.full((16 << 20,), rank, dtype=torch.uint8),
        torch.ones(world_size * (16 << 20), dtype=torch.uint8),
    )
    outputs = [torch.full_like(own, 255) for _ in range(world_size)]
    # Needs the same memory for data in transit.
    dist.all_gather_into_tensor(whole, own)
    before = peak()
    dist.all_gather(outputs, own)
    more = peak() - before
    assert all(bool((output == other).all()) for other, output in enumerate(outputs))
    # A copy of the other node's data would take two times the length of the input.
    assert more < own.nbytes, f"{more >> 20} MiB more"


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtypes",
    [expected.FLOATS, expected.INTEGERS, (torch.bool, *expected.COMPLEX)],
    ids=["floats", "integers", "bool and complex"],
)
def test_reductions_of_every_type_and_length(dtypes: Sequence[torch.dtype]) -> None:
    with shared():
        for op, dtype in [(op, dtype) for op, dtype in SERVED if dtype in dtypes]:
            long_sum(two_level((2, 2)), op, dtype, LENGTHS[-2], 4)
        run_nodes(every_op, (2, 2), (2, 2), dtypes)

"""Every collective on several hosts, against the two-level definition: bit for bit, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import expected
import pytest
import torch
import torch.distributed as dist
from machines import hosts_of, run_hosts

#: Elements: none, one, odd, at both sides of what one rail carries, more than a chunk of it.
COUNTS = (0, 1, 37, 4099, 33_001)


def two_level(op: str, inputs: Sequence[torch.Tensor], layout: Sequence[int]) -> torch.Tensor:
    """The ranks of each host in order, rounded once, then the hosts in order, rounded once."""
    dtype, n = inputs[0].dtype, len(inputs)
    factors = [rank + 0.5 for rank in range(n)]
    if op == "AVG" and dtype in expected.INTEGERS:
        return expected.reduced(op, inputs)
    parts, at = [], 0
    for count in layout:
        parts.append(expected.reduced(op, inputs[at : at + count], factors[at : at + count]))
        at += count
    if op == "AVG" and len(set(layout)) > 1:
        return expected.reduced("PREMUL_SUM", parts, [count / n for count in layout])
    return expected.reduced("SUM" if op == "PREMUL_SUM" else op, parts)


def check_reductions(
    cases: Sequence[tuple[str, torch.dtype, int]],
    reference: Callable[[str, Sequence[torch.Tensor], Sequence[int]], torch.Tensor],
    rank: int,
    layout: Sequence[int],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Compares every form of a reduction with ``reference`` for each op, dtype and number of elements of ``cases``."""
    world_size = sum(layout)
    for op, dtype, count in cases:
        about = (op, dtype, count, rank)
        reduce_op = expected.op_of(op, rank + 0.5)
        inputs = [expected.seeded(dtype, (count,), other) for other in range(world_size)]
        wanted = reference(op, inputs, layout)
        got = inputs[rank].clone()
        dist.all_reduce(got, reduce_op, group)
        expected.assert_same(got, wanted, about)
        root = world_size - 1
        got = inputs[rank].clone()
        dist.reduce(got, root, reduce_op, group)
        expected.assert_same(got, wanted if rank == root else inputs[rank], about)
        # Of another length for each rank.
        lists = [
            [expected.seeded(dtype, (count + to,), 100 * other + to) for to in range(world_size)]
            for other in range(world_size)
        ]
        got = torch.empty(count + rank, dtype=dtype)
        dist.reduce_scatter(got, lists[rank], reduce_op, group)
        expected.assert_same(got, reference(op, [lists[other][rank] for other in range(world_size)], layout), about)


def reductions(rank: int, world_size: int, layout: Sequence[int]) -> None:
    cases = [(op, torch.float32, count) for op in ("SUM", "AVG", "PREMUL_SUM") for count in COUNTS]
    cases += [(op, dtype, 37) for dtype in expected.DTYPES for op in expected.OPS if expected.served(op, dtype)]
    cases += [("SUM", torch.bfloat16, 300_001)]
    check_reductions(cases, two_level, rank, layout)


def movements(rank: int, world_size: int, _layout: Sequence[int]) -> None:
    for dtype, count in [(torch.float32, count) for count in COUNTS] + [(torch.int8, 37), (torch.complex128, 5)]:
        about = (dtype, count, rank)
        inputs = [expected.seeded(dtype, (count,), other) for other in range(world_size)]
        for root in range(world_size):
            got = inputs[rank].clone()
            dist.broadcast(got, root)
            expected.assert_same_bits(got, inputs[root], about)
            pieces = [torch.empty_like(inputs[0]) for _ in range(world_size)] if rank == root else None
            dist.gather(inputs[rank], pieces, root)
            for piece, wanted in zip(pieces or [], inputs, strict=False):
                expected.assert_same_bits(piece, wanted, about)
            dist.scatter(got, list(inputs) if rank == root else None, root)
            expected.assert_same_bits(got, inputs[rank], about)
        whole = torch.empty(world_size * count, dtype=dtype)
        dist.all_gather_into_tensor(whole, inputs[rank])
        expected.assert_same_bits(whole, torch.cat(inputs), about)
        lists = [torch.empty(count + other, dtype=dtype) for other in range(world_size)]
        dist.all_gather(lists, expected.seeded(dtype, (count + rank,), rank))
        for other, got in enumerate(lists):
            expected.assert_same_bits(got, expected.seeded(dtype, (count + other,), other), about)
        sent = [expected.seeded(dtype, (count * (to % 2) + rank,), 100 * rank + to) for to in range(world_size)]
        took = [torch.empty(count * (rank % 2) + other, dtype=dtype) for other in range(world_size)]
        dist.all_to_all_single(
            flat := torch.empty(sum(map(len, took)), dtype=dtype),
            torch.cat(sent),
            list(map(len, took)),
            list(map(len, sent)),
        )
        wanted = [expected.seeded(dtype, (len(took[other]),), 100 * other + rank) for other in range(world_size)]
        expected.assert_same_bits(flat, torch.cat(wanted), about)
        dist.all_to_all(took, sent)
        expected.assert_same_bits(torch.cat(took), torch.cat(wanted), about)
    dist.barrier()
    dist.group.WORLD._get_backend(torch.device("cpu")).monitored_barrier()
    everybody: list[Any] = [None] * world_size
    dist.all_gather_object(everybody, {"rank": rank})
    assert everybody == [{"rank": other} for other in range(world_size)]


def layouts_of_tensors(rank: int, world_size: int, layout: Sequence[int]) -> None:
    inputs = [expected.seeded(torch.float32, (40, 30), other) for other in range(world_size)]
    wanted = two_level("SUM", inputs, layout)
    strided = inputs[rank].t().contiguous().t()
    dist.all_reduce(strided)
    expected.assert_same_bits(strided, wanted, "strided")
    works = []
    many = [inputs[rank].clone() for _ in range(5)]
    for tensor in many:
        works.append(dist.all_reduce(tensor, async_op=True))
    dist.barrier()
    for work in works:
        work.wait()
    for tensor in many:
        expected.assert_same_bits(tensor, wanted, "asynchronous")
    work = dist.all_reduce(tensor := inputs[rank].clone(), async_op=True)
    (got,) = work.get_future().wait()
    expected.assert_same_bits(got, wanted, "future")
    with dist._coalescing_manager():
        coalesced = [inputs[rank].clone() for _ in range(3)]
        for tensor in coalesced:
            dist.all_reduce(tensor)
    for tensor in coalesced:
        expected.assert_same_bits(tensor, wanted, "coalesced")


def sizes(rank: int, world_size: int, layout: Sequence[int]) -> None:
    """One sum at every length: a prefix of a longer one has the same bits."""
    count = 5_000_001
    inputs = [expected.seeded(torch.float16, (count,), other) for other in range(world_size)]
    wanted = two_level("SUM", inputs, layout)
    for length in (1, 1000, 32 << 10, (32 << 10) + 1, 600_000, count):
        got = inputs[rank][:length].clone()
        dist.all_reduce(got)
        expected.assert_same(got, wanted[:length], length)


@pytest.mark.parametrize("layout", [(2, 2), (3, 1), (1, 1), (2, 3, 1), (1, 2, 1, 1)], ids=str)
def test_collectives(layout: Sequence[int]) -> None:
    def everything(rank: int, world_size: int) -> None:
        reductions(rank, world_size, layout)
        movements(rank, world_size, layout)
        layouts_of_tensors(rank, world_size, layout)

    run_hosts(everything, layout)


@pytest.mark.parametrize("layout", [(2, 2), (1, 2, 1)], ids=str)
def test_bits_do_not_depend_on_the_length(layout: Sequence[int]) -> None:
    run_hosts(sizes, layout, layout)


def test_hosts_of_a_layout() -> None:
    assert hosts_of((2, 3, 1)) == [0, 0, 1, 1, 1, 2]

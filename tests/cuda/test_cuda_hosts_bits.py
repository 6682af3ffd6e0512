"""Reductions of CUDA tensors on several hosts against the two-level definition: every type and operation, long.

Every power of ten, too, and what goes in several chunks. ``test_cuda_hosts.py`` says how one machine plays hosts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expected
import pytest
import torch
import torch.distributed as dist
from pool import DEVICE, GPUS, PLACES, Pool, device
from test_cuda_hosts import hosts, run_hosts, served, two_level

__all__ = ["hosts"]

pytestmark = pytest.mark.skipif(
    DEVICE != "cuda" or GPUS < 1 or PLACES < 4, reason="needs four GPUs, or one and SYMM_SHARED_GPUS=1"
)

#: Bytes of a tensor that all rails carry.
LONG = 300_000
LENGTHS = tuple(10**power for power in range(8))


def long_reductions(rank: int, world: int) -> int:
    cases = [(op, dtype) for dtype in expected.DTYPES for op in expected.OPS if served(op, dtype)]
    for op, dtype in cases:
        count, about = LONG // dtype.itemsize + 3, (op, dtype, rank)
        reduce_op = expected.op_of(op, rank + 0.5)
        inputs = [expected.seeded(dtype, (world * count,), other) for other in range(world)]
        wanted = two_level(op, inputs)
        whole = inputs[rank].to(device())
        got = whole[:count].clone()
        dist.all_reduce(got, reduce_op)
        expected.assert_same(got.cpu(), wanted[:count], ("all_reduce", *about))
        dist.reduce_scatter_tensor(got, whole, reduce_op)
        mine = slice(rank * count, (rank + 1) * count)
        expected.assert_same(got.cpu(), wanted[mine], ("reduce_scatter", *about))
        got = whole[:count].clone()
        dist.reduce(got, world - 1, reduce_op)
        right = wanted if rank == world - 1 else inputs[rank]
        expected.assert_same(got.cpu(), right[:count], ("reduce", *about))
    return len(cases)


def lengths(rank: int, world: int) -> int:
    """A prefix of a longer sum has the same bits, whatever way it goes."""
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        inputs = [expected.seeded(dtype, (LENGTHS[-1],), other) for other in range(world)]
        wanted = two_level("SUM", inputs)
        whole = inputs[rank].to(device())
        for length in LENGTHS:
            got = whole[:length].clone()
            dist.all_reduce(got)
            expected.assert_same(got.cpu(), wanted[:length], ("all_reduce", dtype, length))
            each = length // world
            got = torch.empty(each, dtype=dtype, device=device())
            dist.reduce_scatter_tensor(got, whole[: each * world].clone())
            part = wanted[rank * each : (rank + 1) * each]
            expected.assert_same(got.cpu(), part, ("reduce_scatter", dtype, length))
    return len(LENGTHS)


def chunks(rank: int, world: int) -> int:
    """Calls of several chunks; a reduce_scatter from one tensor and from a list."""
    dtype, count = torch.bfloat16, 18_000_001
    inputs = [(expected.seeded(torch.int8, (count,), other) >> 2).to(dtype) for other in range(world)]
    for form in ("tensor", "list"):
        got = torch.empty(count, dtype=dtype, device=device())
        mine = inputs[rank].to(device())
        if form == "tensor":
            dist.reduce_scatter_tensor(got, mine.repeat(world))
        else:
            dist.reduce_scatter(got, [mine.clone() for _ in range(world)])
        # Small integers: every order and rounding gives the same.
        wanted = sum(inputs[1:], inputs[0].clone())
        expected.assert_same_bits(got.cpu(), wanted, (form, rank))
    mine = inputs[rank].to(device())
    got, wide, copied = mine.clone(), torch.empty(world * count, dtype=dtype, device=device()), mine.clone()
    given = mine.clone()

    def body() -> None:
        got.copy_(given)
        dist.all_reduce(got)
        dist.all_gather_into_tensor(wide, mine)
        dist.broadcast(copied, 1)

    def check(about: str) -> None:
        expected.assert_same_bits(got.cpu(), wanted, ("all_reduce", about, rank))
        expected.assert_same_bits(wide.cpu(), torch.cat(inputs), ("all_gather", about, rank))
        expected.assert_same_bits(copied.cpu(), inputs[1], ("broadcast", about, rank))

    body()
    check("at once")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    for tensor in (got, wide):
        tensor.zero_()
    copied.copy_(mine)
    graph.replay()
    check("in a graph")
    return count


@pytest.mark.parametrize("world", (2, 4))
@pytest.mark.parametrize("scenario", [long_reductions, lengths], ids=lambda fn: fn.__name__)
def test_bits(hosts: Pool, scenario: Callable[..., Any], world: int) -> None:
    assert min(run_hosts(hosts, scenario, world)) > 7


@pytest.mark.parametrize("partials", ("tensor", "fp32"))
@pytest.mark.parametrize("world", (2, 4))
def test_chunks(hosts: Pool, world: int, partials: str) -> None:
    run_hosts(hosts, chunks, world, partials=partials)

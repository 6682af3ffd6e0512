"""Long reductions of CUDA tensors on several nodes, of every type and operation, compared with their definition.

Lengths are also powers of ten, and several chunks. ``test_cuda_internode.py`` says how one machine acts as nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expected
import pytest
import torch
import torch.distributed as dist
from cases import Case
from collectives import prefixes, run
from pool import Pool, captured, device
from test_cuda_internode import needs_nodes, nodes, of_nodes, run_nodes, served, two_level

__all__ = ["nodes"]

pytestmark = needs_nodes

#: Number of bytes that all rails carry together.
LONG = 300_000
LENGTHS = tuple(10**power for power in range(8))


def long_reductions(rank: int, world: int) -> int:
    return run(
        (form, Case(rank, world, dtype, LONG // dtype.itemsize + 3, op=op, root=world - 1, **of_nodes()))
        for dtype in expected.DTYPES
        for op in expected.OPS
        if served(op, dtype)
        for form in ("all_reduce", "reduce_scatter_tensor", "reduce")
    )


def lengths(rank: int, world: int) -> int:
    prefixes(rank, world, two_level, LENGTHS, (torch.float32, torch.bfloat16, torch.int8), device())
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
        # Small integers: every order and rounding gives the same result.
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
    graph = captured(body)
    for tensor in (got, wide):
        tensor.zero_()
    copied.copy_(mine)
    graph.replay()
    check("in a graph")
    return count


@pytest.mark.parametrize("world", (2, 4))
@pytest.mark.parametrize("scenario", [long_reductions, lengths], ids=lambda fn: fn.__name__)
def test_bits(nodes: Pool, scenario: Callable[..., Any], world: int) -> None:
    assert min(run_nodes(nodes, scenario, world)) > 7


@pytest.mark.parametrize("reduce_dtype", ("tensor", "float32"))
@pytest.mark.parametrize("world", (2, 4))
def test_chunks(nodes: Pool, world: int, reduce_dtype: str) -> None:
    run_nodes(nodes, chunks, world, reduce_dtype=reduce_dtype)

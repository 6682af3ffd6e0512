"""torch.ops.symm.all_reduce on GPUs: the bits of dist.all_reduce, also in graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from norm_reference import numbers, same_bits
from pool import WORLDS, Pool, device, needs_gpus, needs_ranks, settle

pytestmark = needs_ranks

ops: Any = torch.ops.symm
#: Numbers of elements for one-shot, two-shot and staged sums.
COUNTS = (1, 8192, 300_001, 1 << 20)


def bits(rank: int, world: int) -> None:
    name = dist.group.WORLD.group_name
    for dtype in (torch.bfloat16, torch.float32, torch.int32):
        for count in COUNTS:
            own = (numbers(rank, count, dtype=torch.float32) * 9).to(device(), dtype)
            for reduction, redop in (("sum", dist.ReduceOp.SUM), ("max", dist.ReduceOp.MAX)):
                wanted, before = own.clone(), own.clone()
                dist.all_reduce(wanted, redop)
                got = ops.all_reduce(own, reduction, name)
                settle()
                assert same_bits(got, wanted) and same_bits(own, before), (dtype, count, reduction)


@pytest.mark.parametrize("world", WORLDS)
def test_bits_are_those_in_place(pool: Pool, world: int) -> None:
    pool.run(bits, world)


def graphs(rank: int, world: int) -> None:
    name = dist.group.WORLD.group_name
    for count in COUNTS:
        own = numbers(rank, count, dtype=torch.bfloat16).to(device())
        ops.all_reduce(own, "sum", name)
        settle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            total = ops.all_reduce(own, "sum", name)
            twice = total + ops.all_reduce(own, "sum", name)
        for seed in (1, 2):
            own.copy_(numbers(10 * seed + rank, count, dtype=torch.bfloat16))
            graph.replay()
            wanted = own.clone()
            dist.all_reduce(wanted)
            settle()
            assert same_bits(total, wanted) and same_bits(twice, wanted + wanted), (count, seed)


@needs_gpus
def test_replays_of_a_graph(pool: Pool) -> None:
    pool.run(graphs, 2)

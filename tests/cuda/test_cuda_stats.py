"""``torch_symm.stats()`` names an algorithm for each collective that was called."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch_symm
from pool import WORLDS, Pool, device, needs_gpus, settle

pytestmark = needs_gpus

CALLS = {
    "all_reduce": lambda tensor, world: dist.all_reduce(tensor),
    "all_gather": lambda tensor, world: dist.all_gather_into_tensor(tensor.repeat(world), tensor),
    "reduce_scatter": lambda tensor, world: dist.reduce_scatter_tensor(tensor, tensor.repeat(world)),
    "all_to_all": lambda tensor, world: dist.all_to_all_single(tensor.repeat(world), tensor.repeat(world)),
    "broadcast": lambda tensor, world: dist.broadcast(tensor, 0),
}


def named(rank: int, world: int) -> dict[str, dict[str, int]]:
    before = torch_symm.stats()
    for call in CALLS.values():
        for count in (10, 40_000, 1_000_000):
            call(torch.ones(count, device=device()), world)
    settle()
    after = torch_symm.stats()
    return {
        op: {name: count - before.get(op, {}).get(name, 0) for name, count in after.get(op, {}).items()} for op in CALLS
    }


@pytest.mark.parametrize("world", WORLDS)
def test_every_call_has_an_algorithm(pool: Pool, world: int) -> None:
    for found in pool.run(named, world):
        assert all(sum(served.values()) == 3 for served in found.values()), found
        assert all(name for served in found.values() for name in served), found

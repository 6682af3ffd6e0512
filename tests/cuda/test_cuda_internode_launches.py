"""Kernels that multi-node calls of CUDA tensors enqueue, without waiting for a GPU or a node.

``test_cuda_internode.py`` says how one machine acts as nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool, device
from test_cuda_internode import needs_nodes, nodes, run_nodes
from torch_symm.tools.tune import inter_node as tuning

__all__ = ["nodes"]

pytestmark = needs_nodes


def calls(world: int, count: int) -> dict[str, Callable[[], Any]]:
    """Calls on tensors of ``count`` numbers for each rank."""
    mine, wide = torch.ones(count, device=device()), torch.ones(world * count, device=device())
    return {
        "all_reduce": lambda: dist.all_reduce(mine),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(mine, wide),
        "all_gather": lambda: dist.all_gather_into_tensor(wide, mine),
        "broadcast": lambda: dist.broadcast(mine, 0),
        "all_to_all": lambda: dist.all_to_all_single(wide, torch.ones_like(wide)),
    }


#: Letters of kernels, by the start of their names. Kernels that fill tensors, and profiler annotations, have no letter.
LETTERS = {"ncclDevKernel": "n", "sum_partials": "s", "reduce_": "r", "exchange": "e"}

#: Kernels of a rank that is alone on its node; on nodes of two ranks, of a rank whose rail carries the call, and of the
#: other rank. On nodes of two ranks, a reduce_scatter has a separate reduction for each node.
ALONE = {"all_reduce": "ns", "reduce_scatter": "ns", "all_gather": "n", "broadcast": "n", "all_to_all": "n"}
RAILED = {"all_reduce": "enrs", "reduce_scatter": "enrrs", "all_gather": "een", "broadcast": "en", "all_to_all": "en"}
OTHERS = {"all_reduce": "er", "reduce_scatter": "err", "all_gather": "ee", "broadcast": "e", "all_to_all": "en"}


def kernels(call: Callable[[], Any]) -> str:
    """Letters of the kernels that ``call`` enqueues here, in the order of the alphabet."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    events = profile.events() or []
    names = [event.name for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    return "".join(sorted(letter for name in names for start, letter in LETTERS.items() if name.startswith(start)))


def counted(rank: int, world: int) -> dict[str, dict[str, str]]:
    """Kernels of short calls, which use one rail, and of long ones, which use all."""
    found: dict[str, dict[str, str]] = {}
    for count in (1000, 1 << 20):
        for name, call in calls(world, count).items():
            call()
            torch.cuda.synchronize()
            dist.barrier()
            found.setdefault("short" if count == 1000 else "long", {})[name] = kernels(call)
    return found


def returns(rank: int, world: int) -> int:
    """Calls return although the other node has made none yet, including long ones of several chunks."""
    store = dist.distributed_c10d._get_default_store()
    done = 0
    for count in (1000, 12_000_000):
        for name, call in calls(world, count).items():
            call()
            torch.cuda.synchronize()
            dist.barrier()
            key = f"{name} of {count} has returned"
            if rank % 2 == 0:
                call()
                ended = torch.cuda.Event()
                ended.record()
                # A broadcast from this node need not wait for the others.
                assert name == "broadcast" or not ended.query(), (name, count)
                store.add(key, 1)
            else:
                store.wait([key], timedelta(seconds=30))
                call()
            torch.cuda.synchronize()
            done += 1
    return done


def tuned(rank: int, world: int) -> dict[str, Any]:
    return tuning.measure(1.0, "cuda", around=(16 << 10, 256 << 10), turns=(8 << 20,), pieces=(2 << 20, 16 << 20))


@pytest.mark.parametrize("world", (2, 4))
def test_kernels_of_a_call(nodes: Pool, world: int) -> None:
    for rank, found in enumerate(run_nodes(nodes, counted, world)):
        railed = ALONE if world == 2 else RAILED
        assert found == {"short": railed if rank < 2 else OTHERS, "long": railed}, rank


@pytest.mark.parametrize("world", (2, 4))
def test_calls_return_before_the_other_node_has_come(nodes: Pool, world: int) -> None:
    assert run_nodes(nodes, returns, world) == [10] * world


@pytest.mark.parametrize("world", (2, 4))
def test_all_ranks_find_the_same_thresholds(nodes: Pool, world: int) -> None:
    results = run_nodes(nodes, tuned, world)
    assert all(found == results[0] for found in results)
    found = results[0]
    assert (found["backend"], found["nodes"], len(found["rails"])) == ("nccl", 2, world // 2)
    assert all(rails["gb_per_s"] > 0 and rails["us"] > 0 for rails in found["rails"])
    assert found["thresholds"]["chunk_bytes"] in (2 << 20, 16 << 20)
    assert found["gb_per_s"] == pytest.approx(found["rails"][-1]["gb_per_s"] / (world // 2), abs=1e-3)

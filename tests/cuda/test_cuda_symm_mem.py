"""torch's symmetric-memory API on this package's memory: windows, signals, graphs, torch's own operators, faults.

Also runs on CPU tensors (SYMM_TEST_DEVICE=cpu), except for tests that need streams.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch_symm.symm_mem as ours
import windows
from pool import WORLDS, Pool, captured, device, init, meet, needs_gpus, needs_ranks, settle
from windows import SCENARIOS, Here, group_name, kept, pad_is_clear
from zero_copy import new_pool

pytestmark = needs_ranks


def here() -> Here:
    return Here(device(), init, meet, settle)


def on_device(rank: int, world: int, scenario: Callable[..., Any], *arguments: Any) -> Any:
    return scenario(rank, world, here(), *arguments)


def opened(*shape: int) -> tuple[torch.Tensor, Any]:
    return windows.opened(here(), *shape)


@pytest.mark.parametrize("scenario", [*SCENARIOS, windows.operators], ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("world", WORLDS)
def test_windows(pool: Pool, world: int, scenario: Callable[..., Any]) -> None:
    for found in pool.run(on_device, world, scenario):
        assert not found or max(found) - min(found) < 64 << 20, found


# proves P21
@pytest.mark.parametrize("what", ["wait_signal", "put_signal", "barrier"])
@pytest.mark.parametrize("world", WORLDS)
def test_a_peer_that_never_signals_is_named(pool: Pool, world: int, what: str) -> None:
    pool.run(on_device, world, windows.late, what)


# proves P2
@pytest.mark.parametrize("world", WORLDS)
def test_a_killed_peer_ends_the_barrier(pool: Pool, world: int) -> None:
    texts = pool.run(on_device, world, windows.killed, killed=[world - 1])
    assert all(f"rank {world - 1}" in text for text in texts[:-1]), texts


def streams(rank: int, world: int) -> None:
    """Barriers of two streams on two channels, in a different order on every rank."""
    _, window = opened(16)
    two = [torch.cuda.Stream() for _ in range(2)]
    for turn in range(50):
        for channel in (0, 1) if (rank + turn) % 2 else (1, 0):
            with torch.cuda.stream(two[channel]):
                window.barrier(channel=channel)
    settle()
    assert pad_is_clear(window)


def graphs(rank: int, world: int) -> None:
    tensor, window = opened(256)
    after, before = (rank + 1) % world, (rank - 1) % world
    theirs, source = window.get_buffer(after, (256,), torch.float32), torch.zeros(256, device=device())

    def step() -> torch.Tensor:
        window.barrier(channel=0)
        theirs.copy_(source)
        window.put_signal(after, channel=1)
        window.wait_signal(before, channel=1)
        return tensor * 2

    result = torch.empty(256, device=device())
    graph = captured(lambda: result.copy_(step()))
    for turn in range(30):
        source.fill_(100 * turn + rank)
        graph.replay()
        assert bool((result == 2 * (100 * turn + before)).all())
        if turn % 5 == 0:
            source.fill_(7)
            assert bool((step() == 14).all())
    assert pad_is_clear(window)


def kept_of_a_pool(rank: int, world: int) -> None:
    pools = [new_pool()]

    def make() -> torch.Tensor:
        with torch.cuda.use_mem_pool(pools[0]):
            return torch.empty(1 << 20, device=device())

    kept(rank, world, here(), make, pools.clear)


def given_back(rank: int, world: int) -> None:
    """Memory is free again once the tensor, the handle and the view are dropped, in any order."""
    opened(4)
    settle()
    dist.barrier()
    before = torch.cuda.mem_get_info()[0]
    bytes_ = 256 << 20
    for last in range(3):
        for _ in range(4):
            tensor, window = opened(bytes_ // 4)
            held = [[tensor], [window], [window.get_buffer(rank, (8,), torch.float32)]]
            window.barrier()
            del tensor, window
            settle()
            dist.barrier()
            for step in (1, 2):
                held[(last + step) % 3].clear()
            assert before - torch.cuda.mem_get_info()[0] > bytes_ // 2
            dist.barrier()
            held[last].clear()
            dist.barrier()
        assert before - torch.cuda.mem_get_info()[0] < bytes_ // 2, f"{last} was the last"
        dist.barrier()


def recorded(rank: int, world: int) -> None:
    """Memory that a graph has recorded stays as long as its group, even if nothing else refers to it."""
    tensor, window = opened(1 << 20)
    tensor.fill_(7 + rank)
    theirs = window.get_buffer((rank + 1) % world, (1 << 20,), torch.float32)
    out = torch.zeros(1 << 20, device=device())

    def step(window: Any, theirs: torch.Tensor) -> None:
        window.barrier()
        out.copy_(theirs)
        window.barrier(channel=1)

    graph = captured(partial(step, window, theirs))
    dist.barrier()
    del tensor, window, theirs
    gc.collect()
    others = [opened(1 << 20) for _ in range(3)]
    for _ in range(5):
        out.zero_()
        graph.replay()
        assert bool((out == 7 + (rank + 1) % world).all())
    assert not any(bool(other.any()) for other, _ in others)
    dist.barrier()


def pools(rank: int, world: int) -> None:
    """Tensors of a pool are symmetric memory; sub-groups and two groups on one allocation stay separate."""
    assert ours.get_mem_pool(device()) is ours.get_mem_pool("cuda") and ours.get_backend("cuda") == "SYMM"
    peer, second = (rank + 1) % world, dist.new_group(list(range(world)))
    for memory in (symm_mem.get_mem_pool(device()), ours.get_mem_pool("cuda")):
        with torch.cuda.use_mem_pool(memory):
            tensor = torch.full((1 << 16,), float(rank), device=device())
        window = symm_mem.rendezvous(tensor, group_name())
        window.barrier()
        assert bool((window.get_buffer(peer, (1 << 16,), torch.float32) == peer).all())
        assert bool((window.get_remote_tensor(peer, (1 << 16,), torch.float32) == peer).all())
        other = symm_mem.rendezvous(tensor, second.group_name)
        other.barrier(channel=1)
        window.barrier(channel=1)
        settle()


@needs_gpus
@pytest.mark.parametrize("body", (streams, graphs, kept_of_a_pool, given_back, recorded, pools))
@pytest.mark.parametrize("world", WORLDS)
def test_streams_graphs_and_memory(pool: Pool, world: int, body: Callable[..., None]) -> None:
    pool.run(body, world)

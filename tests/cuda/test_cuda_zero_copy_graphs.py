"""CUDA graphs over symmetric memory: zero-copy at every replay, also between eager calls and older graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from pool import WORLDS, Pool, captured, device, needs_gpus
from test_cuda_graphs import step
from zero_copy import direct, new_pool, rises, warm

pytestmark = needs_gpus

REPLAYS = 200
#: Long enough for staging, whatever the collective, and a multiple of 16 bytes for every number of ranks.
COUNT = 1_250_000
#: The collectives of `test_cuda_graphs` that every rank counts as zero-copy calls. In the others, a sender does not
#: count a call, and neither does the root of a broadcast to several ranks.
DIRECT = ("all_reduce", "reduce", "all_gather_into_tensor", "all_gather", "reduce_scatter_tensor", "all_to_all_single")


def replay(rank: int, world: int, collective: str) -> None:
    """Replays and eager calls on other symmetric tensors and on ordinary ones, alternately."""
    memory = new_pool()
    with torch.cuda.use_mem_pool(memory):
        run, check, value = step(collective, rank, world, COUNT)
        eager_run, eager_check, eager_value = step(collective, rank, world, COUNT + 400)
    plain_run, plain_check, plain_value = step(collective, rank, world, COUNT - 4)
    warm(run)
    warm(eager_run)
    graph = captured(run)
    before = direct()
    for turn in range(REPLAYS):
        value.fill_(turn)
        graph.replay()
        if turn % 10 == 0:
            check(turn)
        if turn % 20 == 0:
            for other_run, other_check, other_value in (
                (eager_run, eager_check, eager_value),
                (plain_run, plain_check, plain_value),
            ):
                other_value.fill_(turn + 1)
                other_run()
                other_check(turn + 1)
    check(turn)
    if collective in DIRECT:
        assert direct() - before == REPLAYS + REPLAYS // 20


@pytest.mark.parametrize("collective", [*DIRECT, "broadcast"])
@pytest.mark.parametrize("world", (2, max(WORLDS)))
def test_replays(pool: Pool, world: int, collective: str) -> None:
    pool.run(replay, world, collective)


def before_and_after(rank: int, world: int) -> None:
    """A graph captured before the group had symmetric tensors still runs as it was recorded."""
    run, check, value = step("all_reduce", rank, world, COUNT)
    old = captured(run)
    memory = new_pool()
    with torch.cuda.use_mem_pool(memory):
        new_run, new_check, new_value = step("all_reduce", rank, world, COUNT)
    warm(new_run)
    new = captured(new_run)
    for turn in range(100):
        value.fill_(turn)
        new_value.fill_(turn + 3)
        for graph in (old, new) if turn % 3 else (new, old):
            graph.replay()
        check(turn)
        new_check(turn + 3)
    assert rises(old.replay) == [0] * world
    assert rises(new.replay) == [1] * world


def inside(rank: int, world: int) -> None:
    """A graph whose own tensors are in a symmetric pool needs no allocation before the capture."""
    memory = new_pool()
    with torch.cuda.use_mem_pool(memory):
        kept = torch.ones(COUNT, device=device())
    warm(dist.all_reduce, kept)
    value = torch.zeros((), device=device())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory.id):
        tensor = (value + rank).expand(COUNT).contiguous()
        dist.all_reduce(tensor)
    for turn in range(50):
        value.fill_(turn)
        graph.replay()
        assert bool((tensor == world * turn + world * (world - 1) / 2).all())
    del graph


@pytest.mark.parametrize("body", (before_and_after, inside))
@pytest.mark.parametrize("world", WORLDS)
def test_graphs_and_pools(pool: Pool, world: int, body: Callable[..., None]) -> None:
    pool.run(body, world)

"""Sends and receives of CUDA tensors, batched and not: which rank waits for which, and the order of messages."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from pool import DEVICE, WORLDS, Pool, captured, device, needs_gpus, needs_ranks, settle
from zero_copy import engines, new_pool

pytestmark = needs_ranks

#: Number of elements of a message that does not fit into staging, so that its send waits for the receive; copy engines
#: may move it.
LONG = 20_000_000


def point_to_point(rank: int, world: int) -> None:
    """Tags, order, both directions at once, queued messages of very different sizes, and a message to oneself."""
    peer = rank ^ 1
    if peer < world:
        sizes = (1, 4_096, 1, 3_000_000, 0, 65_537)
        outgoing = [torch.full((size,), float(10 * rank + tag), device=device()) for tag, size in enumerate(sizes)]
        incoming = [torch.zeros(size, device=device()) for size in sizes]
        works = []
        for tag in range(len(sizes)):
            calls = [(dist.isend, outgoing), (dist.irecv, incoming)]
            for call, tensors in calls if rank < peer else reversed(calls):
                works.append(call(tensors[tag], peer, tag=tag))
        for work in works:
            work.wait()
        settle()
        for tag, tensor in enumerate(incoming):
            assert bool((tensor == 10 * peer + tag).all()), f"message {tag} of {tensor.numel()}"
        if rank < peer:
            dist.send(outgoing[3], peer)
        else:
            dist.recv(incoming[3].zero_(), peer)
            assert bool((incoming[3] == 10 * peer + 3).all())
    everyone = [torch.zeros(777, device=device()) for _ in range(world)]
    batch = [dist.P2POp(dist.isend, torch.full((777,), float(rank), device=device()), other) for other in range(world)]
    batch += [dist.P2POp(dist.irecv, everyone[other], other) for other in range(world)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    settle()
    assert [float(tensor.mean()) for tensor in everyone] == list(range(world))


def everybody_sends_first(rank: int, world: int) -> None:
    """Outside a batch, long messages around a ring: no send waits for a receive of its own rank."""
    for turn in range(3):
        out, back = torch.full((LONG,), rank + 10.0 * turn, device=device()), torch.zeros(LONG, device=device())
        works = [dist.isend(out, (rank + 1) % world), dist.irecv(back, (rank - 1) % world)]
        for work in works:
            work.wait()
        settle()
        assert bool((back == (rank - 1) % world + 10.0 * turn).all()), f"turn {turn}"


def collectives_in_between(rank: int, world: int, in_step_first: bool = True) -> None:
    """A collective overtakes a send whose receive is not posted yet, and a receive whose send is not."""
    token, got = torch.full((LONG,), 5.0, device=device()), torch.zeros(LONG, device=device())
    back = torch.zeros(LONG, device=device())
    # A kernel that is not loaded yet may wait for running ones: torch's are loaded here.
    assert bool((torch.full((1_000_000,), 1.0, device=device()) == 1).all())
    turns = ((False, True), (True, True), (True, False))
    for crosswise, asynchronous in turns if in_step_first else turns[1:]:
        ahead = crosswise and rank == 0
        works = [dist.isend(token, 1), dist.irecv(back.zero_(), 1)] if ahead else []
        tensor = torch.full((1_000_000,), rank + 1.0, device=device())
        work = dist.all_reduce(tensor, async_op=asynchronous)
        if work is not None:
            work.wait()
        settle_current()
        assert bool((tensor == world * (world + 1) / 2).all())
        if rank < 2 and not ahead:
            works = [dist.isend(token, 1 - rank), dist.irecv((back if rank == 0 else got).zero_(), 1 - rank)]
        for each in works:
            each.wait()
        settle()
        assert rank != 0 or bool((back == 5).all())
        assert rank != 1 or bool((got == 5).all())


def settle_current() -> None:
    """Returns once the current stream is done, even if other streams are not."""
    if DEVICE == "cuda":
        torch.cuda.current_stream().synchronize()


@needs_gpus
def test_what_the_cache_has_is_loaded_from_the_start(pool: Pool) -> None:
    pool.run(collectives_in_between, 2)
    pool.stop()
    pool.run(collectives_in_between, 2, False)


def batches_in_between(rank: int, world: int) -> None:
    """Messages arrive in order, whether or not they are sent or received in a batch."""
    # A group's first call needs all ranks.
    dist.all_reduce(torch.ones(1, device=device()))
    if rank > 1:
        return
    peer = 1 - rank
    for turn in range(20):
        sizes = [(7, 40_000, LONG)[(turn + number) % 3] for number in range(6)]
        outgoing = [
            torch.full((size,), 100.0 * turn + 10 * number + rank, device=device()) for number, size in enumerate(sizes)
        ]
        incoming = [torch.zeros(size, device=device()) for size in sizes]
        works = []
        for number in range(6):
            # The two ranks batch different messages.
            if (number + rank + turn) % 3 == 0:
                pair = [dist.P2POp(dist.isend, outgoing[number], peer), dist.P2POp(dist.irecv, incoming[number], peer)]
                works += dist.batch_isend_irecv(pair)
            else:
                works += [dist.isend(outgoing[number], peer), dist.irecv(incoming[number], peer)]
        for work in works:
            work.wait()
        settle()
        for number, tensor in enumerate(incoming):
            assert bool((tensor == 100.0 * turn + 10 * number + peer).all()), f"turn {turn}, message {number}"


def left_block(rank: int, world: int) -> None:
    """An exception ends a block: the calls that it has gathered never run, and later calls do."""
    group = dist.group.WORLD
    tensor, other = torch.ones(1000, device=device()), torch.ones(1000, device=device())
    with pytest.raises(KeyError), dist._coalescing_manager(device=device(), async_ops=True):
        group.broadcast([other], dist.BroadcastOptions())
        dist.all_reduce(tensor)
        raise KeyError
    with pytest.raises(ValueError, match="Tag"):
        dist.batch_isend_irecv([dist.P2POp(dist.irecv, tensor, (rank - 1) % world, tag=-1)])
    assert group not in dist.distributed_c10d._world.pg_coalesce_state
    dist.all_reduce(tensor)
    settle()
    assert bool((tensor == world).all()) and bool((other == 1).all())
    point_to_point(rank, world)


def recorded(rank: int, world: int) -> None:
    """A graph with a send and a receive on separate streams, and a collective that runs meanwhile."""
    out, back = torch.zeros(LONG, device=device()), torch.zeros(LONG, device=device())
    tensor = torch.zeros(50_000, device=device())

    def step() -> None:
        works = [dist.isend(out, (rank + 1) % world), dist.irecv(back, (rank - 1) % world)]
        dist.all_reduce(tensor)
        for work in works:
            work.wait()

    graph = captured(step)
    for turn in range(20):
        out.fill_(rank + 10.0 * turn)
        tensor.fill_(rank + 1.0)
        graph.replay()
        assert bool((back == (rank - 1) % world + 10.0 * turn).all()), f"turn {turn}"
        assert bool((tensor == world * (world + 1) / 2).all()), f"turn {turn}"


@pytest.mark.parametrize("body", (point_to_point, everybody_sends_first, collectives_in_between))
@pytest.mark.parametrize("world", WORLDS)
def test_messages(pool: Pool, world: int, body: Callable[..., None]) -> None:
    pool.run(body, world)


@pytest.mark.parametrize("body", (batches_in_between, left_block))
def test_batches(pool: Pool, body: Callable[..., None]) -> None:
    pool.run(body, max(WORLDS))


def by_engines(rank: int, world: int, body: Callable[..., None], symmetric: bool) -> int:
    """Runs ``body``; returns how many messages were direct, so that a copy engine or the later end moved them."""
    memory = new_pool()
    with torch.cuda.use_mem_pool(memory) if symmetric else nullcontext():
        room = torch.ones(8 * LONG, device=device())
        dist.all_reduce(room)
        settle()
        time.sleep(0.5)  # peers map a new segment a little later
        del room
        before = engines()["direct"]
        body(rank, world)
    settle()
    return engines()["direct"] - before


def messages_around_a_ring(rank: int, world: int) -> None:
    """Long messages around a ring; the receive or the send comes first, or both come in a batch."""
    out, back = torch.zeros(LONG, device=device()), torch.zeros(LONG, device=device())
    after, before = (rank + 1) % world, (rank - 1) % world
    for turn in range(9):
        out.fill_(rank + 10.0 * turn)
        send, receive = dist.P2POp(dist.isend, out, after), dist.P2POp(dist.irecv, back, before)
        if turn % 3 == 0:
            works = dist.batch_isend_irecv([send, receive])
        else:
            ends = [lambda: dist.isend(out, after), lambda: dist.irecv(back, before)]
            works = [end() for end in (ends if turn % 3 == rank % 2 + 1 else reversed(ends))]
        for work in works:
            work.wait()
        settle()
        assert bool((back == before + 10.0 * turn).all()), f"turn {turn}"


@needs_gpus
@pytest.mark.parametrize(
    "body", (everybody_sends_first, collectives_in_between, batches_in_between, recorded, messages_around_a_ring)
)
@pytest.mark.parametrize("world", WORLDS)
def test_long_messages_in_symmetric_memory_are_direct(pool: Pool, world: int, body: Callable[..., None]) -> None:
    counts = pool.run(by_engines, world, body, True, timeout=200)
    # Kernels move a message that both ends launch at the same time.
    assert counts[0] > 0, counts


@needs_gpus
def test_kernels_move_messages_in_ordinary_memory(pool: Pool) -> None:
    assert pool.run(by_engines, 2, messages_around_a_ring, False) == [0, 0]


@needs_gpus
@pytest.mark.parametrize("world", (2, max(WORLDS)))
def test_a_graph_of_sends_and_receives(pool: Pool, world: int) -> None:
    pool.run(recorded, world)

"""Short asynchronous calls, which post their data when they are submitted and finish when they are awaited."""

from __future__ import annotations

import gc
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
import torch_symm
from ranks import backend_of, meet, run_ranks


def killed(rank: int, world: int, comes: bool) -> None:
    first, second = torch.ones(4), torch.ones(4)
    works = []
    if rank == 0 or comes:
        works.append(dist.all_reduce(first, async_op=True))
    meet("posted", rank, world)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    backend = backend_of()
    while "SUCCESS" in str(backend.get_error()):
        time.sleep(0.001)
    works.append(dist.all_reduce(second, async_op=True))
    if comes:
        works[0].wait()
        assert (first == 2).all(), "rank 1 had posted all that this call needs"
    else:
        assert (first == 1).all()
        with pytest.raises(torch_symm.SymmPeerError, match="rank 1"):
            works[0].wait()
    with pytest.raises(torch_symm.SymmPeerError, match="rank 1"):
        works[1].wait()
    assert (second == 1).all()


@pytest.mark.parametrize("comes", (False, True))
def test_a_peer_that_dies_between_the_call_and_the_wait(comes: bool) -> None:
    run_ranks(killed, 2, comes, expect_killed=(1,))


def aborted(rank: int, world: int) -> None:
    tensor = torch.ones(4)
    if rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        backend_of().abort()
        with pytest.raises(torch_symm.SymmAbortedError):
            work.wait()
    meet("aborted", rank, world)
    with pytest.raises(torch_symm.SymmPeerError if rank else torch_symm.SymmAbortedError, match="rank 0"):
        dist.all_reduce(tensor)
    assert (tensor == 1).all()


def test_an_abort_between_the_call_and_the_wait() -> None:
    run_ranks(aborted, 2)


def dropped(rank: int, world: int) -> None:
    results = [torch.ones(4) for _ in range(3)]
    for tensor in results:
        dist.all_reduce(tensor, async_op=True)
        gc.collect()
        deadline = time.monotonic() + 20
        while not (tensor == world).all():
            assert time.monotonic() < deadline, "nobody has finished it"
            time.sleep(0.001)
    work = dist.all_reduce(results[0], async_op=True)
    while not work.is_completed():
        time.sleep(0)
    assert (work.get_future().value()[0] == world**2).all()
    assert (dist.all_reduce(results[1], async_op=True).get_future().wait()[0] == world**2).all()
    # Another call is in progress when the group is destroyed.
    dist.all_reduce(results[2], async_op=True)
    dist.destroy_process_group()
    assert (results[2] == world**2).all()


def test_calls_that_nobody_waits_for() -> None:
    run_ranks(dropped, 2)


def disagreeing(rank: int, world: int) -> None:
    tensor = torch.ones(4 + rank)
    work = dist.all_reduce(tensor, async_op=True)
    meet("posted", rank, world)
    with pytest.raises(torch_symm.SymmMismatchError, match=r"16 bytes.*20 bytes"):
        work.wait()
    assert (tensor == 1).all()


def test_a_disagreement_is_raised_by_the_wait() -> None:
    run_ranks(disagreeing, 2)


def several_groups(rank: int, world: int) -> None:
    groups = [dist.new_group() for _ in range(2)]
    short = [torch.full((4,), float(rank)) for _ in range(2)]
    long = [torch.full((100_000,), float(rank)) for _ in range(2)]
    works = []
    # Each rank starts with another group: a rank that waited for the peers of its first call here would wait forever.
    for index in (0, 1) if rank == 0 else (1, 0):
        works.append(dist.all_reduce(short[index], group=groups[index], async_op=True))
        works.append(dist.all_reduce(long[index], group=groups[index], async_op=True))
    for work in works:
        work.wait()
    assert all((tensor == 1).all() for tensor in short + long)


def test_two_groups() -> None:
    run_ranks(several_groups, 2)


def every_kind(rank: int, world: int) -> None:
    """All short collectives, awaited in turn, in reverse, and only by a later synchronous call."""
    for ending in ("in turn", "reversed", "behind"):
        mine, every = torch.full((2,), float(rank + 1)), torch.arange(world) + 1.0
        total, gathered = mine.clone(), torch.zeros(2 * world)
        part, swapped, root = torch.zeros(1), torch.zeros(world), mine.clone()
        works = [
            dist.all_reduce(total, async_op=True),
            dist.all_gather_into_tensor(gathered, mine, async_op=True),
            dist.reduce_scatter_tensor(part, every.clone(), async_op=True),
            dist.all_to_all_single(swapped, torch.full((world,), float(rank + 1)), async_op=True),
            dist.broadcast(root, 1, async_op=True),
            dist.barrier(async_op=True),
        ]
        if ending == "behind":
            dist.all_reduce(torch.ones(1))
        for work in works if ending == "in turn" else reversed(works):
            work.wait()
        assert (total == every.sum()).all() and (gathered.view(world, 2) == every[:, None]).all()
        assert part.item() == world * (rank + 1) and (swapped == every).all() and (root == 2).all()


def test_every_kind_of_call() -> None:
    run_ranks(every_kind, 3)

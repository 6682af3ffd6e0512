"""The handle of a call: waiting, futures, order, threads, and ownership of the tensors."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch_symm
from ranks import backend_of, meet, on_threads, run_ranks


@pytest.mark.ranks(2)
def test_a_wait_that_gives_up_leaves_the_call_alone(rank: int, world_size: int) -> None:
    tensor, got = torch.ones(10), torch.zeros(3)
    if rank == 0:
        works = [dist.all_reduce(tensor, async_op=True), dist.irecv(got, 1)]
        for work in works:
            start = time.monotonic()
            with pytest.raises(torch_symm.SymmTimeoutError, match=r"0\.2 s"):
                work.wait(timedelta(seconds=0.2))
            assert 0.15 < time.monotonic() - start < 10
            assert not work.is_completed()
            # A deadline that has passed is no "no limit".
            with pytest.raises(torch_symm.SymmTimeoutError, match=r"0\.0 s"):
                work.wait(timedelta(seconds=-1))
        meet("late", rank, world_size)
        for work in works:
            assert work.wait(timedelta(seconds=20))
            assert work.is_completed() and work.is_success()
        assert (got == 7).all()
    else:
        meet("late", rank, world_size)
        dist.all_reduce(tensor)
        dist.send(torch.full((3,), 7.0), 0)
    assert (tensor == 2).all()
    dist.all_reduce(tensor)
    assert (tensor == 4).all(), "the group lives"


@pytest.mark.ranks(3)
def test_futures(rank: int, world_size: int) -> None:
    for count in (1, 500_000):
        tensor = torch.ones(count)
        work = dist.all_reduce(tensor, async_op=True)
        future = work.get_future()
        doubled = future.then(lambda f: f.value()[0] * 2)
        assert (doubled.wait() == 2 * world_size).all()
        assert future.value()[0].data_ptr() == tensor.data_ptr()
        assert future.done() and work.is_completed() and work.is_success()
        assert work.result()[0].data_ptr() == tensor.data_ptr()
        assert (work.get_future().wait()[0] == world_size).all(), "asked for again, after the end"
        assert work.get_future_result().wait() == 0

        outputs = [torch.zeros(count) for _ in range(world_size)]
        lists = dist.all_gather(outputs, torch.full((count,), float(rank)), async_op=True).get_future().wait()
        assert [t.data_ptr() for t in lists] == [t.data_ptr() for t in outputs]
        assert all((t == r).all() for r, t in enumerate(outputs))

    seen: list[int] = []
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(50)]
    results = [work.get_future().then(lambda f, i=i: seen.append(i)) for i, work in enumerate(works)]
    torch.futures.wait_all(results)
    assert sorted(seen) == list(range(50))
    assert (dist.barrier(async_op=True).get_future().wait()) is not None


Call = Callable[[dist.ProcessGroup, bool, int], Any]
one, two = torch.ones(2), [torch.ones(2), torch.ones(3)]
wide, wider = torch.ones(4), [torch.ones(4), torch.ones(6)]

#: Every operation that returns a work: its call on a group, given whether this rank is the root, and its peer.
OPERATIONS: dict[str, Call] = {
    "all_reduce": lambda g, root, peer: dist.all_reduce(+one, group=g, async_op=True),
    "sparse all_reduce": lambda g, root, peer: dist.all_reduce(one.to_sparse(), group=g, async_op=True),
    "all_reduce_coalesced": lambda g, root, peer: g.allreduce_coalesced(copies(two)),
    "broadcast": lambda g, root, peer: dist.broadcast(+one, 0, group=g, async_op=True),
    "reduce": lambda g, root, peer: dist.reduce(+one, 0, group=g, async_op=True),
    "all_gather": lambda g, root, peer: dist.all_gather(copies([one, one]), one, group=g, async_op=True),
    "all_gather_coalesced": lambda g, root, peer: g.allgather_coalesced([copies(two), copies(two)], two),
    "all_gather_coalesced of one": lambda g, root, peer: g.allgather_coalesced([[+one], [+one]], [one]),
    "all_gather_into_tensor": lambda g, root, peer: dist.all_gather_into_tensor(+wide, one, group=g, async_op=True),
    "all_gather of rows": lambda g, root, peer: dist.all_gather_into_tensor(
        torch.ones(4, 3), torch.ones(2, 3), group=g, async_op=True
    ),
    "all_gather of nothing": lambda g, root, peer: dist.all_gather_into_tensor(
        torch.ones(0), torch.ones(0), group=g, async_op=True
    ),
    "all_gather_into_tensor_coalesced": lambda g, root, peer: g.allgather_into_tensor_coalesced(copies(wider), two),
    "gather": lambda g, root, peer: dist.gather(one, copies([one, one]) if root else None, 0, group=g, async_op=True),
    "scatter": lambda g, root, peer: dist.scatter(+one, [one, one] if root else None, 0, group=g, async_op=True),
    "reduce_scatter": lambda g, root, peer: dist.reduce_scatter(+one, [one, one], group=g, async_op=True),
    "reduce_scatter_tensor": lambda g, root, peer: dist.reduce_scatter_tensor(+one, wide, group=g, async_op=True),
    "reduce_scatter_tensor_coalesced": lambda g, root, peer: g.reduce_scatter_tensor_coalesced(copies(two), wider),
    "all_to_all": lambda g, root, peer: dist.all_to_all(copies([one, one]), [one, one], group=g, async_op=True),
    "all_to_all_single": lambda g, root, peer: dist.all_to_all_single(+wide, wide, group=g, async_op=True),
    "barrier": lambda g, root, peer: dist.barrier(group=g, async_op=True),
    "send and recv": lambda g, root, peer: (dist.isend if root else dist.irecv)(+one, peer, group=g),
}


def copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [+tensor for tensor in tensors]


def shapes(found: Any) -> Any:
    if isinstance(found, torch.Tensor):
        return (found.layout, *found.shape)
    return [shapes(each) for each in found]


@pytest.mark.parametrize("replaced", [False, True], ids=["symm", "gloo"])
@pytest.mark.ranks(2)
def test_futures_have_the_shape_of_gloos(rank: int, replaced: bool) -> None:
    theirs = dist.new_group(backend="gloo")
    if replaced:
        torch_symm.replace_gloo()
    ours = dist.new_group(backend="gloo" if replaced else "symm")
    for name, call in OPERATIONS.items():
        found: list[tuple[Any, Any]] = []
        for group in (theirs, ours):
            try:
                work = call(group, rank == 0, 1 - rank)
            except RuntimeError as error:
                # As Gloo does in torch 2.11.
                assert group is theirs and "does not support alltoall" in str(error), name
                found.append((None, None))
                continue
            work.wait()
            given: list[Any] = []
            for value in (lambda work=work: work.get_future().wait(), lambda work=work: work.result()):
                try:
                    given.append(shapes(value()))
                except RuntimeError:
                    given.append(None)
            found.append((given[0], given[1]))
        gloo, symm = found
        for theirs_is, ours_is in zip(gloo, symm, strict=True):
            # For some operations, Gloo's works lack a future or a result.
            assert ours_is is not None and theirs_is in (None, ours_is), f"{name}: {symm}, with Gloo {gloo}"
    # A chain on the future works as with Gloo; the value is the memory of the output.
    for group in (theirs, ours):
        out = [torch.zeros(2), torch.zeros(2)]
        work = dist.all_gather(out, torch.full((2,), float(rank)), group=group, async_op=True)
        assert work.get_future().then(lambda f: torch.cat(f.value())).wait().tolist() == [0, 0, 1, 1]
        work = dist.all_gather_into_tensor(whole := torch.zeros(4), torch.full((2,), 5.0), group=group, async_op=True)
        assert work.get_future().wait()[1].data_ptr() == whole[2:].data_ptr()
        work.wait()


@pytest.mark.ranks(2)
def test_the_result_of_a_work_tells_a_timeout(rank: int, world_size: int) -> None:
    """0: success; 1: timeout; ``test_a_failed_future_carries_the_cause`` has 2, any other error."""
    late = dist.new_group(timeout=timedelta(seconds=20))
    other = 1 - rank
    for group, wanted in ((dist.group.WORLD, 0), (late, 1)):
        ops = [dist.P2POp(dist.irecv, torch.zeros(3), other, group=group)]
        if wanted == 0:
            ops.append(dist.P2POp(dist.isend, torch.ones(3), other, group=group))
        else:
            backend_of(group)._set_default_timeout(timedelta(seconds=0.5))
        (work,) = dist.batch_isend_irecv(ops)
        assert work.get_future_result().wait() == wanted
        if wanted == 1:
            # The group has failed at its first timeout, and keeps that error.
            with pytest.raises(torch_symm.SymmTimeoutError):
                work.wait()
    last = dist.new_group(timeout=timedelta(seconds=20))
    if rank == 0:
        backend_of(last)._set_default_timeout(timedelta(seconds=0.5))
        assert dist.all_reduce(torch.ones(4), group=last, async_op=True).get_future_result().wait() == 1
    meet("ended", rank, world_size)


# proves P23
@pytest.mark.ranks(2)
def test_a_failed_future_carries_the_cause(rank: int) -> None:
    group = dist.new_group()
    work = dist.all_reduce(torch.ones(4 + rank), group=group, async_op=True)
    with pytest.raises(torch_symm.SymmMismatchError, match="all_reduce"):
        work.get_future().wait()
    with pytest.raises(torch_symm.SymmMismatchError):
        work.get_future().value()
    with pytest.raises(torch_symm.SymmMismatchError):
        work.wait()
    assert work.is_completed() and not work.is_success() and work.get_future_result().wait() == 2
    with pytest.raises(torch_symm.SymmMismatchError):
        dist.barrier(group=group)
    # Each group has its own error.
    assert backend_of(group).get_error() != backend_of().get_error()
    dist.barrier()


@pytest.mark.ranks(2)
def test_synchronous_and_asynchronous_calls_keep_their_order(world_size: int) -> None:
    tensor = torch.ones(50_000)
    value = 1.0
    pending = []
    for i in range(200):
        if i % 3 == 0:
            dist.all_reduce(tensor)
            value *= world_size
        else:
            pending.append(dist.all_reduce(tensor, async_op=True))
            value *= world_size
        if i % 10 == 9:
            # The next synchronous call runs after all queued calls.
            tensor_before = torch.zeros(1)
            dist.broadcast(tensor_before, 0)
            assert (tensor == value).all(), i
            tensor.fill_(1.0)
            value = 1.0
            dist.barrier()
    for work in pending:
        work.wait()


@pytest.mark.ranks(2)
def test_four_threads(rank: int, world_size: int) -> None:
    """Threads use a group each, messages, and equal calls on one group, which match in the order of each rank."""
    groups = [dist.new_group() for _ in range(4)]
    before = backend_of().get_sequence_number()

    def own_group(index: int) -> None:
        for i in range(100):
            tensor = torch.full((1 + 3_000 * (i % 5),), float(index + i))
            dist.all_reduce(tensor, group=groups[index])
            assert (tensor == world_size * (index + i)).all()

    def messages(tag: int) -> None:
        for i in range(50):
            got = torch.zeros(5_000)
            work = dist.isend(torch.full((5_000,), float(i)), 1 - rank, tag=tag)
            dist.recv(got, 1 - rank, tag=tag)
            work.wait()
            assert (got == i).all()

    def one_group(asynchronous: bool) -> None:
        for _ in range(100):
            tensor = torch.ones(2_000)
            work = dist.all_reduce(tensor, async_op=asynchronous)
            if work is not None:
                work.wait()
            assert (tensor == world_size).all()

    for body in (own_group, messages):
        on_threads([partial(body, number) for number in range(4)])
    for asynchronous in (False, True):
        on_threads([partial(one_group, asynchronous)] * 4)
    dist.barrier()
    assert backend_of().get_sequence_number() == before + 801, "collectives count, messages do not"


def counts_while_waiting(rank: int, _world: int) -> None:
    window = symm_mem.rendezvous(symm_mem.empty(4, device="cpu"), dist.group.WORLD)
    tensor, counter, stop = torch.ones(10), 0, False

    def count() -> None:
        nonlocal counter
        while not stop:
            counter += 1
            time.sleep(0.005)

    thread = threading.Thread(target=count)
    thread.start()
    calls: dict[str, Callable[[], object]] = {
        "sync": lambda: dist.all_reduce(tensor),
        "wait": lambda: dist.all_reduce(tensor, async_op=True).wait(),
        "recv": lambda: dist.send(tensor, 0) if rank else dist.recv(tensor, 1),
        "barrier": dist.barrier,
        "barrier of symmetric memory": window.barrier,
        "new_group": dist.new_group,
    }
    for kind, call in calls.items():
        dist.barrier()
        if rank == 1:
            time.sleep(0.5)
        before = counter
        call()
        during = counter - before
        assert rank == 1 or during > 20, f"{kind}: another thread ran {during} times in half a second"
    stop = True
    thread.join()


# `--reruns` does not repeat tests with the mark for ranks, so this test starts its ranks itself.
@pytest.mark.timed
def test_the_gil_is_free_while_waiting() -> None:
    run_ranks(counts_while_waiting, 2)


@pytest.mark.ranks(2)
def test_dropped_tensors(rank: int, world_size: int) -> None:
    """The call owns its tensors: the user may drop all references, even to the handle."""
    results = [torch.zeros(world_size * 200_000) for _ in range(20)]
    works = []
    for i in range(20):
        tensor = torch.full((200_000,), float(i + rank))
        works.append(dist.all_gather_into_tensor(results[i], tensor, async_op=True))
        del tensor
        torch.full((200_000,), -1.0)
        dist.all_reduce(torch.ones(100_000), async_op=True)
        gc.collect()
    peer = 1 - rank
    send = dist.isend(torch.full((300_000,), 5.0), peer)
    got = torch.zeros(300_000)
    dist.recv(got, peer)
    send.wait()
    assert (got == 5).all()
    for i, work in enumerate(works):
        work.wait()
        assert all((part == i + r).all() for r, part in enumerate(results[i].view(world_size, -1)))


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


@pytest.mark.ranks(2)
def test_an_abort_between_the_call_and_the_wait(rank: int, world_size: int) -> None:
    tensor = torch.ones(4)
    if rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        backend_of().abort()
        with pytest.raises(torch_symm.SymmAbortedError):
            work.wait()
    meet("aborted", rank, world_size)
    with pytest.raises(torch_symm.SymmPeerError if rank else torch_symm.SymmAbortedError, match="rank 0"):
        dist.all_reduce(tensor)
    assert (tensor == 1).all()


@pytest.mark.ranks(2)
def test_calls_that_nobody_waits_for(world_size: int) -> None:
    results = [torch.ones(4) for _ in range(3)]
    for tensor in results:
        dist.all_reduce(tensor, async_op=True)
        gc.collect()
        deadline = time.monotonic() + 20
        while not (tensor == world_size).all():
            assert time.monotonic() < deadline, "nobody has finished it"
            time.sleep(0.001)
    work = dist.all_reduce(results[0], async_op=True)
    while not work.is_completed():
        time.sleep(0)
    assert (work.get_future().value()[0] == world_size**2).all()
    assert (dist.all_reduce(results[1], async_op=True).get_future().wait()[0] == world_size**2).all()
    # Another call is in progress when the group is destroyed.
    dist.all_reduce(results[2], async_op=True)
    dist.destroy_process_group()
    assert (results[2] == world_size**2).all()


@pytest.mark.ranks(2)
def test_two_groups(rank: int) -> None:
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


@pytest.mark.ranks(3)
def test_every_kind_of_call(rank: int, world_size: int) -> None:
    """All short collectives, awaited in turn, in reverse, and only by a later synchronous call."""
    for ending in ("in turn", "reversed", "behind"):
        mine, every = torch.full((2,), float(rank + 1)), torch.arange(world_size) + 1.0
        total, gathered = mine.clone(), torch.zeros(2 * world_size)
        part, swapped, root = torch.zeros(1), torch.zeros(world_size), mine.clone()
        works = [
            dist.all_reduce(total, async_op=True),
            dist.all_gather_into_tensor(gathered, mine, async_op=True),
            dist.reduce_scatter_tensor(part, every.clone(), async_op=True),
            dist.all_to_all_single(swapped, torch.full((world_size,), float(rank + 1)), async_op=True),
            dist.broadcast(root, 1, async_op=True),
            dist.barrier(async_op=True),
        ]
        if ending == "behind":
            dist.all_reduce(torch.ones(1))
        for work in works if ending == "in turn" else reversed(works):
            work.wait()
        assert (total == every.sum()).all() and (gathered.view(world_size, 2) == every[:, None]).all()
        assert part.item() == world_size * (rank + 1) and (swapped == every).all() and (root == 2).all()

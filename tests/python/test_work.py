"""The handle of a call: waiting, futures, order, threads, and ownership of the tensors."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch_symm
from ranks import backend_of, meet, on_threads, run_ranks
from torch_symm import _native


def waiting_with_a_limit(rank: int, world: int) -> None:
    tensor = torch.ones(10)
    if rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        assert not work.is_completed()
        start = time.monotonic()
        with pytest.raises(torch_symm.SymmTimeoutError, match=r"0\.2 s"):
            work.wait(timedelta(seconds=0.2))
        assert 0.15 < time.monotonic() - start < 10
        assert not work.is_completed()
        meet("late", rank, world)
        assert work.wait(timedelta(seconds=20))
        assert work.is_completed() and work.is_success()
    else:
        meet("late", rank, world)
        dist.all_reduce(tensor)
    assert (tensor == 2).all()
    dist.all_reduce(tensor)
    assert (tensor == 4).all(), "the group lives"


def test_a_wait_that_gives_up_leaves_the_call_alone() -> None:
    run_ranks(waiting_with_a_limit, 2)


def receiving_with_a_limit(rank: int, world: int) -> None:
    got = torch.zeros(3)
    if rank == 0:
        work = dist.irecv(got, 1)
        with pytest.raises(torch_symm.SymmTimeoutError):
            work.wait(timedelta(seconds=0.1))
        meet("late", rank, world)
        work.wait()
        assert (got == 7).all()
    else:
        meet("late", rank, world)
        dist.send(torch.full((3,), 7.0), 0)


def test_a_wait_for_a_message_that_gives_up() -> None:
    run_ranks(receiving_with_a_limit, 2)


def futures(rank: int, world: int) -> None:
    for count in (1, 500_000):
        tensor = torch.ones(count)
        work = dist.all_reduce(tensor, async_op=True)
        future = work.get_future()
        doubled = future.then(lambda f: f.value()[0] * 2)
        assert (doubled.wait() == 2 * world).all()
        assert future.value()[0].data_ptr() == tensor.data_ptr()
        assert future.done() and work.is_completed() and work.is_success()
        assert work.result()[0].data_ptr() == tensor.data_ptr()
        assert (work.get_future().wait()[0] == world).all(), "asked for again, after the end"
        assert work.get_future_result().wait() == 0

        outputs = [torch.zeros(count) for _ in range(world)]
        lists = dist.all_gather(outputs, torch.full((count,), float(rank)), async_op=True).get_future().wait()
        assert [t.data_ptr() for t in lists] == [t.data_ptr() for t in outputs]
        assert all((t == r).all() for r, t in enumerate(outputs))

    seen: list[int] = []
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(50)]
    results = [work.get_future().then(lambda f, i=i: seen.append(i)) for i, work in enumerate(works)]
    torch.futures.wait_all(results)
    assert sorted(seen) == list(range(50))
    assert (dist.barrier(async_op=True).get_future().wait()) is not None


def test_futures() -> None:
    run_ranks(futures, 3)


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


def as_gloo_gives_them(rank: int, world: int, replaced: bool) -> None:
    theirs = dist.new_group(backend="gloo")
    if replaced:
        torch_symm.replace_gloo()
    ours = dist.new_group(backend="gloo" if replaced else "symm")
    for name, call in OPERATIONS.items():
        found: list[tuple[Any, Any]] = []
        for group in (theirs, ours):
            work = call(group, rank == 0, 1 - rank)
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
            # Gloo implements neither for some operations.
            assert ours_is is not None and theirs_is in (None, ours_is), f"{name}: {symm}, with Gloo {gloo}"
    # A chain on the future works as with Gloo; the value is the memory of the output.
    for group in (theirs, ours):
        out = [torch.zeros(2), torch.zeros(2)]
        work = dist.all_gather(out, torch.full((2,), float(rank)), group=group, async_op=True)
        assert work.get_future().then(lambda f: torch.cat(f.value())).wait().tolist() == [0, 0, 1, 1]
        work = dist.all_gather_into_tensor(whole := torch.zeros(4), torch.full((2,), 5.0), group=group, async_op=True)
        assert work.get_future().wait()[1].data_ptr() == whole[2:].data_ptr()
        work.wait()


@pytest.mark.parametrize("replaced", [False, True], ids=["symm", "gloo"])
def test_futures_have_the_shape_of_gloos(replaced: bool) -> None:
    run_ranks(as_gloo_gives_them, 2, replaced)


def failed_future(rank: int, world: int) -> None:
    group = dist.new_group()
    work = dist.all_reduce(torch.ones(4 + rank), group=group, async_op=True)
    with pytest.raises(torch_symm.SymmMismatchError, match="all_reduce"):
        work.get_future().wait()
    with pytest.raises(torch_symm.SymmMismatchError):
        work.get_future().value()
    with pytest.raises(torch_symm.SymmMismatchError):
        work.wait()
    assert work.is_completed() and not work.is_success()
    with pytest.raises(torch_symm.SymmMismatchError):
        dist.barrier(group=group)
    # Each group has its own error.
    assert backend_of(group).get_error() != backend_of().get_error()
    dist.barrier()


def results_of_failures(rank: int, world: int) -> None:
    """0: success; 1: timeout; 2: any other error."""
    late, wrong = dist.new_group(timeout=timedelta(seconds=20)), dist.new_group()
    work = dist.all_reduce(torch.ones(4 + rank), group=wrong, async_op=True)
    assert work.get_future_result().wait() == 2
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
    meet("ended", rank, world)


def test_the_result_of_a_work_tells_a_timeout() -> None:
    run_ranks(results_of_failures, 2)


# proves P23
def test_a_failed_future_carries_the_cause() -> None:
    run_ranks(failed_future, 2)


def mixed(rank: int, world: int) -> None:
    tensor = torch.ones(50_000)
    value = 1.0
    pending = []
    for i in range(200):
        if i % 3 == 0:
            dist.all_reduce(tensor)
            value *= world
        else:
            pending.append(dist.all_reduce(tensor, async_op=True))
            value *= world
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


def test_synchronous_and_asynchronous_calls_keep_their_order() -> None:
    run_ranks(mixed, 2)


def a_group_per_thread(rank: int, world: int) -> None:
    groups = [dist.new_group() for _ in range(4)]

    def body(index: int) -> None:
        for i in range(100):
            tensor = torch.full((1 + 3_000 * (i % 5),), float(index + i))
            dist.all_reduce(tensor, group=groups[index])
            assert (tensor == world * (index + i)).all()

    on_threads([lambda index=index: body(index) for index in range(4)])


def test_four_threads_with_a_group_each() -> None:
    run_ranks(a_group_per_thread, 2)


def one_group(rank: int, world: int) -> None:
    """Equal calls from four threads: the first call on a rank matches the first call on another."""
    for asynchronous in (False, True):

        def body(asynchronous: bool = asynchronous) -> None:
            for _ in range(100):
                tensor = torch.ones(2_000)
                work = dist.all_reduce(tensor, async_op=asynchronous)
                if work is not None:
                    work.wait()
                assert (tensor == world).all()

        on_threads([body] * 4)
    dist.barrier()
    sequence = backend_of().get_sequence_number()
    assert sequence == 801


def test_four_threads_on_one_group() -> None:
    run_ranks(one_group, 2)


def threads_send_and_receive(rank: int, world: int) -> None:
    def body(tag: int) -> None:
        for i in range(50):
            got = torch.zeros(5_000)
            work = dist.isend(torch.full((5_000,), float(i)), 1 - rank, tag=tag)
            dist.recv(got, 1 - rank, tag=tag)
            work.wait()
            assert (got == i).all()

    on_threads([lambda tag=tag: body(tag) for tag in range(4)])


def test_four_threads_send_and_receive() -> None:
    run_ranks(threads_send_and_receive, 2)


def gil(rank: int, world: int, kind: str) -> None:
    _native.load()
    window = symm_mem.rendezvous(symm_mem.empty(4, device="cpu"), dist.group.WORLD)
    if rank == 1:
        time.sleep(0.5)
    counter = 0
    stop = False

    def count() -> None:
        nonlocal counter
        while not stop:
            counter += 1
            time.sleep(0.005)

    thread = threading.Thread(target=count)
    thread.start()
    tensor = torch.ones(10)
    before = counter
    if kind == "sync":
        dist.all_reduce(tensor)
    elif kind == "wait":
        dist.all_reduce(tensor, async_op=True).wait()
    elif kind == "recv" and rank == 0:
        dist.recv(tensor, 1)
    elif kind == "recv":
        dist.send(tensor, 0)
    elif kind == "barrier":
        dist.barrier()
    elif kind == "barrier of symmetric memory":
        window.barrier()
    else:
        dist.new_group()
    during = counter - before
    stop = True
    thread.join()
    if rank == 0:
        assert during > 20, f"another thread ran {during} times in half a second"


@pytest.mark.timed
@pytest.mark.parametrize("kind", ("sync", "wait", "recv", "barrier", "barrier of symmetric memory", "new_group"))
def test_the_gil_is_free_while_waiting(kind: str) -> None:
    run_ranks(gil, 2, kind)


def dropped(rank: int, world: int) -> None:
    """The call owns its tensors: the user may drop all references, even to the handle."""
    results = [torch.zeros(world * 200_000) for _ in range(20)]
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
        assert all((part == i + r).all() for r, part in enumerate(results[i].view(world, -1)))


def test_dropped_tensors() -> None:
    run_ranks(dropped, 2)


def sequence_numbers(rank: int, world: int) -> None:
    backend = backend_of()
    before = backend.get_sequence_number()
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1), async_op=True).wait()
    if rank == 0:
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(1), 0)
    assert backend.get_sequence_number() == before + 2, "collectives count, messages do not"


def test_sequence_numbers() -> None:
    run_ranks(sequence_numbers, 2)

"""The contract of torch's own classes for a backend: futures, exceptions of backward passes, splits, aborts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch_symm
from ranks import backend_of

WORLD = 3


def inputs(rank: int) -> None:
    """Tensors of autograd and of inference mode, inputs whose elements share memory, and interleaved rows."""
    with torch.inference_mode():
        t = torch.ones(4, 4).t()[1:]
        dist.all_reduce(t, async_op=True).wait()
        assert t.eq(WORLD).all()
    t = torch.full((4, 4), float(rank), requires_grad=True)
    dist.broadcast(t.t(), 1)
    assert t.eq(1).all()
    received = torch.zeros(6, 2)
    work = dist.irecv(received[:, 1], (rank - 1) % WORLD)
    dist.send(torch.full((1,), float(rank)).expand(6), (rank + 1) % WORLD)
    work.wait()
    assert received[:, 1].eq((rank - 1) % WORLD).all() and received[:, 0].eq(0).all()
    dist.broadcast(t := torch.ones(1).expand(8) if rank == 0 else torch.zeros(8), 0)
    assert t.eq(1).all()
    # Rows that interleave without sharing an element, at offsets 0, 3, 2, 5, 4 and 7.
    dist.all_reduce((memory := torch.arange(8.0)).as_strided((3, 2), (2, 3)))
    assert memory.tolist() == [0, 1, 2 * WORLD, 3 * WORLD, 4 * WORLD, 5 * WORLD, 6, 7 * WORLD]


def futures(rank: int) -> None:
    """``test_work.py`` has the values of futures."""
    # The value exists as soon as wait() returns.
    for _ in range(300):
        work = dist.all_reduce(torch.ones(64), async_op=True)
        future = work.get_future()
        work.wait()
        assert future.value()[0][0] == WORLD
    # A callback waits for the call that was queued after its own, and makes another call.
    a, b, c = torch.ones(4), torch.ones(4), torch.ones(4)
    first, second = dist.all_reduce(a, async_op=True).get_future(), dist.all_reduce(b, async_op=True).get_future()

    def more(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        second.wait()
        again = dist.all_reduce(c, async_op=True).get_future().wait()[0]
        return done.value()[0] + again

    assert first.then(more).wait().eq(2 * WORLD).all()


def _nested_receive(late: bool) -> None:
    a, b, entered = torch.zeros(4), torch.zeros(4), threading.Event()
    first, second = dist.irecv(a, 1, tag=1), dist.irecv(b, 1, tag=2)
    wait = second.get_future().wait if late else second.wait

    def both(_done: object) -> torch.Tensor:
        entered.set()
        wait()
        return b.clone()

    outcome = first.get_future().then(both)
    dist.send(torch.ones(1), 1, tag=3)
    if late:
        assert entered.wait(20)
        dist.send(torch.ones(1), 1, tag=4)
    assert outcome.wait().eq(2).all()


def message_futures(rank: int) -> None:
    """A callback of a receive waits for a receive that ends with it, or for one whose message is sent later."""
    for late in (False, True):
        if rank == 0:
            _nested_receive(late)
        elif rank == 1:
            dist.recv(torch.zeros(1), 0, tag=3)
            dist.send(torch.ones(4), 0, tag=1)
            if late:
                dist.recv(torch.zeros(1), 0, tag=4)
            dist.send(torch.full((4,), 2.0), 0, tag=2)


def backward(rank: int) -> None:
    """A failure inside a backward pass keeps its type."""
    layer = torch.nn.Linear(4 + (rank == 0), 4)
    for parameter in layer.parameters():
        parameter.register_hook(lambda gradient: dist.all_reduce(gradient))
    with pytest.raises(torch_symm.SymmMismatchError):
        layer(torch.ones(2, layer.in_features)).sum().backward()
    group = dist.new_group()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4), process_group=group)
    if rank == 0:
        backend_of(group).abort()
    with pytest.raises((torch_symm.SymmPeerError, torch_symm.SymmAbortedError)):
        for _ in range(100):
            model(torch.ones(2, 4)).sum().backward()


def split(rank: int) -> None:
    child = dist.group.WORLD.split_group([0, 2], group_name="evens")
    assert (child is None) == (rank == 1)
    if child is not None:
        t = torch.full((2,), rank + 1.0)
        child.allreduce([t]).wait()
        assert t.eq(4).all() and child.size() == 2
        part = backend_of(child)
        assert list(part.options.global_ranks_in_group) == [0, 2]


def aborted(rank: int) -> None:
    """A group ends while completions run Python code: by destroy, and by the destructor, which holds the GIL."""
    group = dist.new_group()
    dist.all_reduce(torch.ones(4), group=group, async_op=True).get_future().then(lambda _: time.sleep(0.05))
    dist.destroy_process_group(group)
    del group
    dist.all_reduce(torch.ones(4), async_op=True).get_future().then(lambda _: time.sleep(0.05))
    dist.distributed_c10d._abort_process_group()
    assert not dist.is_initialized()


@pytest.mark.ranks(WORLD, group_timeout=30)
@pytest.mark.parametrize("body", [inputs, futures, message_futures, backward, split, aborted])
def test(rank: int, body: Callable[[int], None]) -> None:
    body(rank)

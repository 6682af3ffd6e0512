"""Ctrl-C, and any exception of a signal handler, ends a wait in a group; the other ranks are notified."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType

import pytest
import torch
import torch.distributed as dist
import torch_symm
from ranks import init, meet

Group = dist.ProcessGroup


def behind_another(group: Group) -> None:
    """The worker runs the first call while this thread waits for the second."""
    work = dist.all_reduce(torch.ones(1 << 18), group=group, async_op=True)
    time.sleep(0.05)
    dist.all_reduce(torch.ones(3), group=group)
    work.wait()


def begun(group: Group, wait: Callable[[dist.Work], object]) -> None:
    wait(dist.all_reduce(torch.ones(3), group=group, async_op=True))


#: The calls in which ranks 0 and 1 wait, because rank 2 does not make them.
WAITS: dict[str, Callable[[Group], object]] = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(3), group=group),
    "long all_reduce": lambda group: dist.all_reduce(torch.ones(1 << 18), group=group),
    "barrier": lambda group: dist.barrier(group=group),
    "asynchronous": lambda group: begun(group, lambda work: work.wait()),
    "with a limit": lambda group: begun(group, lambda work: work.wait(timedelta(seconds=50))),
    "behind another": behind_another,
    "recv": lambda group: dist.recv(torch.empty(3), 2, group=group),
    "long send": lambda group: dist.send(torch.ones(1 << 20), 2, group=group),
    "from any": lambda group: dist.irecv(torch.empty(3), group=group).wait(),
}


def once_blocked(number: signal.Signals) -> None:
    """Sends this process a signal once its main thread has slept in one place for 100 ms."""

    def where() -> tuple[object, ...]:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        state = Path(f"/proc/self/task/{os.getpid()}/stat").read_text().rpartition(")")[2].split()[0]
        return id(frame), frame.f_lasti, state

    def watch() -> None:
        same, last = 0, None
        while same < 5:
            time.sleep(0.02)
            now = where()
            same, last = (same + 1 if now == last and now[2] == "S" else 0), now
        os.kill(os.getpid(), number)

    threading.Thread(target=watch, daemon=True).start()


def init_on(nodes: str, rank: int, world_size: int) -> None:
    """``init``, where rank ``r`` is on node ``nodes[r]``."""
    os.environ.update(SYMM_TEST_NODE=nodes[rank], SYMM_INTER_NODE_BACKEND="gloo", GLOO_SOCKET_IFNAME="lo")
    init(rank, world_size)


# Rank 1 waits within its only node, within the first of two nodes, and on the rail of a node.
@pytest.mark.parametrize("nodes", ["aaa", "aab", "abc"])
@pytest.mark.ranks(3, backend=None)
def test_an_interrupted_wait_fails_the_group_on_all_ranks(rank: int, world_size: int, nodes: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    init_on(nodes, rank, world_size)
    for name, call in WAITS.items():
        group = dist.new_group()
        if rank < 2:
            if rank == 1:
                once_blocked(signal.SIGINT)
            began = time.monotonic()
            # The wait ends early, not at the timeout of 60 s.
            with pytest.raises(KeyboardInterrupt if rank == 1 else torch_symm.SymmPeerError) as caught:
                call(group)
            assert time.monotonic() - began < 20, name
            told = str(caught.value)
            assert rank == 1 or re.match(r"rank 1 \(.*pid \d+\) was interrupted by a signal in .* of group", told), told
        meet(name, rank, world_size)
        with pytest.raises(
            (torch_symm.SymmAbortedError, torch_symm.SymmPeerError), match=r"rank 1 .* was interrupted by a signal in"
        ):
            dist.barrier(group=group)
    # Other groups still work, and the interrupts have left nothing.
    dist.all_reduce(tensor := torch.ones(3))
    assert bool((tensor == world_size).all())


@pytest.mark.parametrize("kind", ["collective", "message"])
@pytest.mark.ranks(2)
def test_an_exception_of_a_handler_during_which_the_call_ends_is_raised_by_its_wait(
    rank: int, world_size: int, kind: str
) -> None:
    tensor = torch.full((3,), float(rank + 1))
    if rank == 0:
        message, deadline = kind == "message", time.monotonic() + 60
        work = dist.irecv(tensor, 1) if message else dist.all_reduce(tensor, async_op=True)
        assert work is not None

        def handler(_number: int, _frame: FrameType | None) -> None:
            meet("handled", rank, world_size)
            while not work.is_completed() and time.monotonic() < deadline:
                time.sleep(0.01)
            raise KeyError("of the handler")

        signal.signal(signal.SIGUSR1, handler)
        once_blocked(signal.SIGUSR1)
        with pytest.raises(KeyError, match="of the handler"):
            work.wait(timedelta(seconds=50))
    else:
        meet("handled", rank, world_size)
        if kind == "message":
            dist.send(tensor, 0)
        else:
            dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0 if kind == "message" else 3.0] * 3
    # The call has ended on both ranks, so the group stays.
    dist.all_reduce(tensor)
    assert tensor.tolist() == [4.0 if kind == "message" else 6.0] * 3


# A rank of the same node that comes later reads of the interrupt in the store.
@pytest.mark.parametrize("late", [0.0, 0.5])
@pytest.mark.ranks(3, backend=None)
def test_an_interrupted_rank_that_waits_for_another_node_to_join_is_named(
    rank: int, world_size: int, late: float
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    init_on("aab", rank, world_size)
    if rank < 2:
        if rank == 0:
            once_blocked(signal.SIGINT)
        else:
            time.sleep(late)
        with pytest.raises(KeyboardInterrupt if rank == 0 else torch_symm.SymmPeerError) as caught:
            dist.new_group()
        met = r'rank 0 \(node "a", pid \d+\) was interrupted by a signal while it joined group "\w+"'
        read = r"rank 0 \(pid \d+\) cannot join .*: a signal has ended the waiting"
        assert rank == 0 or re.search(f"{met}|{read}", str(caught.value)), caught.value
    meet("interrupted", rank, world_size)


@pytest.mark.ranks(2)
def test_a_handler_that_returns_disturbs_no_call(rank: int, world_size: int) -> None:
    signal.signal(signal.SIGUSR1, lambda _number, _frame: meet("handled", 0, 1))
    if rank == 0:
        once_blocked(signal.SIGUSR1)
        dist.all_reduce(tensor := torch.ones(3))
        assert bool((tensor == world_size).all())
    else:
        # While rank 0 waits, its handler runs; no other event ends the wait.
        meet("handled", 1, 2)
        dist.all_reduce(torch.ones(3))

    def nested(_number: int, _frame: FrameType | None) -> None:
        dist.all_reduce(torch.ones(1))

    signal.signal(signal.SIGUSR1, nested)
    group = dist.new_group()
    if rank == 0:
        # The handler also runs while this rank waits in another group.
        once_blocked(signal.SIGUSR1)
        dist.all_reduce(torch.ones(3), group=group)
        once_blocked(signal.SIGUSR1)
        with pytest.raises(torch_symm.SymmConfigError, match=r"cannot wait for a collective .* set a flag"):
            dist.all_reduce(torch.ones(3))
    else:
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(3), group=group)
    meet("ended", rank, world_size)

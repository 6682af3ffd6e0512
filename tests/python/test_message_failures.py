"""Send and receive where ranks die or leave, threads cannot start and reads of a peer are forbidden."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
import torch_symm
from ranks import meet, run_ranks
from sandbox import deny, needs_seccomp
from test_point_to_point import numbers


def exchange(peer: int) -> None:
    receive = dist.P2POp(dist.irecv, torch.zeros(4), peer, tag=3)
    operations = [receive, dist.P2POp(dist.isend, torch.zeros(3 << 20), peer, tag=4)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def polled(peer: int) -> None:
    """Nobody waits: the progress thread hears of it."""
    work = dist.irecv(torch.zeros(4), peer)
    while not work.is_completed():
        time.sleep(0.001)
    work.wait()


#: What two ranks wait in for each other, neither of which ever makes the other's part of it.
WAITS: dict[str, Callable[[int], object]] = {
    "recv": lambda peer: dist.recv(torch.zeros(4), peer),
    "recv from any": lambda peer: dist.recv(torch.zeros(4), None),
    "long send": lambda peer: dist.send(torch.zeros(3 << 20), peer),
    "irecv": lambda peer: dist.irecv(torch.zeros(4), peer).wait(),
    "isend": lambda peer: dist.isend(torch.zeros(3 << 20), peer).wait(),
    "batch": exchange,
    "irecv without a wait": polled,
}


def die() -> None:
    (ranks.scratch / "killed").write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def a_third_rank_dies(rank: int, world: int, name: str) -> tuple[float, str]:
    dist.barrier()
    if rank == 2:
        time.sleep(0.3)
        die()
    with pytest.raises(torch_symm.SymmPeerError) as error:
        WAITS[name](1 - rank)
    return time.time() - float((ranks.scratch / "killed").read_text()), str(error.value)


@pytest.mark.timed
@pytest.mark.parametrize("name", WAITS)
def test_p2_the_death_of_a_third_rank_ends_what_two_ranks_wait_in(name: str) -> None:
    received = run_ranks(a_third_rank_dies, 3, name, expect_killed=(2,))[:2]
    print(f"{name}: {', '.join(f'{took * 1000:.0f} ms' for took, _ in received)}")
    for took, text in received:
        assert took < 1 and "rank 2 (pid" in text and "SIGKILL" in text, (took, text)
        assert ("send(" in text or "recv(" in text) and "had waited 0." in text, text


LATER: dict[str, Callable[[int], object]] = {
    "short send": lambda peer: dist.send(torch.zeros(4), peer),
    "short isend": lambda peer: dist.isend(torch.zeros(4), peer).wait(),
    **{name: call for name, call in WAITS.items() if name != "batch"},
}


def after_a_death(rank: int, world: int, name: str) -> str:
    """Rank 2's last message was complete when it died: it is delivered; nothing that was begun after that succeeds."""
    if rank == 2:
        dist.send(numbers(1000, 5), 0, tag=1)
        meet("sent", rank, world)
        die()
    meet("sent", rank, world)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    until = time.monotonic() + 5
    while "SUCCESS" in str(backend.get_error()):
        assert time.monotonic() < until, "the death is not heard"
        time.sleep(0.001)
    if rank == 0:
        got = torch.zeros(1000, dtype=torch.int32)
        assert dist.recv(got, 2, tag=1) == 2
        assert torch.equal(got, numbers(1000, 5))
        (ranks.scratch / "received").touch()
    while not (ranks.scratch / "received").exists():
        assert time.monotonic() < until, "rank 0 has received nothing"
        time.sleep(0.001)
    start = time.monotonic()
    with pytest.raises(torch_symm.SymmPeerError) as error:
        LATER[name](1 - rank)
    assert time.monotonic() - start < 1
    return str(error.value)


@pytest.mark.timed
@pytest.mark.parametrize("name", LATER)
def test_p2_what_had_come_from_the_dead_is_delivered_and_no_later_message_is(name: str) -> None:
    for text in run_ranks(after_a_death, 3, name, expect_killed=(2,))[:2]:
        assert "rank 2 (pid" in text and "SIGKILL" in text, text


def one_leaves(rank: int, world: int) -> None:
    dist.barrier()
    if rank == 2:
        return
    time.sleep(0.3)
    got = torch.zeros(4, dtype=torch.int32)
    if rank == 0:
        dist.send(numbers(4, 1), 1)
    else:
        dist.recv(got, 0)
        assert torch.equal(got, numbers(4, 1))
        with pytest.raises(torch_symm.SymmPeerError, match=r"rank 2.*left.*recv"):
            dist.recv(got, 2)


def test_a_rank_that_has_left_ends_only_messages_with_itself() -> None:
    run_ranks(one_leaves, 3)


@contextmanager
def no_room_for_a_thread() -> Iterator[None]:
    """The process may map little more than it has, and the stacks that ended threads left are taken."""
    released = threading.Event()
    for size in (0, 2 << 20):  # of Python's threads, and of Rust's
        usual = threading.stack_size(size)
        for _ in range(6):
            threading.Thread(target=released.wait, daemon=True).start()
        threading.stack_size(usual)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (1 << 20), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        released.set()


def cannot_start(rank: int, world: int, send: bool) -> None:
    count = 20_000  # too long to go unasked, too short for a mapping of its own
    dist.barrier()
    if rank == 1:
        tensor = torch.full((count,), 3.0)
        with no_room_for_a_thread(), pytest.raises(dist.DistBackendError, match="progress thread"):
            (dist.isend if send else dist.irecv)(tensor, 0, tag=5)
        tensor.fill_(1)  # its memory is the caller's again
    dist.barrier()
    if rank == 0 and not send:
        work = dist.isend(torch.full((count,), 666.0), 1, tag=5)
    dist.barrier()
    if rank == 1:
        time.sleep(0.05)
        assert bool((tensor == 1).all())
        dist.send(torch.full((7,), 4.0), 0, tag=5) if send else dist.recv(torch.empty(count), 0, tag=5)
    elif send:
        dist.recv(got := torch.zeros(7), 1, tag=5)
        assert bool((got == 4).all())
    else:
        work.wait()


@pytest.mark.parametrize("send", (True, False), ids=("send", "receive"))
def test_what_cannot_start_is_not_posted(send: bool) -> None:
    """Its memory is its owner's again, and the next message of that tag is the next call's."""
    run_ranks(cannot_start, 2, send)


def reads_are_forbidden_later(rank: int, world: int) -> str:
    count = 2 << 20
    for turn in range(3):
        dist.barrier()
        if rank == 1:
            work = dist.isend(numbers(count, turn), 0, tag=turn)
            # Nobody attends to it, so that its receiver would read it.
            meet(f"received-{turn}", rank, world)
            work.wait()
            continue
        if turn == 1:
            deny("process_vm_readv", errno.EPERM)
        got = torch.zeros(count, dtype=torch.int32)
        dist.recv(got, 1, tag=turn)
        assert torch.equal(got, numbers(count, turn))
        meet(f"received-{turn}", rank, world)
    dist.barrier()
    if rank == 1:
        dist.isend(numbers(count, 0), 0, tag=7)
        die()
    time.sleep(0.1)
    with pytest.raises(torch_symm.SymmPeerError) as error:
        dist.recv(torch.zeros(count, dtype=torch.int32), 1, tag=7)
    return str(error.value)


@pytest.mark.timed
@needs_seccomp
def test_p3_reads_of_peers_that_are_forbidden_later() -> None:
    """A hardening agent may do so. The message comes in pieces; where that fails too, the error says which message."""
    results = run_ranks(reads_are_forbidden_later, 2, expect_killed=(1,))
    assert re.search(
        r"rank 1 \(pid \d+\) has ended.*in recv\(8388608 bytes, tag 7\) of group \"default\"", results[0]
    ), results[0]
    assert results.logs[0].count("come in pieces from now on") == 1, results.logs[0]


def a_read_is_cut_short(rank: int, world: int, how: str) -> str:
    """Rank 0 reads the memory of rank 1, which computes meanwhile."""
    tensor = torch.full((256 << 20,), rank, dtype=torch.uint8)
    abort = dist.group.WORLD._get_backend(torch.device("cpu")).abort
    begun = ranks.scratch / "begun"
    dist.barrier()
    if rank == 1:
        work = dist.isend(tensor, 0)
        while not begun.exists():
            time.sleep(0.001)
        if how == "the sender dies":
            die()
        if how == "the sender aborts":
            abort()
        if how == "the sender leaves":
            dist.destroy_process_group()
        while not work.is_completed():
            time.sleep(0.001)
        tensor.fill_(7)
        return ""

    def watch() -> None:
        nonlocal cut
        while tensor[0] == 0:
            pass
        begun.touch()
        cut = time.monotonic()
        if how == "the receiver aborts":
            abort()

    cut = float("inf")
    watching = threading.Thread(target=watch)
    watching.start()
    try:
        dist.recv(tensor, 1)
        ended = time.monotonic()
    except dist.DistBackendError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        watching.join()
    # On a busy machine the read may be over before it is cut short.
    assert bool((tensor == 1).all()) and (how != "the receiver aborts" or ended < cut), "the receive succeeded"
    return ""


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("the sender aborts", r"SymmPeerError: rank 1 \(pid \d+\) aborted"),
        ("the sender leaves", r"SymmPeerError: rank 1 \(pid \d+\) left the group.*in recv\(268435456 bytes, tag 0\)"),
        ("the receiver aborts", r"SymmAborted: rank 0 \(pid \d+\) aborted"),
        ("the sender dies", r"SymmPeerError: rank 1 \(pid \d+\) has ended.*in recv\(268435456 bytes, tag 0\)"),
    ],
)
def test_p2_a_read_that_is_cut_short_does_not_succeed(how: str, error: str) -> None:
    results = run_ranks(a_read_is_cut_short, 2, how, expect_killed=(1,) if how == "the sender dies" else ())
    assert not results[0] or re.match(error, results[0]), results[0]
    assert "in pieces" not in results.logs[0], results.logs[0]

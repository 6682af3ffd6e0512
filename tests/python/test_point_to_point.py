"""Send and receive, with and without direct reads of the peer's memory. messages.py has the scenarios."""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch_symm
from ranks import backend_of, meet, run_ranks
from sandbox import deny, needs_seccomp

import messages
from messages import numbers

DIRECT = pytest.mark.parametrize("direct", ("1", "0"), ids=("direct", "staged"))


def run(fn: Callable[..., None], world: int, direct: str, *args: object) -> None:
    run_ranks(fn, world, *args, env={"SYMM_CMA": direct})


@DIRECT
@pytest.mark.parametrize("which", ("named", "any"))
def test_every_scenario(which: str, direct: str) -> None:
    run(messages.run_all, 4, direct, which)


@DIRECT
@pytest.mark.parametrize("world", (1, 2))
def test_ring_of_batches(world: int, direct: str) -> None:
    run(messages.ring, world, direct)


# proves P7
@pytest.mark.parametrize("size", (10, 100_000))
@pytest.mark.ranks(2)
def test_a_message_of_another_size_is_an_error_on_both_sides(rank: int, size: int) -> None:
    if rank == 0:
        with pytest.raises(torch_symm.SymmMismatchError, match=f"{4 * size} bytes"):
            # A short message was sent before the receiver checked; the next call reports its outcome.
            dist.send(torch.ones(size), 1)
            dist.barrier()
    else:
        with pytest.raises(torch_symm.SymmMismatchError, match=f"{4 * size} bytes"):
            dist.recv(torch.zeros(size - 1), 0)


def unasked(rank: int, world: int) -> None:
    """Rank 1 sends rank 0 more than it accepts eagerly; messages in both directions then queue behind these."""
    count, piece = 1200, torch.zeros(64 << 10, dtype=torch.uint8)
    long, short = torch.arange(1 << 18), torch.zeros(4)
    if rank == 1:
        works = [dist.isend(piece.clone().fill_(i % 251), 0, tag=i) for i in range(count)]
        meet("sent", rank, world)
        dist.recv(got := torch.zeros_like(long), 0, tag=count)
        assert torch.equal(got, long)
        for work in works:
            work.wait()
    elif rank == 2:
        meet("sent", rank, world)
        time.sleep(0.5)
        dist.send(short, 0)
    else:
        meet("sent", rank, world)
        dist.recv(short, 2)
        dist.send(long, 1, tag=count)
        for i in reversed(range(count)):
            dist.recv(piece, 1, tag=i)
            assert bool((piece == i % 251).all()), i


# proves P1
@DIRECT
def test_more_than_a_receiver_takes_unasked_holds_nobody_up(direct: str) -> None:
    run(unasked, 3, direct)


def private_kib() -> int:
    """KiB that this process has written since it was forked; its resident size would include inherited pages."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return int(re.findall(r"Private_Dirty: +(\d+) kB", rollup)[0])


def never_asked_for(rank: int, world: int) -> int:
    """Rank 1 floods rank 0, which waits for rank 2; returns how many KiB rank 0 accepted."""
    seen, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            seen.append(private_kib())

    backend = backend_of()
    backend._set_default_timeout(timedelta(seconds=1.5 if rank == 1 else 30))
    dist.barrier()
    before = private_kib()
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    if rank < 2:
        # The sender times out first.
        reported = (
            r"rank 1 \(pid \d+\) reached its timeout after .* in send\(65536 bytes, tag \d+\) .*, "
            r"waiting for rank 0 \(rank 0: pid \d+ alive, "
        )
        with pytest.raises(torch_symm.SymmTimeoutError, match=reported):
            if rank == 0:
                dist.recv(torch.zeros(4), 2)
            piece = torch.zeros(64 << 10, dtype=torch.uint8)
            for work in [dist.isend(piece, 0, tag=i % 50) for i in range(3000)]:
                work.wait()
    meet("given up", rank, world)
    over.set()
    watcher.join()
    return max(seen) - before


def test_a_receiver_keeps_a_bounded_amount_of_what_it_did_not_ask_for() -> None:
    grown = run_ranks(never_asked_for, 3)[0]
    assert 40 << 10 < grown < 100 << 10, f"{grown} KiB"


def reads_are_forbidden_later(rank: int, world: int) -> str:
    count = 2 << 20
    for turn in range(3):
        dist.barrier()
        if rank == 1:
            work = dist.isend(numbers(count, turn), 0, tag=turn)
            # No thread of the sender advances its messages, so its receiver would read the memory.
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
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.1)
    with pytest.raises(torch_symm.SymmPeerError) as error:
        dist.recv(torch.zeros(count, dtype=torch.int32), 1, tag=7)
    return str(error.value)


@pytest.mark.timed
@needs_seccomp
def test_p3_reads_of_peers_that_are_forbidden_later() -> None:
    """A hardening agent may forbid the reads. Messages then arrive in chunks; if that fails, the error names them."""
    results = run_ranks(reads_are_forbidden_later, 2, expect_killed=(1,))
    assert re.search(
        r"rank 1 \(pid \d+\) has ended.*in recv\(8388608 bytes, tag 7\) of group \"default\"", results[0]
    ), results[0]
    assert results.logs[0].count("come in pieces from now on") == 1, results.logs[0]

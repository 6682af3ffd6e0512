"""Send and receive: matching, sizes, order, with and without direct reads of the peer's memory."""

from __future__ import annotations

import errno
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import expected
import pytest
import torch
import torch.distributed as dist
import torch_symm
from expected import DTYPES, assert_same_bits, name, seeded
from ranks import meet, run_ranks
from sandbox import deny, needs_seccomp

SIZES = (8, 64, 4096, 4100, 100_000, 1 << 20, 8 << 20)

DIRECT = pytest.mark.parametrize("direct", ("1", "0"), ids=("direct", "staged"))


def run(fn: Callable[..., None], world: int, direct: str, *args: object) -> None:
    run_ranks(fn, world, *args, env={"SYMM_CMA": direct})


def numbers(count: int, seed: int) -> torch.Tensor:
    return torch.arange(seed, seed + count, dtype=torch.int32)


def tags(rank: int, world: int) -> None:
    order = list(range(20))
    random.Random(3).shuffle(order)
    sizes = [(8, 300, 2_000, 70_000)[tag % 4] for tag in range(20)]
    if rank == 0:
        works = [dist.isend(numbers(sizes[tag], tag), 1, tag=tag) for tag in range(20)]
        for work in works:
            work.wait()
    else:
        for tag in order:
            got = torch.zeros(sizes[tag], dtype=torch.int32)
            dist.recv(got, 0, tag=tag)
            assert torch.equal(got, numbers(sizes[tag], tag)), tag


@DIRECT
def test_tags_out_of_order(direct: str) -> None:
    run(tags, 2, direct)


def same_tag_keeps_order(rank: int, world: int) -> None:
    sizes = [random.Random(i).choice((1, 1_000, 30_000)) for i in range(60)]
    if rank == 0:
        for i, size in enumerate(sizes):
            dist.isend(torch.full((size,), float(i)), 1, tag=5)
        dist.recv(torch.zeros(1), 1, tag=6)
    else:
        for i, size in enumerate(sizes):
            got = torch.zeros(size)
            dist.recv(got, 0, tag=5)
            assert (got == i).all(), i
        dist.send(torch.zeros(1), 0, tag=6)


@DIRECT
def test_messages_of_one_tag_do_not_overtake(direct: str) -> None:
    run(same_tag_keeps_order, 2, direct)


def any_source(rank: int, world: int, size: int) -> None:
    if rank == 0:
        seen = []
        for _ in range(2 * (world - 1)):
            got = torch.zeros(size)
            source = dist.recv(got, None, tag=9)
            assert (got == source).all()
            seen.append(source)
        assert sorted(seen) == sorted([*range(1, world)] * 2)
        work = dist.irecv(torch.zeros(size), None, tag=10)
        dist.send(torch.zeros(1), world - 1, tag=11)
        work.wait()
        assert work._source_rank() == world - 1
    else:
        for _ in range(2):
            dist.send(torch.full((size,), float(rank)), 0, tag=9)
        if rank == world - 1:
            dist.recv(torch.zeros(1), 0, tag=11)
            dist.send(torch.zeros(size), 0, tag=10)


@DIRECT
@pytest.mark.parametrize("size", (2, 5_000, 400_000))
def test_any_source(size: int, direct: str) -> None:
    run(any_source, 4, direct, size)


def early_and_late(rank: int, world: int) -> None:
    for size in SIZES:
        for receiver_late in (False, True):
            dist.barrier()
            if (rank == 1) == receiver_late:
                time.sleep(0.02)
            if rank == 0:
                dist.send(numbers(size // 4, size), 1)
            else:
                got = torch.zeros(size // 4, dtype=torch.int32)
                assert dist.recv(got, 0) == 0
                assert torch.equal(got, numbers(size // 4, size)), (size, receiver_late)


@DIRECT
def test_send_before_recv_and_recv_before_send(direct: str) -> None:
    run(early_and_late, 2, direct)


def to_oneself(rank: int, world: int) -> None:
    for size in SIZES:
        got = torch.zeros(size // 4, dtype=torch.int32)
        work = dist.isend(numbers(size // 4, 1), rank, tag=1)
        dist.recv(got, rank, tag=1)
        work.wait()
        assert torch.equal(got, numbers(size // 4, 1))
        later = dist.irecv(got, rank, tag=2)
        dist.isend(numbers(size // 4, 2), rank, tag=2).wait()
        later.wait()
        assert torch.equal(got, numbers(size // 4, 2))


@DIRECT
def test_self_sends(direct: str) -> None:
    run(to_oneself, 2, direct)


def ring(rank: int, world: int) -> None:
    for size in SIZES:
        got = torch.zeros(size // 4, dtype=torch.int32)
        operations = [
            dist.P2POp(dist.isend, numbers(size // 4, rank), (rank + 1) % world),
            dist.P2POp(dist.irecv, got, (rank - 1) % world),
        ]
        for work in dist.batch_isend_irecv(operations if rank % 2 else operations[::-1]):
            work.wait()
        assert torch.equal(got, numbers(size // 4, (rank - 1) % world))


@DIRECT
@pytest.mark.parametrize("world", (1, 2, 4))
def test_ring_of_batches(world: int, direct: str) -> None:
    run(ring, world, direct)


def many(rank: int, world: int, size: int) -> None:
    peers = [r for r in range(world) if r != rank]
    received = {(peer, i): torch.zeros(size, dtype=torch.int32) for peer in peers for i in range(200)}
    works = [dist.irecv(tensor, peer, tag=i) for (peer, i), tensor in received.items()]
    works += [dist.isend(numbers(size, 1000 * rank + i), peer, tag=i) for peer in peers for i in reversed(range(200))]
    for work in works:
        work.wait()
    assert all(work.is_completed() for work in works)
    for (peer, i), tensor in received.items():
        assert torch.equal(tensor, numbers(size, 1000 * peer + i)), (peer, i)


@DIRECT
@pytest.mark.parametrize("size", (2, 3_000))
def test_200_outstanding(size: int, direct: str) -> None:
    run(many, 3, direct, size)


def every_dtype(rank: int, world: int) -> None:
    for dtype in DTYPES:
        for shape in ((0,), (), (3, 5, 7), (90_000,)):
            values = seeded(dtype, shape, 4)
            for layout in ("contiguous", "strided"):
                room = (
                    torch.zeros((*shape, 2), dtype=dtype)[..., 0] if layout == "strided" else torch.zeros_like(values)
                )
                if rank == 0:
                    dist.send(room.copy_(values), 1)
                else:
                    dist.recv(room, 0)
                    assert_same_bits(room, values, f"{name(dtype)} {shape} {layout}")


@DIRECT
def test_every_dtype(direct: str) -> None:
    assert expected.FLOAT8[0] in DTYPES
    run(every_dtype, 2, direct)


def objects(rank: int, world: int) -> None:
    mine = [{"a": list(range(10_000))}, "text", None]
    if rank == 0:
        dist.send_object_list(mine, dst=1)
    else:
        got = [None] * 3
        dist.recv_object_list(got, src=0)
        assert got == mine


def test_objects() -> None:
    run_ranks(objects, 2)


def between_collectives(rank: int, world: int) -> None:
    """Collectives pass transfers that are open, in both directions."""
    got = torch.zeros(300_000)
    receive = dist.irecv(got, 1 - rank, tag=1)
    total = torch.ones(100_000)
    dist.all_reduce(total)
    send = dist.isend(torch.full((300_000,), float(rank)), 1 - rank, tag=1)
    work = dist.all_reduce(total, async_op=True)
    send.wait()
    receive.wait()
    work.wait()
    assert (got == 1 - rank).all() and (total == 4).all()
    dist.barrier()


@DIRECT
def test_transfers_and_collectives_mix(direct: str) -> None:
    run(between_collectives, 2, direct)


def too_long(rank: int, world: int, size: int) -> None:
    if rank == 0:
        with pytest.raises(torch_symm.SymmMismatch, match=f"{4 * size} bytes"):
            # A short message has left before anybody looks at it; the next call says what became of it.
            dist.send(torch.ones(size), 1)
            dist.barrier()
    else:
        with pytest.raises(torch_symm.SymmMismatch, match=f"{4 * size} bytes"):
            dist.recv(torch.zeros(size - 1), 0)


@pytest.mark.parametrize("size", (10, 100_000))
def test_a_message_of_another_size_is_an_error_on_both_sides(size: int) -> None:
    run_ranks(too_long, 2, size)


def unasked(rank: int, world: int) -> None:
    """More than rank 0 takes in unasked, then messages both ways that stand behind it."""
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


@DIRECT
def test_more_than_a_receiver_takes_unasked_holds_nobody_up(direct: str) -> None:
    run(unasked, 3, direct)


def private_kib() -> int:
    """What this process has written since it was forked: what it inherited is resident, and may be used again."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return int(re.findall(r"Private_Dirty: +(\d+) kB", rollup)[0])


def never_asked_for(rank: int, world: int) -> int:
    """Rank 1 floods rank 0, which waits for rank 2; how many KiB rank 0 took in is returned."""
    seen, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            seen.append(private_kib())

    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend._set_default_timeout(timedelta(seconds=1.5 if rank == 1 else 30))
    dist.barrier()
    before = private_kib()
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    if rank < 2:
        # The first to give up is the sender.
        reported = r"rank 1 \(pid \d+\) waited .* in send\(65536 bytes, tag \d+\) .* for rank 0 \(pid"
        with pytest.raises(torch_symm.SymmTimeout, match=reported):
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
            # No thread of the sender attends to it, so its receiver would read it.
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
    """A hardening agent may do so. The message comes in pieces; where that fails too, the error says which message."""
    results = run_ranks(reads_are_forbidden_later, 2, expect_killed=(1,))
    assert re.search(
        r"rank 1 \(pid \d+\) has ended.*in recv\(8388608 bytes, tag 7\) of group \"default\"", results[0]
    ), results[0]
    assert results.logs[0].count("come in pieces from now on") == 1, results.logs[0]

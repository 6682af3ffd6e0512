"""Sends and receives between ranks of different nodes, also in blocks, and after a rejected argument."""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import ranks
import test_coalescing
import torch
import torch.distributed as dist
import torch_symm
from faults.rejections import freed, overlapping
from launch import on_nodes, run_nodes
from torch_symm import _backends

import messages


@pytest.mark.parametrize(
    ("layout", "which"),
    [
        *(((2, 2), "named"), ((3, 1), "named"), ((1, 1), "named")),
        *(((2, 2), "any"), ((1, 3), "any"), ((2, 3, 1), "any"), ((1, 1), "any")),
    ],
    ids=str,
)
def test_every_scenario(layout: tuple[int, ...], which: str) -> None:
    run_nodes(messages.run_all, layout, which)


@on_nodes(1, 1, 1)
def test_links_that_are_made_at_once_do_not_wait_for_each_other(rank: int, world_size: int) -> None:
    """The ranks use torch's TCPStore, which has one connection per process."""
    dist.destroy_process_group()
    before, make = (rank - 1) % world_size, _backends.make

    def late(kind: str, name: str, *arguments: Any) -> Any:
        # Each rank waits for the next one, which has not yet published its address.
        if "symm-pair/" in name and name.endswith(f"/{min(rank, before)}-{max(rank, before)}"):
            time.sleep(0.5)
        return make(kind, name, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_backends, "make", late)
        port = ranks.scratch / "port"
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            port.write_text(str(store.port))
        ranks.meet("port", rank, world_size)
        if rank > 0:
            store = dist.TCPStore("127.0.0.1", int(port.read_text()), None, False, wait_for_workers=False)
        dist.init_process_group("symm", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=20))
        messages.all_send_first(rank, world_size)
    dist.destroy_process_group()


def held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


@pytest.mark.timed
@on_nodes(2, 2)
def test_messages_need_few_threads_and_leave_nothing_behind(rank: int) -> None:
    dist.barrier()
    joined = held()
    group = dist.new_group()
    both = held()
    peer = (rank + 2) % 4
    for _ in range(3):
        sent = dist.isend(torch.ones(5), peer, group=group)
        dist.recv(torch.zeros(5), peer, group=group)
        assert sent is not None
        sent.wait()
    used = held()
    # The thread that checks deadlines, one for the peer, and Gloo's three threads.
    assert used[0] - both[0] <= 5, (joined, both, used)
    del sent
    begun = time.monotonic()
    dist.destroy_process_group(group)
    assert time.monotonic() - begun < 0.9
    del group
    deadline = time.monotonic() + 5
    while held() > joined and time.monotonic() < deadline:
        time.sleep(0.01)
    assert held() <= joined, (joined, both, used)


@on_nodes(1, 1)
def test_a_peer_that_was_stopped_goes_on(rank: int) -> None:
    got = torch.zeros(300_000)
    if rank == 0:
        dist.send(torch.ones(1), 1)
        dist.recv(got, 1)
        assert bool((got == 3).all())
        return
    dist.recv(got[:1], 0)
    child = os.fork()
    if child == 0:
        time.sleep(1.5)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
    dist.send(torch.full((300_000,), 3.0), 0)
    os.waitpid(child, 0)


@on_nodes(1, 1)
def test_a_peer_that_publishes_its_address_late_is_awaited_until_the_deadline(rank: int) -> None:
    make = _backends.make

    def late(kind: str, name: str, store: Any, place: int, size: int, timeout: timedelta, device: int) -> Any:
        if "symm-pair/" in name:
            timeout = timedelta(seconds=5)
            if rank == 1:
                time.sleep(8)
        return make(kind, name, store, place, size, timeout, device)

    got = torch.zeros(10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_backends, "make", late)
        if rank == 0:
            dist.send(torch.ones(10), 1)
        else:
            dist.recv(got, 0)
            assert bool((got == 1).all())


@on_nodes(1, 2, expect_killed=[2])
def test_a_new_group_over_the_same_store_reads_nothing_of_the_old_one(rank: int, world_size: int) -> None:
    """Survivors of a killed rank make the default group again over the same store."""
    tensor, make = torch.full((4,), float(rank)), _backends.make
    store = ranks.file_store("default", world_size)
    # No message returns, so rank 0 does not know whether its address was read.
    if rank < 2:
        dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)
    dist.monitored_barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(torch_symm.SymmPeerError):
        dist.barrier()
    dist.destroy_process_group()
    ranks.meet("destroyed", rank, 2)
    left = [key for key in store.list_keys() if "symm-pair" in key or "symm-rail" in key]
    assert left == [], left

    def late(kind: str, name: str, *arguments: Any) -> Any:
        # Rank 1 polls for the address before rank 0 has published it.
        time.sleep(0.3 if rank == 0 and "symm-pair" in name else 0)
        return make(kind, name, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_backends, "make", late)
        ranks.init(rank, 2)
        dist.send(tensor + 5, 1) if rank == 0 else dist.recv(tensor, 0)
        assert rank == 0 or bool((tensor == 5).all())
        dist.recv(tensor, 1) if rank == 0 else dist.send(tensor, 0)
    dist.destroy_process_group()


@on_nodes(2, 2)
def test_the_trace_names_the_peer_by_its_global_rank(rank: int) -> None:
    """The trace names the peer by its global rank, also for a receive that named none."""
    group = dist.new_group([1, 2, 3])
    if rank == 1:
        dist.recv(torch.ones(2), 2, group=group, tag=6)
        assert {dist.recv(torch.zeros(1), group=group), dist.recv(torch.zeros(1), group=group)} == {2, 3}
    elif rank > 1:
        if rank == 2:
            dist.send(torch.ones(2), 1, group=group, tag=6)
        dist.send(torch.ones(1), 1, group=group)
    dump = json.loads(Path(torch_symm.dump_trace()).read_text())
    calls = [call for call in dump["calls"] if call["op"] in ("send", "recv")]
    found = {(call["peer"], call["internode"], call["tag"], call["state"]) for call in calls}
    of_1 = {(2, True, 6, "completed"), (2, True, 0, "completed"), (3, True, 0, "completed")}
    of_2 = {(1, True, 6, "completed"), (1, True, 0, "completed")}
    assert found == (set(), of_1, of_2, {(1, True, 0, "completed")})[rank]


@pytest.mark.parametrize("count", [4, 500_000])
@on_nodes(1, 1)
def test_lengths_that_differ_are_an_error_of_the_receiver(rank: int, world_size: int, count: int) -> None:
    dist.barrier()
    tensor = torch.full((count + rank,), 7.0)
    if rank == 0:
        # The work lives until the other rank has ended its call.
        work = dist.isend(torch.ones(count), 1, tag=3)
    else:
        with pytest.raises(torch_symm.SymmMismatchError) as caught:
            dist.recv(tensor, 0, tag=3)
        assert bool((tensor == 7).all()), "nothing was written"
        text = str(caught.value)
        assert f"sent {4 * count} bytes (float32, tag 3)" in text and f"expects {4 * count + 4} (float32)" in text
        assert 'rank 0 (node "a", pid' in text and 'rank 1 (node "b", pid' in text
    ranks.meet("over", rank, world_size)
    assert rank or work is not None


@pytest.mark.parametrize("sender", (1, 2))
@on_nodes(2, 2)
def test_a_length_that_differs_is_an_error_though_the_receive_names_nobody(
    rank: int, world_size: int, sender: int
) -> None:
    # Waits until all ranks have left the barrier, because a rank that is still in it would get the error there.
    dist.barrier()
    ranks.meet("ready", rank, world_size)
    with pytest.raises(
        torch_symm.SymmMismatchError, match=rf"rank {sender} .*sent 20 bytes .* to rank 0 .*recv expects 16"
    ):
        if rank == sender:
            dist.send(torch.ones(5), 0)
        if rank == 0:
            dist.recv(torch.zeros(4))
        dist.barrier()


@pytest.mark.timed
@pytest.mark.parametrize(
    ("layout", "source", "met"),
    [((1, 1), 1, False), ((1, 1), 1, True), ((1, 1), None, False), ((2, 2), None, False)],
    ids=str,
)
@on_nodes(timeout=2)
def test_a_timeout_names_the_peer_and_stands(rank: int, world_size: int, source: int | None, met: bool) -> None:
    """The last rank sends nothing; the others get the timeout, which persists."""
    tensor, last = torch.full((300_000,), 7.0), world_size - 1
    if met and rank in (0, last):
        dist.send(tensor, 0) if rank == last else dist.recv(tensor, last)
    dist.barrier()
    begun = time.monotonic()
    with pytest.raises(torch_symm.SymmTimeoutError) as caught:
        if rank > 0:
            time.sleep(0.5)
            dist.barrier()
        dist.recv(tensor, source, tag=2)
    took, text = time.monotonic() - begun, str(caught.value)
    with pytest.raises(dist.DistBackendError) as again:
        dist.send(tensor, last if rank == 0 else 0)
    ranks.meet("over", rank, world_size)
    if source is None:
        assert "rank 0" in text and "recv(1200000 bytes" in text and "for any rank" in text, text
    elif rank == 0:
        why = "which did not send it" if met else "which has begun no message with it"
        assert text.endswith(why) and 'for rank 1 (node "b", pid' in text, text
    # A receive from any rank accepts any type.
    call = f"recv(1200000 bytes, {'' if source is None else 'float32, '}tag 2)"
    assert rank > 0 or (call in text and str(again.value) == text and 1.9 < took < 10), text


@on_nodes(1, 1)
def test_what_was_sent_arrives_though_its_sender_leaves(rank: int) -> None:
    """The sender leaves right after its send; the receiver still gets the message later."""
    if rank == 0:
        dist.send(messages.numbers(15_000, 1), 1)
        dist.destroy_process_group()
        return
    time.sleep(0.3)
    got = torch.zeros(15_000, dtype=torch.int32)
    dist.recv(got, 0)
    assert torch.equal(got, messages.numbers(15_000, 1))


def test_an_exception_ends_a_block() -> None:
    run_nodes(test_coalescing.after_exceptions, (1, 1), "symm")


@pytest.mark.timed
def test_one_limit_for_all_parts_of_a_block() -> None:
    run_nodes(test_coalescing.one_limit, (1, 1))


@on_nodes(2, 1)
def test_a_refused_message_does_not_count_once_its_rank_has_made_another_call(rank: int, world_size: int) -> None:
    """Rank 0 rejects a message with rank 2, and makes another call before the right one; rank 2 gets no error."""
    for peer in (0, 2):
        dist.send(torch.ones(1), 2 - peer) if rank == peer else dist.recv(torch.ones(1), peer) if rank != 1 else None
    for turn, (refused, between) in enumerate(product(("send", "recv", "any"), ("barrier", "message", "receive"))):
        dist.barrier()
        if rank == 0:
            with pytest.raises((ValueError, RuntimeError)):
                if refused == "send":
                    dist.send(freed(), 2, tag=turn)
                else:
                    dist.recv(overlapping(), 2 if refused == "recv" else None, tag=turn)
            time.sleep(0.2)
        if between == "barrier":
            dist.barrier()
        elif between == "receive":
            # A receive with a different tag: rank 2 is not notified that rank 0 has started it.
            if rank == 0:
                work = dist.irecv(torch.ones(1), 2, tag=100 + turn)
            ranks.meet(f"begun-{turn}", rank, world_size)
        elif rank < 2:
            dist.send(torch.ones(1), 1) if rank == 0 else dist.recv(torch.ones(1), 0)
        # A message from rank 1 tells rank 2 that rank 0 has made the other call.
        if rank == 1:
            dist.send(torch.ones(1), 2)
        elif rank == 2:
            dist.recv(torch.ones(1), 1)
        # The message is longer than a chunk, so that its send waits for the receive.
        long = torch.full((1 << 20,), float(rank))
        if rank == 0:
            time.sleep(0.2)
            if refused == "send":
                dist.send(long, 2, tag=turn)
            else:
                dist.recv(long, 2 if refused == "recv" else None, tag=turn)
                assert bool((long == 2).all())
        elif rank == 2:
            dist.recv(long, 0, tag=turn) if refused == "send" else dist.send(long, 0, tag=turn)
            assert refused != "send" or bool((long == 0).all())
        if between == "receive" and rank != 1:
            dist.send(torch.ones(1), 0, tag=100 + turn) if rank == 2 else work.wait()

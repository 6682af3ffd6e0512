"""Sends and receives between ranks of different hosts."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
import torch_symm
from machines import run_hosts
from torch_symm import _engines

LAYOUTS = [(2, 2), (3, 1), (1, 1)]

DTYPES = [torch.uint8, torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64]


def numbers(seed: int, count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return ((torch.arange(count) * 7 + seed * 31) % 113).to(dtype)


def all_pairs(rank: int, world_size: int) -> None:
    for count in (0, 1, 61, 255, 20_000, 1_310_001):
        for source in range(world_size):
            for destination in range(world_size):
                if rank == source != destination:
                    dist.send(numbers(source, count), destination)
                elif rank == destination != source:
                    got = torch.full((count,), -1, dtype=torch.int32)
                    assert dist.recv(got, source) == source
                    assert torch.equal(got, numbers(source, count)), f"{count} from {source}"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank_sends_to_every_other(layout: tuple[int, ...]) -> None:
    run_hosts(all_pairs, layout)


def both_at_once(rank: int, world_size: int) -> None:
    peers = [peer for peer in range(world_size) if peer != rank]
    for count in (3, 1_310_001):
        sent = [dist.isend(numbers(rank, count), peer) for peer in peers]
        got = [torch.zeros(count, dtype=torch.int32) for _ in peers]
        received = [dist.irecv(tensor, peer) for tensor, peer in zip(got, peers, strict=True)]
        for work in [*reversed(sent), *reversed(received)]:
            assert work is not None and work.wait()
            assert work.is_completed()
        for peer, tensor in zip(peers, got, strict=True):
            assert torch.equal(tensor, numbers(peer, count))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_all_ranks_send_first(layout: tuple[int, ...]) -> None:
    run_hosts(both_at_once, layout)


def meet_in_a_circle(rank: int, world_size: int) -> None:
    """Over torch's TCPStore, of which a process has one connection."""
    dist.destroy_process_group()
    before, make = (rank - 1) % world_size, _engines.make

    def late(engine: str, name: str, *arguments: Any) -> Any:
        # Each rank waits for the one after it, which has not yet said where it is.
        if "symm-pair/" in name and name.endswith(f"/{min(rank, before)}-{max(rank, before)}"):
            time.sleep(0.5)
        return make(engine, name, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_engines, "make", late)
        port = ranks.scratch / "port"
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            port.write_text(str(store.port))
        ranks.meet("port", rank, world_size)
        if rank > 0:
            store = dist.TCPStore("127.0.0.1", int(port.read_text()), None, False, wait_for_workers=False)
        dist.init_process_group("symm", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=20))
        both_at_once(rank, world_size)
    dist.destroy_process_group()


def test_links_that_are_made_at_once_do_not_wait_for_each_other() -> None:
    run_hosts(meet_in_a_circle, (1, 1, 1))


def ring(rank: int, world_size: int) -> None:
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    for count in (5, 300_000):
        for turn in range(5):
            got = torch.zeros(count, dtype=torch.int32)
            works = dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, numbers(rank + turn, count), after), dist.P2POp(dist.irecv, got, before)]
            )
            for work in works:
                work.wait()
            assert torch.equal(got, numbers(before + turn, count))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_batches_in_a_ring_do_not_wait_for_each_other(layout: tuple[int, ...]) -> None:
    run_hosts(ring, layout)


def kinds(rank: int, world_size: int) -> None:
    other = 1 - rank
    # Tags in another order than they were sent; equal tags in theirs.
    if rank == 0:
        for tag in (4, 2, 4, 0):
            dist.send(torch.tensor([10 * tag]), other, tag=tag)
        dist.send(torch.tensor([41]), other, tag=4)
    else:
        got = torch.zeros(1, dtype=torch.int64)
        for tag, value in ((0, 0), (4, 40), (4, 40), (2, 20), (4, 41)):
            dist.recv(got, other, tag=tag)
            assert got.item() == value
    for dtype in DTYPES:
        tensor = numbers(7, 1000, dtype) if rank == 0 else torch.zeros(1000, dtype=dtype)
        dist.send(tensor, other) if rank == 0 else dist.recv(tensor, other)
        assert torch.equal(tensor, numbers(7, 1000, dtype)), dtype
    # A transposed view, and every third column of a larger tensor.
    for strided in (torch.zeros(40, 30).t(), torch.zeros(50, 90)[:, ::3]):
        wanted = torch.arange(strided.numel(), dtype=torch.float32).reshape(strided.shape)
        if rank == 0:
            strided.copy_(wanted)
            dist.send(strided, other)
        else:
            dist.recv(strided, other)
            assert torch.equal(strided, wanted)
    objects: list[Any] = [{"step": 3}, "text", [1, 2.5]] if rank == 0 else [None] * 3
    if rank == 0:
        dist.send_object_list(objects, other)
    else:
        dist.recv_object_list(objects, other)
    assert objects == [{"step": 3}, "text", [1, 2.5]]


def test_tags_dtypes_strides_and_objects() -> None:
    run_hosts(kinds, (1, 1))


def pipeline(rank: int, world_size: int) -> list[float]:
    """Micro-batches go forwards through all ranks and back, several under way, with collectives between them."""
    torch.manual_seed(rank)
    weight = torch.rand(16, 16) / 16
    outputs, works = [], []
    for micro in range(6):
        value = torch.full((4, 16), float(micro + 1))
        if rank > 0:
            dist.recv(value, rank - 1, tag=micro)
        value = value @ weight
        if rank < world_size - 1:
            works.append((dist.isend(value, rank + 1, tag=micro), value))
        outputs.append(value)
    gradients = []
    for micro in reversed(range(6)):
        gradient = torch.ones(4, 16)
        if rank < world_size - 1:
            dist.recv(gradient, rank + 1, tag=100 + micro)
        gradient = gradient @ weight.t()
        if rank > 0:
            works.append((dist.isend(gradient, rank - 1, tag=100 + micro), gradient))
        gradients.append(gradient)
    for work, _ in works:
        assert work is not None
        work.wait()
    total = torch.stack([*outputs, *gradients]).sum().reshape(1)
    dist.all_reduce(total)
    return total.tolist()


def test_a_pipeline_over_hosts_has_the_values_of_one_host() -> None:
    here = ranks.run_ranks(pipeline, 4)
    there = run_hosts(pipeline, (2, 2))
    assert there[0] == there[3] and there[0] == pytest.approx(here[0], rel=1e-5)


def traffic(rank: int, world_size: int) -> None:
    """Messages of all lengths between random ranks, awaited in any order, with a collective beside them."""
    plan = random.Random(5)
    for turn in range(6):
        messages = []
        for number in range(40):
            source, destination = plan.sample(range(world_size), 2)
            messages.append(
                (number, source, destination, plan.randrange(3), plan.choice([0, 3, 900, 5000, 70_000, 2_000_000]))
            )
        mine = [message for message in messages if rank in message[1:3]]
        works = []
        for number, source, destination, tag, count in sorted(
            mine, key=lambda message: (message[1] == rank) != (rank % 2 == 0)
        ):
            value = (number * 7 + turn) % 251
            if source == rank:
                tensor = torch.full((count,), value, dtype=torch.uint8)
                works.append((dist.isend(tensor, destination, tag=tag), tensor, value))
            else:
                tensor = torch.full((count,), 255, dtype=torch.uint8)
                works.append((dist.irecv(tensor, source, tag=tag), tensor, value))
        ones = torch.ones(10)
        collective = dist.all_reduce(ones, async_op=True)
        random.Random(rank).shuffle(works)
        for work, tensor, value in works:
            assert work is not None
            work.wait()
            assert bool((tensor == value).all())
        assert collective is not None
        collective.wait()
        assert ones[0].item() == world_size


@pytest.mark.parametrize("layout", [(2, 2), (3, 1)], ids=str)
def test_random_traffic_beside_collectives(layout: tuple[int, ...]) -> None:
    run_hosts(traffic, layout)


def held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def threads(rank: int, world_size: int) -> None:
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
    # The thread that looks at deadlines, one for the peer, and Gloo's three.
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


@pytest.mark.timed
def test_messages_need_few_threads_and_leave_nothing_behind() -> None:
    run_hosts(threads, (2, 2))


def stopped(rank: int, world_size: int) -> None:
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


def test_a_peer_that_was_stopped_goes_on() -> None:
    run_hosts(stopped, (1, 1))


def anew(rank: int, world_size: int) -> None:
    with contextlib.suppress(dist.DistBackendError):
        if rank == 0:
            dist.recv(torch.zeros(2), 1)
        else:
            dist.send(torch.zeros(3), 0)
            dist.barrier()
    ranks.meet("failed", rank, world_size)
    dist.destroy_process_group()
    ranks.init(rank, world_size, name="again")
    got = torch.zeros(2)
    dist.send(torch.ones(2), 0) if rank else dist.recv(got, 1)
    assert rank or got.tolist() == [1, 1]


def test_a_new_group_serves_after_a_failure() -> None:
    run_hosts(anew, (1, 1))


def over_one_store(rank: int, world_size: int) -> None:
    """Survivors of a killed rank make the default group again over the same store."""
    tensor, make = torch.full((4,), float(rank)), _engines.make
    store = ranks.file_store("default", world_size)
    # Nothing comes back, so that rank 0 has not heard whether its address was read.
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

    def late(engine: str, name: str, *arguments: Any) -> Any:
        # Rank 1 looks for its address before rank 0 has said it.
        time.sleep(0.3 if rank == 0 and "symm-pair" in name else 0)
        return make(engine, name, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_engines, "make", late)
        ranks.init(rank, 2)
        dist.send(tensor + 5, 1) if rank == 0 else dist.recv(tensor, 0)
        assert rank == 0 or bool((tensor == 5).all())
        dist.recv(tensor, 1) if rank == 0 else dist.send(tensor, 0)
    dist.destroy_process_group()


def test_a_new_group_over_the_same_store_reads_nothing_of_the_old_one() -> None:
    run_hosts(over_one_store, (1, 2), expect_killed=[2])


def recorded(rank: int, world_size: int) -> None:
    group = dist.new_group([1, 2])
    if rank not in (1, 2):
        return
    peer = 3 - rank
    dist.send(torch.ones(2), peer, group=group, tag=6) if rank == 1 else dist.recv(
        torch.ones(2), peer, group=group, tag=6
    )
    dump = json.loads(Path(torch_symm.dump_trace()).read_text())
    calls = [call for call in dump["calls"] if call["op"] in ("send", "recv")]
    assert [(call["peer"], call["far"], call["tag"], call["state"]) for call in calls] == [(peer, True, 6, "completed")]


def test_the_trace_names_the_peer_by_its_global_rank() -> None:
    run_hosts(recorded, (2, 2))


def subgroup(rank: int, world_size: int) -> None:
    group = dist.new_group([1, 2, 3])
    if rank == 0:
        return
    # Ranks 1 and 2 of the whole are 0 and 1 here, on different hosts.
    if rank == 1:
        dist.send(torch.tensor([5.0]), 2, group=group)
        dist.send(torch.tensor([6.0]), group=group, group_dst=2)
    elif rank == 2:
        got = torch.zeros(1)
        assert dist.recv(got, 1, group=group) == 1 and got.item() == 5
    else:
        got = torch.zeros(1)
        dist.recv(got, group=group, group_src=0)
        assert got.item() == 6


def test_messages_of_a_group_with_other_numbers() -> None:
    run_hosts(subgroup, (2, 2))


def differ(rank: int, world_size: int, count: int) -> str | None:
    dist.barrier()
    if rank == 0:
        work = dist.isend(torch.ones(count), 1, tag=3)
        ranks.meet("over", rank, world_size)
        del work
        return None
    tensor = torch.full((count + 1,), 7.0)
    with pytest.raises(torch_symm.SymmMismatch) as caught:
        dist.recv(tensor, 0, tag=3)
    assert bool((tensor == 7).all()), "nothing was written"
    ranks.meet("over", rank, world_size)
    return str(caught.value)


@pytest.mark.parametrize("count", [4, 500_000])
def test_lengths_that_differ_are_an_error_of_the_receiver(count: int) -> None:
    text = run_hosts(differ, (1, 1), count)[1]
    assert f"sent {4 * count} bytes (float32, tag 3)" in text and f"expects {4 * count + 4} (float32)" in text
    assert 'rank 0 (host "a", pid' in text and 'rank 1 (host "b", pid' in text


def late(rank: int, world_size: int, met: bool) -> tuple[str, str, float] | None:
    tensor = torch.full((300_000,), 7.0)
    if met:
        dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)
    dist.barrier()
    if rank == 0:
        ranks.meet("over", rank, world_size)
        return None
    begun = time.monotonic()
    with pytest.raises(torch_symm.SymmTimeout) as caught:
        dist.recv(tensor, 0, tag=2)
    took = time.monotonic() - begun
    with pytest.raises(dist.DistBackendError) as again:
        dist.send(tensor, 0)
    ranks.meet("over", rank, world_size)
    return str(caught.value), str(again.value), took


@pytest.mark.timed
@pytest.mark.parametrize("met", [False, True])
def test_a_timeout_names_the_peer_and_stands(met: bool) -> None:
    text, again, took = run_hosts(late, (1, 1), met, timeout=2)[1]
    why = "which did not send it" if met else "which has begun no message with it"
    assert "recv(1200000 bytes, float32, tag 2)" in text and text.endswith(why) and again == text
    assert 'for rank 0 (host "a", pid' in text and 1.9 < took < 10


def die(rank: int, world_size: int, count: int) -> tuple[str, float] | None:
    got = torch.zeros(1)
    if rank == world_size - 1:
        dist.send(got, 0)
        dist.recv(got, 0)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank > 0:
        ranks.meet("over", rank, world_size - 1)
        return None
    dist.recv(got, world_size - 1)
    dist.send(got, world_size - 1)
    begun = time.monotonic()
    with pytest.raises(torch_symm.SymmPeerError) as caught:
        dist.recv(torch.zeros(count), world_size - 1)
    took = time.monotonic() - begun
    ranks.meet("over", rank, world_size - 1)
    return str(caught.value), took


@pytest.mark.timed
@pytest.mark.parametrize("layout", [(2, 2), (1, 1)], ids=str)
def test_a_peer_that_dies_ends_the_message(layout: tuple[int, ...]) -> None:
    last = sum(layout) - 1
    text, took = run_hosts(die, layout, 500_000, expect_killed=[last])[0]
    assert took < 5 and f"rank {last}" in text, text


def abort(rank: int, world_size: int) -> float | None:
    dist.barrier()
    if rank == 1:
        ranks.meet("over", rank, world_size)
        return None
    work = dist.irecv(torch.zeros(4), 1)
    assert work is not None
    time.sleep(0.1)
    begun = time.monotonic()
    dist.group.WORLD._get_backend(torch.device("cpu")).abort()
    with pytest.raises(torch_symm.SymmAborted):
        work.wait()
    took = time.monotonic() - begun
    ranks.meet("over", rank, world_size)
    return took


@pytest.mark.timed
def test_abort_releases_a_message() -> None:
    took = run_hosts(abort, (1, 1))[0]
    assert took is not None and took < 1


def destroy(rank: int, world_size: int) -> None:
    """A rank that leaves right after its send has been read."""
    if rank == 0:
        dist.send(numbers(1, 15_000), 1)
        dist.destroy_process_group()
        return
    time.sleep(0.3)
    got = torch.zeros(15_000, dtype=torch.int32)
    dist.recv(got, 0)
    assert torch.equal(got, numbers(1, 15_000))


def test_what_was_sent_arrives_though_its_sender_leaves() -> None:
    run_hosts(destroy, (1, 1))

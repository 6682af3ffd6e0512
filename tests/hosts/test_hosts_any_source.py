"""Receives from any rank, where senders are on the own host and on others."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
import torch_symm
from machines import run_hosts

LAYOUTS = [(2, 2), (1, 3), (2, 3, 1), (1, 1)]

#: Numbers of elements: in one frame, behind a frame, offered, in several pieces.
COUNTS = (3, 9_000, 40_000, 1_000_000)


def message(source: int, number: int) -> torch.Tensor:
    """Tells whose it is, and which."""
    return torch.full((COUNTS[number % len(COUNTS)],), 1000 * source + number, dtype=torch.int32)


def everybody_to_one(rank: int, world_size: int) -> None:
    """Each number has a length and a tag of its own."""
    for receiver in range(world_size):
        for number in range(8):
            if rank != receiver:
                dist.send(message(rank, number), receiver, tag=number)
                continue
            seen = set()
            for _ in range(world_size - 1):
                got = torch.zeros_like(message(0, number))
                source = dist.recv(got, tag=number)
                assert torch.equal(got, message(source, number)), (source, number)
                seen.add(source)
            assert seen == set(range(world_size)) - {rank}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_messages_of_all_ranks_come_whole_and_name_their_senders(layout: tuple[int, ...]) -> None:
    run_hosts(everybody_to_one, layout)


def in_order(rank: int, world_size: int) -> None:
    """Messages of one sender keep their order, whoever else sends."""
    rounds = 50
    if rank > 0:
        for number in range(rounds):
            dist.send(torch.tensor([rank, number]), 0)
        return
    last = dict.fromkeys(range(1, world_size), -1)
    for _ in range(rounds * (world_size - 1)):
        got = torch.zeros(2, dtype=torch.int64)
        source = dist.recv(got)
        assert got.tolist() == [source, last[source] + 1]
        last[source] += 1


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_messages_of_one_sender_keep_their_order(layout: tuple[int, ...]) -> None:
    run_hosts(in_order, layout)


def open_at_once(rank: int, world_size: int) -> None:
    """Many receives are open when messages come from both sides at the same time: each is filled once."""
    for count in (5, 60_000):
        rounds = 12
        got = [torch.full((count,), -1, dtype=torch.int64) for _ in range(rounds * (world_size - 1))]
        if rank == 0:
            works = [dist.irecv(tensor) for tensor in got]
            dist.barrier()
            sources = []
            for work in works:
                assert work is not None and work.wait()
                sources.append(work._source_rank())
            for source, tensor in zip(sources, got, strict=True):
                assert bool((tensor // 100 == source).all()) and len(set(tensor.tolist())) == 1
            for source in range(1, world_size):
                numbers = [tensor[0].item() % 100 for tensor in got if tensor[0].item() // 100 == source]
                assert numbers == list(range(rounds)), "messages of one sender fill receives in their order"
        else:
            dist.barrier()
            for number in range(rounds):
                dist.send(torch.full((count,), 100 * rank + number), 0)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_of_many_open_receives_is_filled_once(layout: tuple[int, ...]) -> None:
    run_hosts(open_at_once, layout)


def named_between(rank: int, world_size: int, sender: int) -> None:
    """Receives from one rank match in the order in which they were posted, whether they name it or not."""
    for count in (4, 300_000):
        if rank == sender:
            for number in range(6):
                dist.send(torch.full((count,), number), 0, tag=7)
        elif rank == 0:
            got = [torch.full((count,), -1) for _ in range(6)]
            works = [
                dist.irecv(tensor, sender if number % 2 else None, tag=7) if number % 3 else dist.irecv(tensor, tag=7)
                for number, tensor in enumerate(got)
            ]
            for work in reversed(works):
                assert work is not None
                work.wait()
            assert [tensor[0].item() for tensor in got] == list(range(6))
            assert all(len(set(tensor.tolist())) == 1 for tensor in got)
        dist.barrier()


@pytest.mark.parametrize("sender", (1, 3))
def test_named_and_unnamed_sources_keep_the_order_of_receives(sender: int) -> None:
    run_hosts(named_between, (2, 2), sender)


def other_tags(rank: int, world_size: int) -> None:
    if rank == 0:
        first = dist.irecv(torch.zeros(3), tag=5)
        got = torch.zeros(2)
        assert dist.recv(got, tag=6) == 3 and got.tolist() == [3, 3]
        dist.send(torch.ones(1), 1)
        assert first is not None and first.wait() and first._source_rank() == 1
    elif rank == 3:
        dist.send(torch.full((2,), 3.0), 0, tag=6)
    elif rank == 1:
        dist.recv(torch.ones(1), 0)
        dist.send(torch.ones(3), 0, tag=5)


def test_tags_keep_messages_apart() -> None:
    run_hosts(other_tags, (2, 2))


def numbered(rank: int, world_size: int) -> None:
    group = dist.new_group([1, 2, 3])
    if rank == 1:
        got = torch.zeros(1)
        # Global ranks, whatever their numbers in the group are.
        assert {dist.recv(got, group=group), dist.recv(got, group=group)} == {2, 3}
        dump = json.loads(Path(torch_symm.dump_trace()).read_text())
        calls = [call for call in dump["calls"] if call["op"] == "recv"]
        assert {(call["peer"], call["far"], call["state"]) for call in calls} == {
            (2, True, "completed"),
            (3, True, "completed"),
        }
    elif rank > 1:
        dist.send(torch.ones(1), 1, group=group)


def test_sources_are_global_ranks() -> None:
    run_hosts(numbered, (2, 2))


def mismatched(rank: int, world_size: int, sender: int) -> str:
    # All have left the call before: who is still in it would hear of it there.
    dist.barrier()
    ranks.meet("ready", rank, world_size)
    with pytest.raises(torch_symm.SymmMismatch) as caught:
        if rank == sender:
            dist.send(torch.ones(5), 0)
        if rank == 0:
            dist.recv(torch.zeros(4))
        dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize("sender", (1, 2))
def test_a_message_of_another_length_is_an_error(sender: int) -> None:
    for text in run_hosts(mismatched, (2, 2), sender):
        assert re.search(rf"rank {sender} .*sent 20 bytes .* to rank 0 .*recv expects 16", text), text


def nobody(rank: int, world_size: int) -> tuple[str, float]:
    begun = time.monotonic()
    if rank == 0:
        with pytest.raises(torch_symm.SymmTimeout) as caught:
            dist.recv(torch.zeros(4), tag=3)
    else:
        # Whoever waits for rank 0 hears the same.
        with pytest.raises(torch_symm.SymmTimeout) as caught:
            time.sleep(0.5)
            dist.barrier()
    took = time.monotonic() - begun
    ranks.meet("over", rank, world_size)
    return str(caught.value), took


@pytest.mark.timed
@pytest.mark.parametrize("layout", [(2, 2), (1, 1)], ids=str)
def test_a_receive_that_nobody_serves_ends_at_its_deadline(layout: tuple[int, ...]) -> None:
    for text, took in run_hosts(nobody, layout, timeout=2):
        assert "rank 0" in text and "recv(16 bytes" in text and "for any rank" in text, text
        assert 1.9 < took < 10


def dies(rank: int, world_size: int) -> str | None:
    dist.barrier()
    if rank == world_size - 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    text = None
    if rank == 0:
        begun = time.monotonic()
        with pytest.raises(torch_symm.SymmPeerError) as caught:
            dist.recv(torch.zeros(4))
        assert time.monotonic() - begun < 5
        text = str(caught.value)
    ranks.meet("over", rank, world_size - 1)
    return text


@pytest.mark.parametrize("layout", [(2, 2), (1, 1)], ids=str)
def test_the_death_of_a_rank_ends_a_receive_from_any(layout: tuple[int, ...]) -> None:
    last = sum(layout) - 1
    text = run_hosts(dies, layout, expect_killed=[last])[0]
    assert f"rank {last}" in text, text


def ended(rank: int, world_size: int, way: str) -> None:
    dist.barrier()
    if rank == 0:
        work = dist.irecv(torch.zeros(4))
        assert work is not None
        time.sleep(0.1)
        begun = time.monotonic()
        if way == "abort":
            dist.group.WORLD._get_backend(torch.device("cpu")).abort()
        else:
            dist.destroy_process_group()
        with pytest.raises(torch_symm.SymmAborted):
            work.wait()
        assert time.monotonic() - begun < 10
    ranks.meet("over", rank, world_size)


@pytest.mark.parametrize("way", ("abort", "destroy"))
def test_ending_the_group_releases_a_receive(way: str) -> None:
    run_hosts(ended, (2, 2), way)


def beside_collectives(rank: int, world_size: int) -> None:
    """A server of requests on rank 0, as parameter servers are, with collectives in between."""
    for turn in range(10):
        if rank == 0:
            for _ in range(world_size - 1):
                got = torch.zeros(2000)
                source = dist.recv(got, tag=turn)
                dist.send(got + source, source, tag=turn)
        else:
            dist.send(torch.full((2000,), float(turn)), 0, tag=turn)
            answer = torch.zeros(2000)
            dist.recv(answer, 0, tag=turn)
            assert bool((answer == turn + rank).all())
        total = torch.ones(5)
        dist.all_reduce(total)
        assert total.tolist() == [world_size] * 5


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_server_answers_whoever_asks(layout: tuple[int, ...]) -> None:
    run_hosts(beside_collectives, layout)

"""The behaviour of sends and receives of CPU tensors, on one node and on several: one scenario per behaviour."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from expected import DTYPES, assert_same_bits, name, seeded

#: Sizes in bytes: of messages in one frame, of longer ones that are offered first, and of several chunks.
SIZES = (0, 8, 64, 244, 1020, 4096, 4100, 100_000, 1 << 20, 8 << 20)


def numbers(count: int, seed: int) -> torch.Tensor:
    """The values of a message; ``seed`` identifies the sender and the message."""
    return torch.arange(seed, seed + count, dtype=torch.int32)


def finish(works: list[Any]) -> None:
    for work in works:
        assert work is not None
        work.wait()


def all_pairs(rank: int, world: int) -> None:
    """Every rank sends to every other, one after another; ``all_send_first`` has the longest messages."""
    for size in SIZES[:-1]:
        for source in range(world):
            for destination in range(world):
                if rank == source != destination:
                    dist.send(numbers(size // 4, source), destination)
                elif rank == destination != source:
                    got = torch.full((size // 4,), -1, dtype=torch.int32)
                    assert dist.recv(got, source) == source
                    assert torch.equal(got, numbers(size // 4, source)), f"{size} from {source}"


def early_and_late(rank: int, world: int) -> None:
    for size in SIZES:
        for receiver_late in (False, True):
            dist.barrier()
            if (rank == world - 1) == receiver_late:
                time.sleep(0.02)
            if rank == 0:
                dist.send(numbers(size // 4, size), world - 1)
            elif rank == world - 1:
                got = torch.zeros(size // 4, dtype=torch.int32)
                assert dist.recv(got, 0) == 0
                assert torch.equal(got, numbers(size // 4, size)), (size, receiver_late)


def to_oneself(rank: int, world: int) -> None:
    for size in SIZES:
        got = torch.zeros(size // 4, dtype=torch.int32)
        work = dist.isend(numbers(size // 4, 1), rank, tag=1)
        dist.recv(got, rank, tag=1)
        finish([work])
        assert torch.equal(got, numbers(size // 4, 1))
        later = dist.irecv(got, rank, tag=2)
        finish([dist.isend(numbers(size // 4, 2), rank, tag=2), later])
        assert torch.equal(got, numbers(size // 4, 2))


def to_oneself_within_one_tensor(rank: int, world: int) -> None:
    for size in SIZES[1:]:
        for shift in (-1, 1, 3, size // 16, size // 4):
            for receive_first in (False, True):
                tensor = numbers(size // 4 + abs(shift), 1)
                begin = max(0, -shift)
                given, got = tensor[begin:][: size // 4], tensor[begin + shift :][: size // 4]
                expected = given.clone()
                calls = [lambda given=given: dist.isend(given, rank), lambda got=got: dist.irecv(got, rank)]
                finish([call() for call in (calls[::-1] if receive_first else calls)])
                assert torch.equal(got, expected), (size, shift, receive_first)


def all_send_first(rank: int, world: int) -> None:
    peers = [peer for peer in range(world) if peer != rank]
    for count in (3, 1_310_001):
        sent = [dist.isend(numbers(count, rank), peer) for peer in peers]
        got = [torch.zeros(count, dtype=torch.int32) for _ in peers]
        received = [dist.irecv(tensor, peer) for tensor, peer in zip(got, peers, strict=True)]
        for work in [*reversed(sent), *reversed(received)]:
            assert work is not None and work.wait()
            assert work.is_completed()
        for peer, tensor in zip(peers, got, strict=True):
            assert torch.equal(tensor, numbers(count, peer))


def ring(rank: int, world: int) -> None:
    """Batches do not wait for each other, in whatever order their calls are made."""
    for turn, size in enumerate(SIZES):
        got = torch.zeros(size // 4, dtype=torch.int32)
        operations = [
            dist.P2POp(dist.isend, numbers(size // 4, rank + turn), (rank + 1) % world),
            dist.P2POp(dist.irecv, got, (rank - 1) % world),
        ]
        finish(dist.batch_isend_irecv(operations if rank % 2 else operations[::-1]))
        assert torch.equal(got, numbers(size // 4, (rank - 1) % world + turn))


def tags(rank: int, world: int) -> None:
    """Messages are received in a different order than they were sent."""
    order = list(range(20))
    random.Random(3).shuffle(order)
    sizes = [(8, 300, 2_000, 70_000)[tag % 4] for tag in range(20)]
    if rank == 0:
        finish([dist.isend(numbers(sizes[tag], tag), world - 1, tag=tag) for tag in range(20)])
    elif rank == world - 1:
        for tag in order:
            got = torch.zeros(sizes[tag], dtype=torch.int32)
            dist.recv(got, 0, tag=tag)
            assert torch.equal(got, numbers(sizes[tag], tag)), tag


def one_tag(rank: int, world: int) -> None:
    """Messages with one tag do not overtake each other, although others are received in between."""
    sizes = [random.Random(i).choice((1, 1_000, 30_000)) for i in range(60)]
    if rank == 0:
        for i, size in enumerate(sizes):
            dist.isend(torch.full((size,), float(i)), world - 1, tag=5 if i % 10 else 7)
        dist.recv(torch.zeros(1), world - 1, tag=6)
    elif rank == world - 1:
        for i in sorted(range(60), key=lambda i: i % 10 == 0):
            got = torch.zeros(sizes[i])
            dist.recv(got, 0, tag=5 if i % 10 else 7)
            assert (got == i).all(), i
        dist.send(torch.zeros(1), 0, tag=6)


def many_open(rank: int, world: int) -> None:
    peers = [r for r in range(world) if r != rank]
    for size in (2, 3_000):
        received = {(peer, i): torch.zeros(size, dtype=torch.int32) for peer in peers for i in range(200)}
        works = [dist.irecv(tensor, peer, tag=i) for (peer, i), tensor in received.items()]
        given = {(peer, i): numbers(size, 1000 * rank + i) for peer in peers for i in reversed(range(200))}
        works += [dist.isend(tensor, peer, tag=i) for (peer, i), tensor in given.items()]
        finish(works)
        assert all(work.is_completed() for work in works)
        for (peer, i), tensor in received.items():
            assert torch.equal(tensor, numbers(size, 1000 * peer + i)), (peer, i)


#: Functions that make a tensor of a shape and a type, by layout.
LAYOUTS: dict[str, Callable[[tuple[int, ...], torch.dtype], torch.Tensor]] = {
    "contiguous": lambda shape, dtype: torch.zeros(shape, dtype=dtype),
    "strided": lambda shape, dtype: torch.zeros((*shape, 2), dtype=dtype)[..., 0],
    "transposed": lambda shape, dtype: torch.zeros(shape[::-1], dtype=dtype).permute(tuple(range(len(shape)))[::-1]),
}


def kinds(rank: int, world: int) -> None:
    for dtype in DTYPES:
        for shape in ((0,), (), (3, 5, 7), (90_000,)):
            values = seeded(dtype, shape, 4)
            for layout, make in LAYOUTS.items():
                tensor = make(shape, dtype)
                if rank == 0:
                    dist.send(tensor.copy_(values), world - 1)
                elif rank == world - 1:
                    dist.recv(tensor, 0)
                    assert_same_bits(tensor, values, f"{name(dtype)} {shape} {layout}")


def objects(rank: int, world: int) -> None:
    mine = [{"a": list(range(10_000))}, "text", None]
    if rank == 0:
        dist.send_object_list(mine, dst=world - 1)
    elif rank == world - 1:
        got = [None] * 3
        dist.recv_object_list(got, src=0)
        assert got == mine


def beside_collectives(rank: int, world: int) -> None:
    """Collectives overtake pending messages, in both directions."""
    peer = world - 1 - rank
    got = torch.zeros(300_000)
    works = [dist.irecv(got, peer, tag=1)]
    total = torch.ones(100_000)
    dist.all_reduce(total)
    works.append(dist.isend(torch.full((300_000,), float(rank)), peer, tag=1))
    later = dist.all_reduce(total, async_op=True)
    finish([*works[::-1], later])
    assert (got == peer).all() and (total == world * world).all()


def traffic(rank: int, world: int) -> None:
    """Messages of all lengths between random ranks, awaited in any order, while a collective runs."""
    plan = random.Random(5)
    for turn in range(6):
        messages = []
        for number in range(40):
            source, destination = plan.sample(range(world), 2)
            count = plan.choice([0, 3, 900, 5000, 70_000, 2_000_000])
            messages.append((number, source, destination, plan.randrange(3), count))
        mine = [message for message in messages if rank in message[1:3]]
        works = []
        for number, source, destination, tag, count in sorted(mine, key=lambda m: (m[1] == rank) != (rank % 2 == 0)):
            value = (number * 7 + turn) % 251
            tensor = torch.full((count,), value if source == rank else 255, dtype=torch.uint8)
            if source == rank:
                works.append((dist.isend(tensor, destination, tag=tag), tensor, value))
            else:
                works.append((dist.irecv(tensor, source, tag=tag), tensor, value))
        ones = torch.ones(10)
        collective = dist.all_reduce(ones, async_op=True)
        random.Random(rank).shuffle(works)
        for work, tensor, value in works:
            finish([work])
            assert bool((tensor == value).all())
        finish([collective])
        assert ones[0].item() == world


def other_numbers(rank: int, world: int) -> None:
    """A group whose ranks have other numbers in the default group; calls use the default group's numbers by default."""
    if world < 4:
        return
    group = dist.new_group([1, 2, 3])
    if rank == 1:
        dist.send(torch.tensor([5.0]), 2, group=group)
        dist.send(torch.tensor([6.0]), group=group, group_dst=2)
        got = torch.zeros(1)
        assert {dist.recv(got, group=group), dist.recv(got, group=group)} == {2, 3}
    elif rank in (2, 3):
        got = torch.zeros(1)
        if rank == 2:
            assert dist.recv(got, 1, group=group) == 1 and got.item() == 5
        else:
            dist.recv(got, group=group, group_src=0)
            assert got.item() == 6
        dist.send(got, 1, group=group)


def any_to_each(rank: int, world: int) -> None:
    """Messages from any rank arrive completely and name their senders; each has a different length and tag."""
    counts = (3, 9_000, 40_000, 1_000_000)
    for receiver in range(world):
        for number, count in enumerate(counts):
            if rank != receiver:
                dist.send(numbers(count, 1000 * rank + number), receiver, tag=number)
                continue
            seen = set()
            for _ in range(world - 1):
                got = torch.zeros(count, dtype=torch.int32)
                source = dist.recv(got, tag=number)
                assert torch.equal(got, numbers(count, 1000 * source + number)), (source, number)
                seen.add(source)
            assert seen == set(range(world)) - {rank}


def any_in_order(rank: int, world: int) -> None:
    """Messages of one sender keep their order while other ranks send."""
    if rank > 0:
        for number in range(50):
            dist.send(torch.tensor([rank, number]), 0)
        return
    last = dict.fromkeys(range(1, world), -1)
    for _ in range(50 * (world - 1)):
        got = torch.zeros(2, dtype=torch.int64)
        source = dist.recv(got)
        assert got.tolist() == [source, last[source] + 1]
        last[source] += 1


def any_open_at_once(rank: int, world: int) -> None:
    """Many receives are pending when messages arrive from all ranks at once: each is filled once, in order."""
    for count in (5, 60_000):
        rounds = 12
        got = [torch.full((count,), -1, dtype=torch.int64) for _ in range(rounds * (world - 1))]
        if rank == 0:
            works = [dist.irecv(tensor) for tensor in got]
            dist.barrier()
            finish(works)
            for work, tensor in zip(works, got, strict=True):
                assert bool((tensor // 100 == work._source_rank()).all()) and len(set(tensor.tolist())) == 1
            for source in range(1, world):
                found = [tensor[0].item() % 100 for tensor in got if tensor[0].item() // 100 == source]
                assert found == list(range(rounds)), "messages of one sender fill receives in their order"
        else:
            dist.barrier()
            for number in range(rounds):
                dist.send(torch.full((count,), 100 * rank + number), 0)


def any_and_named(rank: int, world: int) -> None:
    """Receives from one rank match in the order in which they were posted, whether or not they name it."""
    for sender in {1, world - 1}:
        for count in (4, 300_000):
            if rank == sender:
                for number in range(6):
                    dist.send(torch.full((count,), number), 0, tag=7)
            elif rank == 0:
                got = [torch.full((count,), -1) for _ in range(6)]
                works = [
                    dist.irecv(tensor, sender if number % 3 and number % 2 else None, tag=7)
                    for number, tensor in enumerate(got)
                ]
                finish(works[::-1])
                assert [tensor[0].item() for tensor in got] == list(range(6))
                assert all(len(set(tensor.tolist())) == 1 for tensor in got)
            dist.barrier()


def any_of_other_tags(rank: int, world: int) -> None:
    """Tags separate messages: a later receive completes before an earlier one that is pending."""
    if rank == 0:
        first = dist.irecv(torch.zeros(3), tag=5)
        got = torch.zeros(2)
        assert dist.recv(got, tag=6) == world - 1 and got.tolist() == [3, 3]
        dist.send(torch.ones(1), 1)
        finish([first])
        assert first._source_rank() == 1
    if rank == world - 1:
        dist.send(torch.full((2,), 3.0), 0, tag=6)
    if rank == 1:
        dist.recv(torch.ones(1), 0)
        dist.send(torch.ones(3), 0, tag=5)


def any_server(rank: int, world: int) -> None:
    """A server of requests on rank 0, like a parameter server, with collectives in between."""
    for turn in range(10):
        if rank == 0:
            for _ in range(world - 1):
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
        assert total.tolist() == [world] * 5


#: Scenarios for two or more ranks.
NAMED = (
    all_pairs, early_and_late, to_oneself, to_oneself_within_one_tensor, all_send_first, ring, tags, one_tag, many_open,
    kinds, objects, beside_collectives, traffic, other_numbers,
)  # fmt: skip
ANY = (any_to_each, any_in_order, any_open_at_once, any_and_named, any_of_other_tags, any_server)


def run_all(rank: int, world: int, which: str) -> None:
    """All scenarios, one after another, in one group."""
    for scenario in {"named": NAMED, "any": ANY}[which]:
        try:
            scenario(rank, world)
        except BaseException as error:
            error.args = (f"{scenario.__name__}: {error}",)
            raise
        dist.barrier()

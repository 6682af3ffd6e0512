"""Send and receive: order, tags, any source, sizes, and objects."""

from __future__ import annotations

import time
from typing import Any

import pytest
import reference
import torch
import torch.distributed as dist
from ranks import meet, run_ranks, values

SIZES = (0, 1, 1000, 8192, 8193, 100_000, 1_000_003)


def stamp(source: int, target: int, count: int, extra: int = 0) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) + 1000 * source + 100 * target + 10_000_000 * extra


@pytest.mark.parametrize("first", ("send", "recv", "together"))
def test_sizes(first: str) -> None:
    """Short and long messages, with the sender first, the receiver first, or both at once."""

    def body(rank: int) -> None:
        for count in SIZES:
            dist.barrier()
            if first == ("send", "recv")[rank]:
                time.sleep(0.02)
            if rank == 0:
                dist.send(stamp(0, 1, count), 1)
            else:
                tensor = torch.zeros(count)
                assert dist.recv(tensor, 0) == 0
                assert torch.equal(tensor, stamp(0, 1, count))

    run_ranks(2, body)


@pytest.mark.parametrize("dtype", reference.ALL, ids=reference.name)
def test_dtypes(dtype: torch.dtype) -> None:
    def body(rank: int) -> None:
        for count in (3, 70_001):
            data = (torch.arange(count) % 100).to(dtype)
            if rank == 0:
                dist.send(data, 1)
            else:
                tensor = torch.zeros(count, dtype=torch.uint8).to(dtype)
                dist.recv(tensor, 0)
                assert reference.same_bits(tensor, data)

    run_ranks(2, body)


def test_strided() -> None:
    """What is not contiguous is copied on the way, and only the elements are written."""

    def body(rank: int) -> None:
        for rows in (3, 3000):
            if rank == 0:
                dist.send(stamp(0, 1, rows * 4).view(4, rows).t(), 1)
            else:
                whole = torch.full((rows, 6), -1.0)
                dist.recv(whole[:, 1:5], 0)
                assert torch.equal(whole[:, 1:5], stamp(0, 1, rows * 4).view(4, rows).t())
                assert bool((whole[:, 0] == -1).all()) and bool((whole[:, 5] == -1).all())

    run_ranks(2, body)


@pytest.mark.parametrize("count", (10, 50_000))
def test_tags_out_of_order(count: int) -> None:
    """Messages are matched by tag; those of one tag keep their order."""

    def body(rank: int) -> None:
        tags = (5, 0, 2**31 - 1, 7)
        if rank == 0:
            works = [dist.isend(stamp(0, 1, count, tag % 97), 1, tag=tag) for tag in tags]
            works += [dist.isend(stamp(0, 1, count, 50 + turn), 1, tag=9) for turn in range(3)]
            for work in works:
                work.wait()
        else:
            for tag in reversed(tags):
                tensor = torch.zeros(count)
                dist.recv(tensor, 0, tag=tag)
                assert torch.equal(tensor, stamp(0, 1, count, tag % 97))
            for turn in range(3):
                tensor = torch.zeros(count)
                dist.recv(tensor, 0, tag=9)
                assert torch.equal(tensor, stamp(0, 1, count, 50 + turn))

    run_ranks(2, body)


@pytest.mark.parametrize("count", (10, 50_000))
def test_any_source(count: int) -> None:
    """``recv(src=None)`` takes whatever comes and says from whom."""

    def body(rank: int) -> None:
        if rank == 0:
            seen = []
            for _ in range(3):
                tensor = torch.zeros(count)
                source = dist.recv(tensor)
                assert torch.equal(tensor, stamp(source, 0, count))
                seen.append(source)
            assert sorted(seen) == [1, 2, 3]
            # With a tag that only rank 2 uses.
            tensor = torch.zeros(count)
            assert dist.recv(tensor, tag=4) == 2
        else:
            time.sleep(0.02 * (3 - rank))
            dist.send(stamp(rank, 0, count), 0)
            if rank == 2:
                dist.send(stamp(rank, 0, count), 0, tag=4)

    run_ranks(4, body)


def test_source_rank_of_a_work() -> None:
    def body(rank: int) -> None:
        if rank == 0:
            work = dist.irecv(torch.zeros(3))
            work.wait()
            assert work._source_rank() == 2
        elif rank == 2:
            dist.send(torch.ones(3), 0)

    run_ranks(3, body)


@pytest.mark.parametrize("count", (10, 100_000))
def test_to_myself(count: int) -> None:
    """isend to the own rank and irecv from it meet."""

    def body(rank: int) -> None:
        group = dist.group.WORLD
        send = group.send([stamp(rank, rank, count)], rank, 0)
        tensor = torch.zeros(count)
        group.recv([tensor], rank, 0).wait()
        send.wait()
        assert torch.equal(tensor, stamp(rank, rank, count))
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, stamp(rank, 1, count), rank), dist.P2POp(dist.irecv, other := torch.zeros(count), rank)]
        )
        for work in works:
            work.wait()
        assert torch.equal(other, stamp(rank, 1, count))

    run_ranks(2, body)


@pytest.mark.parametrize("count", (5, 200_000))
def test_batch_ring(count: int) -> None:
    """Everybody sends right and receives from the left in one batch."""

    def body(rank: int) -> None:
        for turn in range(5):
            right, left = (rank + 1) % 4, (rank - 1) % 4
            received = torch.zeros(count)
            operations = [
                dist.P2POp(dist.isend, stamp(rank, right, count, turn), right),
                dist.P2POp(dist.irecv, received, left),
            ]
            if rank % 2:
                operations.reverse()
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            assert torch.equal(received, stamp(left, rank, count, turn))

    run_ranks(4, body)


def test_everybody_to_everybody() -> None:
    """Many transfers open at once, of all sizes, started in different orders."""

    def body(rank: int) -> None:
        works, received = [], []
        peers = [peer for peer in range(4) if peer != rank]
        for turn in range(6):
            for peer in peers if rank % 2 else peers[::-1]:
                count = SIZES[(turn + rank + peer) % len(SIZES)] % 200_000
                tensor = torch.zeros(count)
                received.append((tensor, stamp(peer, rank, count, turn)))
                works.append(dist.irecv(tensor, peer, tag=turn))
                works.append(dist.isend(stamp(rank, peer, count, turn), peer, tag=turn))
        for work in reversed(works):
            work.wait()
        for tensor, expected in received:
            assert torch.equal(tensor, expected)

    run_ranks(4, body)


def test_many_outstanding() -> None:
    """A thousand sends before the first receive."""

    def body(rank: int) -> None:
        if rank == 0:
            works = [dist.isend(torch.full((16,), float(turn)), 1) for turn in range(1000)]
            for work in works:
                work.wait()
        else:
            time.sleep(0.1)
            for turn in range(1000):
                tensor = torch.zeros(16)
                dist.recv(tensor, 0)
                assert bool((tensor == turn).all())

    run_ranks(2, body)


def test_transfers_between_collectives() -> None:
    """A transfer left open does not hold up collectives, nor they it."""

    def body(rank: int) -> None:
        received = torch.zeros(100_000)
        work = dist.irecv(received, 0) if rank == 1 else None
        for turn in range(10):
            tensor = torch.full((1000,), float(rank))
            dist.all_reduce(tensor, async_op=turn % 2 == 0)
            dist.barrier()
        if rank == 0:
            dist.send(torch.full((100_000,), 3.0), 1)
        if work is not None:
            work.wait()
            assert bool((received == 3).all())

    run_ranks(3, body)


def test_sender_may_reuse_its_tensor_after_wait() -> None:
    def body(rank: int) -> None:
        for count in (100, 500_000):
            tensor = torch.full((count,), float(rank))
            if rank == 0:
                dist.send(tensor, 1)
                tensor.fill_(99)
                meet(f"changed-{count}", rank, 2)
            else:
                dist.recv(tensor, 0)
                meet(f"changed-{count}", rank, 2)
                assert bool((tensor == 0).all())

    run_ranks(2, body)


def test_sent_tensor_may_be_dropped() -> None:
    """The Work keeps the tensor alive."""

    def body(rank: int) -> None:
        if rank == 0:
            works = [dist.isend(torch.full((300_000,), float(turn)), 1) for turn in range(5)]
            junk = [torch.full((300_000,), -1.0) for _ in range(5)]
            for work in works:
                work.wait()
            del junk
        else:
            time.sleep(0.1)
            for turn in range(5):
                tensor = torch.zeros(300_000)
                dist.recv(tensor, 0)
                assert bool((tensor == turn).all())

    run_ranks(2, body)


def test_wrong_peers_are_refused() -> None:
    def body(rank: int) -> None:
        group = dist.group.WORLD
        for peer in (-1, 2, 1000):
            with pytest.raises((ValueError, RuntimeError), match=str(peer)):
                group.send([torch.ones(1)], peer, 0)
            with pytest.raises((ValueError, RuntimeError)):
                group.recv([torch.ones(1)], peer if peer >= 0 else -2, 0)
        dist.barrier()

    run_ranks(2, body)


def test_subgroup_ranks() -> None:
    """Sources are reported as global ranks, transfers of two groups do not meet."""

    def body(rank: int) -> None:
        group = dist.new_group([3, 1])
        if rank == 3:
            dist.send(torch.full((4,), 1.0), 1)
            dist.send(torch.full((4,), 2.0), 1, group=group)
        if rank == 1:
            tensor = torch.zeros(4)
            assert dist.recv(tensor, group=group) == 3
            assert bool((tensor == 2).all())
            assert dist.recv(tensor, 3) == 3
            assert bool((tensor == 1).all())

    run_ranks(4, body)


def test_objects() -> None:
    """Object collectives carry anything that pickles, also when the pickles differ in length."""

    def body(rank: int) -> None:
        mine: Any = {"rank": rank, "data": list(range(rank * 1000)), "tensor": torch.full((rank,), 1.0)}
        gathered: list[Any] = [None] * 4
        dist.all_gather_object(gathered, mine)
        assert [len(each["data"]) for each in gathered] == [0, 1000, 2000, 3000]
        on_root: list[Any] | None = [None] * 4 if rank == 2 else None
        dist.gather_object(mine, on_root, dst=2)
        if on_root is not None:
            assert [each["rank"] for each in on_root] == [0, 1, 2, 3]
        objects: list[Any] = ["a", {"b": 2}, None] if rank == 1 else [None] * 3
        dist.broadcast_object_list(objects, src=1)
        assert objects == ["a", {"b": 2}, None]
        scattered: list[Any] = [None]
        dist.scatter_object_list(scattered, [f"for {r}" * r for r in range(4)] if rank == 3 else None, src=3)
        assert scattered == [f"for {rank}" * rank]
        if rank == 0:
            dist.send_object_list([1, "two", [3]], dst=3)
        if rank == 3:
            received: list[Any] = [None] * 3
            assert dist.recv_object_list(received, src=0) == 0
            assert received == [1, "two", [3]]

    assert len(values(run_ranks(4, body))) == 4

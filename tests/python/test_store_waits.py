"""How a store waits: for keys, in queues, at barriers; and its message when no other rank arrives."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import on_threads
from stores import ALL, OWN, PROMPT, WHOLE, Meeting, seconds

all_stores = pytest.mark.parametrize("kind", ALL)
whole_stores = pytest.mark.parametrize("kind", WHOLE)


def refused(body: Callable[[], object], limit_s: float, *words: str) -> None:
    """Fails unless `body` fails after `limit_s` with a message that has all `words`."""
    started = time.monotonic()
    with pytest.raises(dist.DistStoreError, match=re.compile("timeout", re.IGNORECASE)) as caught:
        body()
    assert not isinstance(caught.value, dist.QueueEmptyError)
    assert limit_s - 0.06 <= time.monotonic() - started < limit_s + 10
    for word in words:
        assert word in str(caught.value), caught.value


@all_stores
def test_a_wait_names_the_keys_that_did_not_come(kind: str, tmp_path: Path) -> None:
    store = Meeting(kind, tmp_path).open()
    store.set("here", "1")
    refused(lambda: store.wait(["here", "gone", "lost"], seconds(0.2)), 0.2, 'gone"', 'lost"', "2 keys of 3")
    refused(lambda: store.wait(["gone"], seconds(0.001)), 0.0, 'gone"')


@all_stores
def test_the_timeout_of_the_store_bounds_what_has_none(kind: str, tmp_path: Path) -> None:
    store = Meeting(kind, tmp_path).open(0.1)
    store.set("here", "1")
    assert store.timeout == seconds(0.1)
    refused(lambda: store.get("gone"), 0.1, 'gone"')
    refused(lambda: store.wait(["here", "gone"]), 0.1, 'gone"')
    refused(lambda: store.multi_get(["here", "gone"]), 0.1, 'gone"')
    store.set_timeout(seconds(0.2))
    refused(lambda: store.get("gone"), 0.2, 'gone"')
    assert store.get("here") == b"1"


@whole_stores
def test_a_queue_that_stays_empty(kind: str, tmp_path: Path) -> None:
    store = Meeting(kind, tmp_path).open(0.2)
    store.set("queue", "a value is no queue")
    refused(lambda: store.queue_pop("queue"), 0.2, 'queue"')
    with pytest.raises(dist.QueueEmptyError, match="empty"):
        store.queue_pop("queue", block=False)
    assert store.queue_len("queue") == 0


@all_stores
def test_a_wait_ends_when_the_keys_come(kind: str, tmp_path: Path) -> None:
    meeting = Meeting(kind, tmp_path)
    waiting, coming = meeting.open(), meeting.open()

    def come() -> None:
        for name in ("a", "b", "c"):
            time.sleep(0.05)
            coming.set(name, name)

    got: list[object] = []
    on_threads([come, lambda: got.append((waiting.get("c"), waiting.multi_get(["a", "b"])))])
    assert got == [(b"c", [b"a", b"b"])]
    on_threads([lambda: coming.set("d", ""), lambda: waiting.wait(["a", "d"], seconds(5))])


@pytest.mark.parametrize("kind", PROMPT)
def test_queues_keep_order(kind: str, tmp_path: Path) -> None:
    meeting = Meeting(kind, tmp_path)
    one, two = meeting.open(), meeting.open()
    values = [b"first", b"", b"\0\xff", b"last"]
    for value in values:
        one.queue_push("queue", value)
    assert two.queue_len("queue") == 4 and two.check(["queue"])
    assert [two.queue_pop("queue"), two.queue_pop("queue", block=False)] == values[:2]
    assert [one.queue_pop("queue"), two.queue_pop("queue")] == values[2:]
    assert one.queue_len("queue") == 0 and not one.check(["queue"])


@whole_stores
def test_queues_in_both_directions(kind: str, tmp_path: Path) -> None:
    meeting = Meeting(kind, tmp_path)
    rounds = 30

    def answer(store: dist.Store) -> None:
        for _ in range(rounds):
            store.queue_push("answers", store.queue_pop("questions") + b"!")

    def ask(store: dist.Store) -> None:
        for i in range(rounds):
            store.queue_push("questions", str(i))
            assert store.queue_pop("answers") == f"{i}!".encode()

    on_threads([lambda: answer(meeting.open()), lambda: ask(meeting.open())])


@pytest.mark.parametrize("kind", OWN)
def test_every_pushed_value_is_popped_once(kind: str, tmp_path: Path) -> None:
    store = Meeting(kind, tmp_path).open()
    popped: list[bytes] = []

    def push(thread: int) -> None:
        for i in range(25):
            store.queue_push("queue", f"{thread}/{i}")

    def pop() -> None:
        popped.extend([store.queue_pop("queue") for _ in range(25)])

    on_threads([pop] * 8 + [lambda thread=thread: push(thread) for thread in range(8)])  # type: ignore[misc]
    assert sorted(popped) == sorted(f"{thread}/{i}".encode() for thread in range(8) for i in range(25))


# torch's TCPStore holds a lock while it waits, so the object's other threads cannot set the awaited key.
@pytest.mark.parametrize("kind", [name for name in ALL if name != "rust-torch-tcp"])
def test_sixteen_threads_of_one_object(kind: str, tmp_path: Path) -> None:
    store = Meeting(kind, tmp_path).open()
    gate = threading.Barrier(16)

    def body(thread: int) -> None:
        gate.wait()
        for i in range(25):
            store.set(f"key {thread} {i}", f"{thread}")
            store.add("sum", 1)
            assert store.get(f"key {(thread + 1) % 16} {i}") == f"{(thread + 1) % 16}".encode()

    on_threads([lambda thread=thread: body(thread) for thread in range(16)])  # type: ignore[misc]
    assert store.add("sum", 0) == 400


@pytest.mark.parametrize("kind", [*OWN, "rust-torch-hash", "rust-torch-tcp"])
def test_barrier(kind: str, tmp_path: Path) -> None:
    meeting = Meeting(kind, tmp_path)
    rounds, size = 10, 4
    arrived = [0] * size

    def body(rank: int) -> None:
        store = meeting.open()
        for turn in range(1, rounds + 1):
            arrived[rank] = turn
            store.rank_barrier("meet", rank, size)
            assert min(arrived) >= turn

    on_threads([lambda rank=rank: body(rank) for rank in range(size)])  # type: ignore[misc]


@pytest.mark.skipif(not hasattr(dist.Store, "barrier"), reason="torch has no Store.barrier before 2.12")
@pytest.mark.parametrize("kind", OWN)
def test_the_barrier_of_torch(kind: str, tmp_path: Path) -> None:
    meeting, size = Meeting(kind, tmp_path), 3
    arrived = threading.Barrier(size)  # every rank has a store before the first calls

    def body() -> None:
        store = meeting.open()
        arrived.wait()
        store.barrier("of torch", size)
        store.barrier("of torch, limited", world_size=size, timeout=seconds(60))

    on_threads([body] * size)
    with pytest.raises(dist.DistError):
        meeting.open().barrier("alone", 2, seconds(0.2))


@pytest.mark.parametrize("kind", [*OWN, "rust-torch-hash", "rust-torch-tcp"])
def test_a_barrier_names_the_ranks_that_did_not_come(kind: str, tmp_path: Path) -> None:
    meeting = Meeting(kind, tmp_path)
    store, other = meeting.open(0.2), meeting.open(0.2)

    def late(store: dist.Store, rank: int, limit_s: float, **options: object) -> None:
        refused(lambda: store.rank_barrier("late", rank, 4, **options), limit_s, "ranks 1 and 3", "of 4")

    on_threads([lambda: late(store, 0, 0.2), lambda: late(other, 2, 0.4, timeout=seconds(0.4))])
    with pytest.raises(ValueError, match="rank 4 of 4"):
        store.rank_barrier("wrong", 4, 4)
    with pytest.raises(ValueError, match="rank -1"):
        store.rank_barrier("wrong", -1, 4)


@pytest.mark.parametrize("kind", OWN)
def test_timeouts_at_the_edges(kind: str, tmp_path: Path) -> None:
    store = Meeting(kind, tmp_path).open()
    with pytest.raises(ValueError, match="negative"):
        store.set_timeout(seconds(-1))
    with pytest.raises(ValueError, match="negative"):
        store.wait(["gone"], seconds(-1))
    assert store.timeout == seconds(20)
    # c10d's "no timeout".
    store.set_timeout(seconds(0))
    on_threads([lambda: store.get("key"), lambda: (time.sleep(0.1), store.set("key", ""))[1]])

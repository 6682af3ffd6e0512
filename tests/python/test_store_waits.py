"""How a store waits: for keys, in queues, at barriers; its message when no other rank arrives; Ctrl-C ends a wait."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
import torch_symm
from ranks import on_threads
from stores import ALL, LIMIT_S, OWN, WHOLE, Meeting, seconds, serve
from torch.distributed.rendezvous import rendezvous

all_stores = pytest.mark.parametrize("kind", ALL)
own_stores = pytest.mark.parametrize("kind", OWN)


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
def test_a_wait_names_the_keys_that_did_not_come_at_its_limit_or_the_stores(kind: str, tmp_path: Path) -> None:
    store = Meeting(kind, tmp_path).open()
    store.set("here", "1")
    place = ("127.0.0.1",) if kind in ("tcp", "tcp-secret") else ()
    refused(lambda: store.wait(["here", "gone", "lost"], seconds(0.2)), 0.2, 'gone"', 'lost"', "2 keys of 3", *place)
    refused(lambda: store.wait(["gone"], seconds(0.001)), 0.0, 'gone"')
    store.set_timeout(seconds(0.1))
    assert store.timeout == seconds(0.1)
    refused(lambda: store.get("gone"), 0.1, 'gone"')
    refused(lambda: store.wait(["here", "gone"]), 0.1, 'gone"')
    refused(lambda: store.multi_get(["here", "gone"]), 0.1, 'gone"')
    store.set_timeout(seconds(0.2))
    refused(lambda: store.get("gone"), 0.2, 'gone"')
    store.set_timeout(seconds(LIMIT_S))
    assert store.get("here") == b"1"


@all_stores
def test_a_wait_ends_when_the_keys_come(kind: str, tmp_path: Path) -> None:
    meeting = Meeting(kind, tmp_path)
    waiting, coming, another = meeting.open(), meeting.open(), meeting.open()

    def come() -> None:
        for name in ("a", "b", "c"):
            time.sleep(0.05)
            coming.set(name, name)

    got: dict[str, object] = {}
    on_threads(
        [come, lambda: got.update(c=waiting.get("c")), lambda: got.update(all=another.multi_get(["c", "a", "b"]))]
    )
    assert got == {"c": b"c", "all": [b"c", b"a", b"b"]}
    on_threads([lambda: coming.set("d", ""), lambda: waiting.wait(["a", "d"], seconds(5))])


@pytest.mark.parametrize("kind", WHOLE)
def test_queues_in_both_directions_and_empty_ones(kind: str, tmp_path: Path) -> None:
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
    store = meeting.open()
    store.set("queue", "a value is no queue")
    store.set_timeout(seconds(0.2))
    refused(lambda: store.queue_pop("queue"), 0.2, 'queue"')
    store.set_timeout(seconds(LIMIT_S))
    with pytest.raises(dist.QueueEmptyError, match="empty"):
        store.queue_pop("queue", block=False)
    assert store.queue_len("queue") == 0 and store.has_extended_api()


@own_stores
def test_every_pushed_value_is_popped_once(kind: str, tmp_path: Path) -> None:
    store = Meeting(kind, tmp_path).open()
    popped: list[bytes] = []

    def push(thread: int) -> None:
        for i in range(25):
            store.queue_push("queue", f"{thread}/{i}")

    def pop() -> None:
        popped.extend([store.queue_pop("queue") for _ in range(25)])

    on_threads([pop] * 8 + [partial(push, thread) for thread in range(8)])
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

    on_threads([partial(body, thread) for thread in range(16)])
    assert store.add("sum", 0) == 400


@pytest.mark.parametrize("kind", [*OWN, "rust-torch-hash", "rust-torch-tcp"])
def test_a_barrier_opens_for_all_or_names_the_ranks_that_did_not_come(kind: str, tmp_path: Path) -> None:
    meeting = Meeting(kind, tmp_path)
    size = 4
    arrived = [0] * size

    def body(rank: int) -> None:
        store = meeting.open()
        for turn in range(1, 11):
            arrived[rank] = turn
            store.rank_barrier("meet", rank, size)
            assert min(arrived) >= turn

    on_threads([partial(body, rank) for rank in range(size)])
    store, other = meeting.open(), meeting.open()
    # A file is removed when its last user has left it.
    assert kind == "file" or store.num_keys() == size + 2, "the turns of a barrier use the same keys"

    def late(store: dist.Store, rank: int, limit_s: float, **options: object) -> None:
        refused(lambda: store.rank_barrier("late", rank, size, **options), limit_s, "ranks 1 and 3", "of 4")

    # Both threads must arrive before the first limit.
    store.set_timeout(seconds(2))
    on_threads([lambda: late(store, 0, 2), lambda: late(other, 2, 2.2, timeout=seconds(2.2))])
    for rank in (4, -1):
        with pytest.raises(ValueError, match=f"rank {rank}"):
            store.rank_barrier("wrong", rank, size)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Locks the byte that a process locks during an operation (src/store/file/log_file.rs)."""
    with path.open("r+") as file:
        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 1 << 62, 1, 0)
        fcntl.fcntl(file, 37, lock)  # F_OFD_SETLK, which Python 3.14 names
        yield


def test_a_barrier_ends_at_its_timeout_if_the_store_does_not_answer(tmp_path: Path) -> None:
    store = torch_symm.FileStore(tmp_path / "file", 2, seconds(LIMIT_S))
    started = time.monotonic()
    with (
        locked(tmp_path / "file"),
        pytest.raises(dist.DistStoreError, match=r'barrier "meet": Add .* in time: the lock'),
    ):
        store.rank_barrier("meet", 0, 2, timeout=seconds(0.3))
    assert 0.3 <= time.monotonic() - started < LIMIT_S


@pytest.mark.skipif(not hasattr(dist.Store, "barrier"), reason="torch has no Store.barrier before 2.12")
@own_stores
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


@own_stores
def test_timeouts_at_the_edges(kind: str, tmp_path: Path) -> None:
    store = Meeting(kind, tmp_path).open()
    for call in (lambda: store.set_timeout(seconds(-1)), lambda: store.wait(["gone"], seconds(-1))):
        with pytest.raises(ValueError, match="negative"):
            call()
    assert store.timeout == seconds(20)
    # c10d's "no timeout".
    store.set_timeout(seconds(0))
    on_threads([lambda: store.get("key"), lambda: (time.sleep(0.1), store.set("key", ""))[1]])


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Sets Python's handler of SIGINT, because the process that started this one may ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


interrupts = pytest.mark.usefixtures("interruptible")


def interrupted(body: Callable[[], object], expected: type[BaseException] = KeyboardInterrupt) -> None:
    """Fails unless `body` ends with `expected` soon after a signal has arrived."""
    timer = threading.Timer(0.15, lambda: os.kill(os.getpid(), signal.SIGINT))
    started = time.monotonic()
    timer.start()
    try:
        with pytest.raises(expected):
            body()
        assert time.monotonic() - started < LIMIT_S / 4
    finally:
        timer.join()


@interrupts
@pytest.mark.parametrize("kind", [*OWN, "rust-memory", "rust-torch-hash", "prefix-tcp"])
def test_ctrl_c_ends_a_wait_and_the_store_stays_usable(kind: str, tmp_path: Path) -> None:
    store = Meeting(kind, tmp_path).open()
    if kind != "rust-torch-hash":  # torch's own wait
        interrupted(lambda: store.wait(["never"], seconds(LIMIT_S)))
    interrupted(lambda: store.queue_pop("never"))
    store.set("key", "value")
    assert store.get("key") == b"value"


@interrupts
def test_ctrl_c_ends_opening(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch(0o600)
    with locked(path):
        interrupted(lambda: torch_symm.FileStore(path, 2, seconds(LIMIT_S)))
    port = serve().port
    interrupted(lambda: torch_symm.TCPStore("127.0.0.1", port, None, False, seconds(LIMIT_S)))
    interrupted(lambda: torch_symm.TCPStore("127.0.0.1", 0, 2, True, seconds(LIMIT_S)))
    interrupted(lambda: next(rendezvous(f"symm://127.0.0.1:{port}", 0, 2, timeout=seconds(LIMIT_S))))


@interrupts
def test_what_a_handler_raises_comes_out_and_one_that_raises_nothing_interrupts_nothing() -> None:
    class Alarm(Exception):
        pass

    def handler(*_: object) -> None:
        raise Alarm

    signal.signal(signal.SIGINT, handler)
    store = serve()
    interrupted(lambda: store.get("never"), Alarm)
    called: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: called.append(number))
    timer = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(dist.DistStoreError, match="timeout"):
        store.wait(["never"], seconds(1))
    timer.join()
    assert called == [signal.SIGINT]


@interrupts
def test_other_threads_wait_on() -> None:
    store = serve()
    got: list[bytes] = []
    waiter = threading.Thread(target=lambda: got.append(store.get("late")))
    waiter.start()
    interrupted(lambda: store.get("never"))
    store.set("late", "value")
    waiter.join(LIMIT_S)
    assert got == [b"value"]

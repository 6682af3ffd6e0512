"""Stores as Python objects: constructors, pickles, other processes, their printed form."""

from __future__ import annotations

import fcntl
import inspect
import os
import pickle
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import run_ranks
from stores import SECRET, Meeting, seconds, serve
from torch_symm import FileStore, MemoryStore, TCPStore


def master(port: int, *arguments: object, **options: object) -> TCPStore:
    return TCPStore("localhost", port, *arguments, is_master=True, **options)  # type: ignore[arg-type, misc]


#: Each row has a call that fails and is given an empty folder, the error, and its text.
REFUSED: list[tuple[Callable[[Path], object], type[Exception], str]] = [
    (lambda _: master(-1), ValueError, "port must have value from 0 to 65535 but was -1"),
    (lambda _: master(65_536), ValueError, "port must have value from 0 to 65535 but was 65536"),
    (lambda _: master(0, 0), ValueError, "TCPStore world size cannot be 0"),
    (lambda _: master(0, 1 << 40), ValueError, "too large"),
    (lambda _: master(0, 1, secret=""), ValueError, "secret"),
    (lambda _: master(0, 1, secret=b""), ValueError, "secret"),
    (lambda _: master(0, 1, timeout=seconds(-1)), ValueError, "negative"),
    (lambda _: master(0, 2, timeout=seconds(0.3)), dist.DistStoreError, "1 of 2|1/2"),
    # The server has ended: no process listens there.
    (lambda _: TCPStore("127.0.0.1", serve().port, None, False, seconds(0.5)), dist.DistError, ""),
    (lambda place: FileStore(place / "store", -1), ValueError, "world size -1"),
    (lambda place: FileStore(place / "store", 2, timeout=seconds(-1)), ValueError, "negative"),
    (lambda _: FileStore(7, 1), TypeError, ""),  # type: ignore[arg-type]
    (lambda place: FileStore(place / "no" / "such" / "place", 1), RuntimeError, ""),
    (lambda _: pickle.dumps(MemoryStore()), TypeError, "lives in its process"),
    (lambda _: pickle.dumps(serve(secret=SECRET)), TypeError, "secret"),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_what_cannot_be_is_refused(
    call: Callable[[Path], object], error: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words or None):
        call(tmp_path)


@pytest.mark.timed
def test_opening_waits_for_the_lock_until_the_timeout_and_names_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "store"
    kept = FileStore(path, 2)
    held_by_this = rf"the lock of the file store .* is held by process {os.getpid()} \(alive"
    with path.open("r+b") as file:
        # struct flock: the lock that is held during an operation.
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 1 << 62, 1, 0))
        start = time.monotonic()
        with pytest.raises(dist.DistStoreError, match=held_by_this):
            FileStore(path, 2, timeout=seconds(0.2))
        assert 0.2 <= time.monotonic() - start < 5
    opened = FileStore(path, 2, seconds(9))
    assert (opened.timeout, pickle.loads(pickle.dumps(opened)).timeout, kept.timeout) == (
        seconds(9),
        seconds(9),
        seconds(300),
    )


def test_a_store_says_where_it_is_and_hides_its_secret(tmp_path: Path) -> None:
    assert repr(MemoryStore()) == "MemoryStore(timeout=datetime.timedelta(seconds=300))"
    file = FileStore(tmp_path / "störe", 2)
    assert (file.path, file.world_size) == (str(tmp_path / "störe"), 2)
    assert repr(str(tmp_path / "störe")) in repr(file)
    store = serve(secret=SECRET)
    assert (store.host, store.is_master, store.world_size) == ("127.0.0.1", True, None)
    assert 0 < store.port < 65_536
    for text in (repr(store), str(store), repr(store.clone())):
        assert SECRET not in text and "secret=..." in text and str(store.port) in text
    assert "secret=None" in repr(serve())


def test_a_wrong_secret_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    store, plain = serve(secret=SECRET), serve()
    for server, secret in ((store, "wrong"), (store, None), (plain, SECRET)):
        with pytest.raises(dist.DistError) as caught:
            TCPStore("127.0.0.1", server.port, None, False, seconds(5), False, secret=secret).set("key", "value")
        assert SECRET not in str(caught.value)
        assert secret != "wrong" or "it does not know the secret" in str(caught.value)
    assert store.num_keys() == plain.num_keys() == 0
    assert "its secret is not this store's; all ranks need the same" in capfd.readouterr().err


def _other_process(stores: list[dist.Store], end: Connection) -> None:
    for store in stores:
        store.wait(["question"], seconds(20))
        store.set("answer", store.get("question") + b"!")
        end.send((type(store).__name__, repr(store), getattr(store, "is_master", None), store.get("answer")))


def test_a_pickle_opens_the_store_in_another_process(tmp_path: Path) -> None:
    kinds = ("file", "tcp", "tcp-unix")
    for kind in kinds:
        (tmp_path / kind).mkdir()
    stores = [Meeting(kind, tmp_path / kind).open(19) for kind in kinds]
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_other_process, args=(stores, there))
    process.start()
    try:
        for kind, store in zip(kinds, stores, strict=True):
            store.set("question", "who")
            assert store.get("answer") == b"who!", kind
            name, text, is_master, answer = here.recv()
            assert (name, answer) == (type(store).__name__, b"who!")
            assert is_master in (None, False), kind
            if kind != "file":
                assert text == repr(store).replace("is_master=True", "is_master=False")
    finally:
        process.join(30)
    assert process.exitcode == 0


def test_a_forked_child_cannot_use_a_memory_store() -> None:
    store = MemoryStore()
    store.set("key", "value")
    context = get_context("fork")
    here, there = context.Pipe()

    def child() -> None:
        try:
            store.get("key")
        except dist.DistStoreError as error:
            there.send(str(error))

    process = context.Process(target=child)
    process.start()
    process.join(30)
    assert here.poll() and "forked" in here.recv()


def test_signatures_are_those_of_torch() -> None:
    text = inspect.getdoc(TCPStore.__init__) or ""
    for name in ("host_name", "port", "world_size", "is_master", "timeout", "wait_for_workers", "multi_tenant"):
        assert f"{name}:" in text
    assert "master_listen_fd" in text and "secret" in text


def test_a_store_open_to_the_network_without_a_secret_says_so() -> None:
    def body(_rank: int, _world: int) -> list[int]:
        places = (("0.0.0.0", None), ("0.0.0.0", "a word"), ("localhost", None))
        return [TCPStore(host, 0, 1, True, secret=secret).port for host, secret in places]

    results = run_ranks(body, 1, backend=None)
    assert results.logs[0].count("open to the network, without a secret") == 1
    assert f"0.0.0.0:{results[0][0]}" in results.logs[0]


def test_threads_may_open_stores_at_once(tmp_path: Path) -> None:
    server = TCPStore("127.0.0.1", 0, None, True)

    def use(index: int) -> int:
        client = TCPStore("127.0.0.1", server.port)
        user = FileStore(tmp_path / "file", 1000)
        MemoryStore().set("key", "value")
        client.add("sum", 1)
        user.add("sum", 1)
        return index

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(use, range(200))) == list(range(200))
    assert server.add("sum", 0) == FileStore(tmp_path / "file", 1000).add("sum", 0) == 200


def test_a_bound_socket_is_taken_over() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        server = TCPStore("127.0.0.1", port, 1, True, master_listen_fd=bound.detach())
    assert server.port == port
    server.set("key", "value")
    assert TCPStore("127.0.0.1", port).get("key") == b"value"

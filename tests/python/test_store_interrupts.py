"""Ctrl-C ends a wait at once, and the store stays usable."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
import torch_symm
from stores import OWN, Meeting, seconds, serve
from torch.distributed.rendezvous import rendezvous

LIMIT_S = 20.0


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Restores the default, because the process that started this one may ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted(body: Callable[[], object], expected: type[BaseException] = KeyboardInterrupt) -> None:
    """Fails unless `body` ends with `expected` soon after a signal has arrived."""
    timer = threading.Timer(0.15, lambda: os.kill(os.getpid(), signal.SIGINT))
    started = time.monotonic()
    timer.start()
    with pytest.raises(expected):
        body()
    assert time.monotonic() - started < LIMIT_S / 4
    timer.join()


@pytest.mark.parametrize("kind", [*OWN, "rust-memory", "rust-torch-hash", "prefix-tcp"])
def test_a_wait(kind: str, tmp_path: Path) -> None:
    store = Meeting(kind, tmp_path).open()
    if kind != "rust-torch-hash":  # torch's own wait
        interrupted(lambda: store.wait(["never"], seconds(LIMIT_S)))
    interrupted(lambda: store.queue_pop("never"))
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_opening() -> None:
    port = serve().port
    interrupted(lambda: torch_symm.TCPStore("127.0.0.1", port, None, False, seconds(LIMIT_S)))
    interrupted(lambda: torch_symm.TCPStore("127.0.0.1", 0, 2, True, seconds(LIMIT_S)))
    interrupted(lambda: next(rendezvous(f"symm://127.0.0.1:{port}", 0, 2, timeout=seconds(LIMIT_S))))


def test_what_a_handler_raises_comes_out() -> None:
    class Alarm(Exception):
        pass

    def handler(*_: object) -> None:
        raise Alarm

    signal.signal(signal.SIGINT, handler)
    store = serve()
    interrupted(lambda: store.get("never"), Alarm)


def test_a_handler_that_raises_nothing_interrupts_nothing() -> None:
    called: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: called.append(number))
    store = serve()
    timer = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(dist.DistStoreError, match="timeout"):
        store.wait(["never"], seconds(0.4))
    assert called == [signal.SIGINT]


def test_other_threads_wait_on() -> None:
    store = serve()
    got: list[bytes] = []
    waiter = threading.Thread(target=lambda: got.append(store.get("late")))
    waiter.start()
    interrupted(lambda: store.get("never"))
    store.set("late", "value")
    waiter.join(LIMIT_S)
    assert got == [b"value"]

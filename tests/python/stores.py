"""Every kind of store through which ranks may meet: this package's, wrapped by torch, and torch's seen from Rust."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch_symm import FileStore, MemoryStore, TCPStore
from torch_symm._C import _wrap_store

#: Limit of the stores of tests, in seconds.
LIMIT_S = 20.0
SECRET = "correct horse"

Opener = Callable[[], dist.Store]


def seconds(value: float) -> timedelta:
    return timedelta(seconds=value)


def serve(host: str = "127.0.0.1", **options: object) -> TCPStore:
    """A master that does not wait for the others."""
    return TCPStore(host, 0, None, True, seconds(LIMIT_S), False, **options)  # type: ignore[arg-type]


def _memory(_: Path) -> Opener:
    return MemoryStore().clone


def _file(place: Path) -> Opener:
    return lambda: FileStore(str(place / "store"), 2)


def _first(master: dist.Store, client: Opener) -> Opener:
    """Returns an opener whose first store is the master, which lives while a test holds it, and then clients."""
    opened: list[bool] = []

    def open_one() -> dist.Store:
        opened.append(True)
        return master if len(opened) == 1 else client()

    return open_one


def _tcp(_: Path, host: str = "127.0.0.1", secret: str | None = None) -> Opener:
    master = serve(host, secret=secret)
    return _first(master, lambda: TCPStore(host, master.port, None, False, seconds(LIMIT_S), False, secret=secret))


def _unix(place: Path) -> Opener:
    master = serve(f"unix:{place / 'socket'}")
    return _first(master, lambda: TCPStore(master.host, 0, None, False, seconds(LIMIT_S), False))


def _torch_tcp(_: Path) -> Opener:
    master = dist.TCPStore("127.0.0.1", 0, None, True, seconds(LIMIT_S), wait_for_workers=False)
    port = master.port
    return _first(
        master, lambda: dist.TCPStore("127.0.0.1", port, None, False, seconds(LIMIT_S), wait_for_workers=False)
    )


def _torch_file(place: Path) -> Opener:
    return lambda: dist.FileStore(str(place / "torch-store"), 100)


def _torch_hash(_: Path) -> Opener:
    store = dist.HashStore()
    return lambda: store


def _prefix(inner: Callable[[Path], Opener], *prefixes: str) -> Callable[[Path], Opener]:
    def opener(place: Path) -> Opener:
        open_inner = inner(place)

        def open_one() -> dist.Store:
            store = open_inner()
            for prefix in prefixes:
                store = dist.PrefixStore(prefix, store)
            return store

        return open_one

    return opener


def _rust(inner: Callable[[Path], Opener]) -> Callable[[Path], Opener]:
    def opener(place: Path) -> Opener:
        open_inner = inner(place)
        return lambda: _wrap_store(open_inner())

    return opener


#: Stores of this package.
OWN: dict[str, Callable[[Path], Opener]] = {
    "memory": _memory,
    "file": _file,
    "tcp": _tcp,
    "tcp-secret": lambda place: _tcp(place, secret=SECRET),
    "tcp-unix": _unix,
}

#: All stores with every operation.
WHOLE: dict[str, Callable[[Path], Opener]] = {
    **OWN,
    **{f"prefix-{name}": _prefix(inner, "part") for name, inner in OWN.items()},
    "nested-prefix": _prefix(_memory, "part", "of", "a part"),
    "rust-memory": _rust(_memory),
    "rust-prefix-memory": _rust(_prefix(_memory, "part")),
    "rust-torch-hash": _rust(_torch_hash),
    "rust-torch-tcp": _rust(_torch_tcp),
}

#: All stores; torch's FileStore has neither append nor queues.
ALL: dict[str, Callable[[Path], Opener]] = {**WHOLE, "rust-torch-file": _rust(_torch_file)}

#: Stores whose own messages for failures reach the caller.
WORDS = [name for name in WHOLE if "rust-torch" not in name]


class Meeting:
    """The contents that several users share; each `open` returns a separate user."""

    def __init__(self, kind: str, place: Path) -> None:
        self.kind = kind
        self._open = ALL[kind](place)

    def open(self, limit_s: float = LIMIT_S) -> dist.Store:
        store = self._open()
        store.set_timeout(seconds(limit_s))
        return store

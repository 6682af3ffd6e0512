"""The TCP store against its clients: torch's (libuv) and ours, each in a separate process."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch_symm

from . import store_protocols
from .case import HANG, RIGHT, WRONG, Case, Outcome, Promise, Saw, add

LIMIT = timedelta(seconds=5)
SECRET = "known to the job"
#: Seconds that an attack, and each check of its effects, may take.
ATTACK_S, PATIENCE_S = 15.0, 6.0
MB = 1 << 20


def opened(side: str, port: int, master: bool, secret: str | None = None) -> Any:
    """A store object of a side; the master listens at 127.0.0.1."""
    if side == "gloo":
        return dist.TCPStore("127.0.0.1", port, None, master, LIMIT, wait_for_workers=False)
    return torch_symm.TCPStore("127.0.0.1", port, None, master, LIMIT, wait_for_workers=False, secret=secret)


class Server:
    """A store's server in its own process, and that process's resources."""

    def __init__(self, side: str, secret: str | None, descriptors: int | None) -> None:
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            if descriptors is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
            store = opened(side, 0, True, secret)
            os.write(writer, str(store.port).encode())
            time.sleep(300)
            os._exit(0)
        os.close(writer)
        self.port = int(os.read(reader, 16))
        os.close(reader)

    @property
    def alive(self) -> bool:
        return os.waitpid(self.pid, os.WNOHANG)[0] == 0

    def megabytes(self) -> float:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MB

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


@contextlib.contextmanager
def serving(side: str, secret: str | None = None, descriptors: int | None = None) -> Iterator[Server]:
    server = Server(side, secret, descriptors)
    try:
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(server.pid, signal.SIGKILL)
            os.waitpid(server.pid, 0)


class Honest:
    """A client that sets and gets on a thread; records how long each pair of requests takes."""

    def __init__(self, side: str, port: int) -> None:
        self._store = opened(side, port, False)
        self._done = threading.Event()
        self.taken: list[float] = []
        self.failures = 0
        self._begun = time.monotonic()
        # A daemon thread, because torch's client may wait for longer than its timeout.
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._done.is_set():
            self._begun = time.monotonic()
            try:
                self._store.set("honest", b"x")
                self._store.get("honest")
            except Exception:
                self.failures += 1
            self.taken.append(time.monotonic() - self._begun)
            time.sleep(0.002)

    def stop(self) -> dict[str, float]:
        self._done.set()
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            self.failures += 1
            self.taken.append(time.monotonic() - self._begun)
        ordered = sorted(self.taken)
        return {
            "honest_p99_ms": ordered[int(len(ordered) * 0.99)] * 1e3,
            "honest_failures": float(self.failures),
        }


Attack = Callable[[str, Server], None]


def under(attack: Attack, side: str, descriptors: int | None = None, client: bool = True) -> Outcome:
    """Attacks a server that also has an honest client; records its resources before, at their peak and afterwards."""
    # Attacker and client share an interpreter: by default one waits 5 ms for the other to release its lock.
    sys.setswitchinterval(1e-4)
    with serving(side, descriptors=descriptors) as server:
        honest = Honest(side, server.port) if client else None
        time.sleep(0.2)
        memory, fds = server.megabytes(), server.descriptors()
        most = [memory]
        watching = threading.Event()

        def watch() -> None:
            while not watching.wait(0.02):
                with contextlib.suppress(OSError, IndexError):
                    most.append(server.megabytes())

        watcher = threading.Thread(target=watch)
        watcher.start()
        ended = threading.Event()

        def act() -> None:
            with contextlib.suppress(OSError, RuntimeError, ValueError):
                attack(side, server)
            ended.set()

        actor = threading.Thread(target=act, daemon=True)
        actor.start()
        in_time = ended.wait(ATTACK_S)
        watching.set()
        watcher.join()
        outcome = Outcome()
        if honest is not None:
            outcome.figures.update(honest.stop())
        if not server.alive:
            outcome.saw[0] = Saw("crash", "the server has ended")
            return outcome
        outcome.saw[0] = Saw(RIGHT if in_time else HANG, seconds=0.0)
        outcome.figures["grown_mb"] = max(most) - memory
        deadline = time.monotonic() + 3
        while server.descriptors() > fds and time.monotonic() < deadline:
            time.sleep(0.02)
        outcome.figures["fds_kept"] = float(max(0, server.descriptors() - fds))
        if not _serves(side, server.port):
            outcome.saw[0] = Saw(HANG, "a client that comes later is not served")
        return outcome


def _serves(side: str, port: int) -> bool:
    """Returns true if a new client gets an answer soon."""
    served = threading.Event()

    def come() -> None:
        with contextlib.suppress(RuntimeError, OSError):
            opened(side, port, False).set("later", b"x")
            served.set()

    threading.Thread(target=come, daemon=True).start()
    return served.wait(PATIENCE_S)


def stores_much(side: str, server: Server) -> None:
    """An honest-looking client stores 60 values of 8 MB."""
    store = opened(side, server.port, False)
    for number in range(60):
        store.set(f"much {number}", "x" * (8 * MB))


def sends_without_end(side: str, server: Server) -> None:
    """Sixteen hostile peers send 8 MB each, which is not a valid request."""
    links = [store_protocols.connect(server.port) for _ in range(16)]
    for link in links:
        with contextlib.suppress(OSError):
            link.sendall(b"\xff" * (8 * MB))
    for link in links:
        link.close()


def drips(side: str, server: Server) -> None:
    """Forty clients send all but the last byte of 8 MB, and stay."""
    frame = store_protocols.set_frame(side, b"k", bytes(8 * MB))[:-1]
    links = []
    for _ in range(40):
        link = store_protocols.introduced(side, server.port)
        link.sendall(frame)
        links.append(link)
    time.sleep(1)
    for link in links:
        link.close()


def never_reads(side: str, server: Server) -> None:
    """A client requests 8 MB a hundred times and reads nothing."""
    link = store_protocols.introduced(side, server.port)
    link.sendall(store_protocols.set_frame(side, b"big", bytes(8 * MB)))
    time.sleep(0.3)
    for _ in range(100):
        link.sendall(store_protocols.get_frame(side, b"big"))
    time.sleep(1)
    link.close()


def half_open(side: str, server: Server) -> None:
    """1200 connections that send nothing."""
    links = [store_protocols.connect(server.port) for _ in range(1200)]
    time.sleep(1)
    for link in links:
        link.close()


def thousand_clients(side: str, server: Server) -> None:
    """1000 clients that have introduced themselves and set one key each."""
    links = []
    for number in range(1000):
        link = store_protocols.introduced(side, server.port)
        link.sendall(store_protocols.set_frame(side, f"client {number}".encode(), b"x"))
        links.append(link)
    for link in links:
        link.close()


def garbage(side: str, server: Server) -> None:
    """Random bytes from hostile peers and from introduced clients, mutants of real frames, frames sent twice."""
    chance = random.Random(7)
    frames = [store_protocols.set_frame(side, b"garbage", b"value"), store_protocols.get_frame(side, b"honest")]
    for turn in range(300):
        with (
            contextlib.suppress(OSError),
            (store_protocols.connect if turn % 3 == 0 else partial(store_protocols.introduced, side))(
                server.port
            ) as link,
        ):
            if turn % 3 < 2:
                link.sendall(chance.randbytes(chance.randrange(1, 400)))
            else:
                mutant = bytearray(chance.choice(frames) * 2)
                for _ in range(chance.randrange(0, 4)):
                    mutant[chance.randrange(len(mutant))] = chance.randrange(256)
                link.sendall(mutant)


def uses_all_descriptors(side: str, server: Server) -> None:
    """More connections than the server may have file descriptors."""
    links = [store_protocols.connect(server.port) for _ in range(200)]
    time.sleep(0.5)
    for link in links:
        link.close()


MEMORY = "store: a client that sends without end, drips bytes, never reads"
LOAD = "store: 1200 half-open, 1000 clients, no descriptors left, garbage, mutants, replay"
MEMORY_TARGET = (
    "no more than SYMM_STORE_MAX_BYTES (256 MB), 1 MB before a client has introduced itself, little for what is "
    "not read; others wait < 10 ms"
)
LOAD_TARGET = "others wait < 10 ms (p99), the server lives, its descriptors come back"


def _add(name: str, row: str, target: str, attack: Attack, grown: float, descriptors: int | None = None) -> None:
    add(
        Case(
            f"store: {name}",
            row,
            lambda side: under(attack, side, descriptors),
            Promise(
                at_most={"honest_p99_ms": 10.0, "honest_failures": 0, "grown_mb": grown, "fds_kept": 0},
                stretches=("honest_p99_ms",),
            ),
            target,
            "torch's server looks up the name of every client: it stands still where no resolver answers"
            if row == LOAD
            else "",
        )
    )


_add("60 values of 8 MB", MEMORY, MEMORY_TARGET, stores_much, 300)
_add("hostile peers send 8 MB", MEMORY, MEMORY_TARGET, sends_without_end, 1)
_add("40 clients drip 8 MB", MEMORY, MEMORY_TARGET, drips, 300)
_add("100 answers unread", MEMORY, MEMORY_TARGET, never_reads, 32)
_add("1200 half-open", LOAD, LOAD_TARGET, half_open, 32)
_add("1000 clients", LOAD, LOAD_TARGET, thousand_clients, 32)
_add("garbage and mutants", LOAD, LOAD_TARGET, garbage, 8)
_add("no descriptors left", LOAD, LOAD_TARGET, uses_all_descriptors, 8, 128)


def outsider(side: str) -> Outcome:
    """A client without the job's secret lists, reads and overwrites keys. torch's store has no secrets."""
    with serving(side, SECRET if side == "symm" else None) as server:
        member = opened(side, server.port, False, SECRET)
        member.set("precious", b"1")
        begun = time.monotonic()
        try:
            hostile_peer = opened(side, server.port, False)
            hostile_peer.get("precious")
            hostile_peer.set("precious", b"2")
            saw = Saw(WRONG, "served")
        except Exception as error:
            saw = Saw(type(error).__name__, str(error))
        saw.seconds = time.monotonic() - begun
        if member.get("precious") != b"1":
            saw.kind = WRONG
        return Outcome(saw={0: saw})


add(
    Case(
        "store: outsider",
        "store: an outsider without credentials",
        outsider,
        Promise(
            sees=("DistStoreError", "DistNetworkError", "SymmConfigError", "ValueError"), says=("secret",), within=1.0
        ),
        "refused",
    )
)


def listens(side: str) -> Outcome:
    """The addresses on which a server with 127.0.0.1 listens; from /proc, so that the list is complete."""
    with serving(side) as server:
        found = set()
        for table in ("tcp", "tcp6"):
            for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                address, _, port = row.split()[1].rpartition(":")
                if int(port, 16) == server.port and row.split()[3] == "0A":
                    found.add(address)
        everywhere = {address for address in found if not address.strip("0")}
        return Outcome(
            saw={0: Saw(WRONG if everywhere or not found else RIGHT)}, figures={"wildcard": float(len(everywhere))}
        )


add(
    Case(
        "store: address",
        "store: the address it listens on, told 127.0.0.1",
        listens,
        Promise(at_most={"wildcard": 0}),
        "127.0.0.1",
    )
)

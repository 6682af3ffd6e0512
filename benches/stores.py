"""``python benches/stores.py``: torch's stores compared with this package's, in one run.

Clients are threads of this process, each with a store object (and so a connection, or an open file) of its own. They
call the stores through ``c10d::Store``, as torch does, from native code, because Python's lock would distort the times.
Rounds of the two sides alternate. A latency is the median over all calls of all clients and rounds, a throughput the
median over the rounds.

The works:

- ``set``, ``get``, ``add``, ``wait``: the operation, on keys that exist. torch's TCPStore returns from ``set`` when the
  message is sent; the stores of this package return when every other client sees the value.
- ``mix``: the four in turn, with the client's own key; one call is all four.
- ``hand over``: one of two clients sets a key for which the other waits, then the other way round; a call is one way.
- ``meet``: a rendezvous: set a key, wait for the keys of all clients, get the next client's key. Connecting is timed
  separately, one client after the other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch_symm
from rich.console import Console
from rich.table import Table
from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch_symm.tools.bench import machine
from torch_symm.tools.command import counts

WORKS = ("set", "get", "add", "wait", "mix", "hand over")
ROUNDS = 5
#: Calls per round and side, over all clients.
CALLS = {"tcp": 8192, "file": 2048}
#: The calls of ``hand over`` on files, which are few because torch's FileStore polls for keys every 10 ms.
PATIENT_CALLS = 64
PATIENCE = timedelta(minutes=5)


@dataclass
class Figure:
    """One kind of store, number of clients and work, both sides. Microseconds, and calls per second."""

    kind: str
    clients: int
    work: str
    torch_us: float
    symm_us: float
    torch_rate: float
    symm_rate: float


def torch_tcp(_: Path, port: int | None) -> Store:
    """A client of torch's TCPStore with libuv, or without ``port`` the server."""
    return TCPStore("127.0.0.1", port or 0, None, port is None, PATIENCE, wait_for_workers=False)


def symm_tcp(_: Path, port: int | None) -> Store:
    """A client of torch_symm's TCPStore, or without ``port`` the server."""
    return torch_symm.TCPStore("127.0.0.1", port or 0, None, port is None, PATIENCE, wait_for_workers=False)


def torch_file(folder: Path, _: int | None) -> Store:
    """A user of torch's FileStore in ``folder``."""
    return FileStore(str(folder / "torch"), -1)


def symm_file(folder: Path, _: int | None) -> Store:
    """A user of torch_symm's FileStore in ``folder``."""
    return torch_symm.FileStore(folder / "symm", 1)


Opener = Callable[[Path, "int | None"], Store]
SIDES: dict[str, tuple[Opener, Opener]] = {"tcp": (torch_tcp, symm_tcp), "file": (torch_file, symm_file)}


@contextmanager
def load_generator(opener: Opener, clients: int) -> Iterator[tuple[list[Store], float]]:
    """Yields clients of a new store, and the seconds that it took to open them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = opener(folder, None)
        port: int | None = getattr(server, "port", None)
        started = time.perf_counter()
        stores = [opener(folder, port) for _ in range(clients)]
        yield stores, time.perf_counter() - started
        stores.clear()
        del server


def measure(kind: str, clients: int, works: Sequence[str]) -> Iterator[Figure]:
    """Measures both sides of ``kind``, one work after the other."""
    from torch_symm._native import load

    drive = load()._run_load
    theirs, ours = SIDES[kind]
    with load_generator(theirs, clients) as (their_clients, _), load_generator(ours, clients) as (our_clients, _):
        for work in works:
            if work == "hand over" and clients < 2:
                continue
            total = PATIENT_CALLS if kind == "file" and work == "hand over" else CALLS[kind]
            calls = max(total // clients, 4)
            times: tuple[list[int], list[int]] = ([], [])
            rates: tuple[list[float], list[float]] = ([], [])
            for _ in range(ROUNDS):
                for side, stores in enumerate((their_clients, our_clients)):
                    seconds, nanoseconds = drive(stores, work, calls)
                    times[side].extend(nanoseconds)
                    rates[side].append(len(nanoseconds) / seconds)
            median = [statistics.median(side) / 1e3 for side in times]
            rate = [statistics.median(side) for side in rates]
            yield Figure(kind, clients, work, *median, *rate)


def rendezvous(kind: str, ranks: int) -> Iterator[Figure]:
    """Measures connecting, once, and meeting."""
    from torch_symm._native import load

    drive = load()._run_load
    connecting: list[float] = []
    meeting: tuple[list[float], list[float]] = ([], [])
    theirs, ours = SIDES[kind]
    with (
        load_generator(theirs, ranks) as (their_clients, their_seconds),
        load_generator(ours, ranks) as (our_clients, our_seconds),
    ):
        connecting += (their_seconds, our_seconds)
        for _ in range(ROUNDS):
            for side, clients in enumerate((their_clients, our_clients)):
                meeting[side].append(drive(clients, "meet", 1)[0])
    for work, (a, b) in (("connect", connecting), ("meet", map(statistics.median, meeting))):
        yield Figure(kind, ranks, work, a * 1e6, b * 1e6, 1 / a, 1 / b)


def show(figures: Sequence[Figure]) -> None:
    """Prints the table."""
    table = Table()
    for title in (
        "store",
        "clients",
        "work",
        "torch µs",
        "symm µs",
        "torch / symm",
        "torch calls/s",
        "symm calls/s",
        "symm / torch",
    ):
        table.add_column(title, justify="left" if title in ("store", "work") else "right")
    for figure in figures:
        f = figure
        table.add_row(
            f.kind, str(f.clients), f.work, f"{f.torch_us:,.1f}", f"{f.symm_us:,.1f}", f"{f.torch_us / f.symm_us:.2f}",
            f"{f.torch_rate:,.0f}", f"{f.symm_rate:,.0f}", f"{f.symm_rate / f.torch_rate:.2f}",
        )  # fmt: skip
    Console(width=110).print(table)


def main(arguments: Sequence[str]) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python benches/stores.py", description="Compares the stores with torch's.")
    parser.add_argument("--stores", default="tcp,file", help="comma-separated, of: tcp, file")
    parser.add_argument("--clients", type=counts, default="1,16,256", help="comma-separated numbers of clients")
    parser.add_argument(
        "--ranks",
        type=lambda text: counts(text) if text else (),
        default="4,16,256,1024",
        help="comma-separated numbers of ranks in a rendezvous; empty: measure no rendezvous",
    )
    parser.add_argument("--json", type=Path, default=Path("out/bench-stores.json"), help="file for all figures")
    given = parser.parse_args(arguments)
    here = machine.describe()
    print(
        f"{here.date}  {here.cpu}, {here.cores} cores, load {here.loadavg[0]}, torch {here.torch}, commit {here.commit}"
    )
    figures: list[Figure] = []
    for kind in given.stores.split(","):
        for clients in given.clients:
            for figure in measure(kind, clients, WORKS):
                figures.append(figure)
                print(
                    f"{kind} {clients} {figure.work}: {figure.torch_us / figure.symm_us:.2f} times as fast", flush=True
                )
    # Every user of a file reads what all others write: a thousand take minutes, on either side.
    meetings = [
        (kind, ranks) for kind in given.stores.split(",") for ranks in given.ranks if kind == "tcp" or ranks <= 256
    ]
    for kind, ranks in meetings:
        for figure in rendezvous(kind, ranks):
            figures.append(figure)
            print(
                f"{kind} {ranks} ranks {figure.work}: {figure.torch_us / figure.symm_us:.2f} times as fast", flush=True
            )
    show(figures)
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(
        json.dumps({"machine": asdict(here), "figures": [asdict(figure) for figure in figures]}, indent=1)
    )
    print(f"written to {given.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

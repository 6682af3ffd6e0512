"""Tests the errors that other ranks get when one fails: each fault on its own ranks, on CPU or CUDA tensors."""

from __future__ import annotations

import os
import queue
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.queues import Queue
from pathlib import Path

import torch
import torch.distributed as dist

from torch_symm._torch_compat import set_timeout
from torch_symm.launch import ranks

#: Number of ranks of a fault, on CUDA at most the number of GPUs. The last rank fails.
RANKS = 3
#: Timeout of the group after its first call has succeeded.
TIMEOUT_S = 2.0
#: Seconds for a fault, including the start; GPU contexts and kernel compilation take most of it.
LIMIT_S = {"cpu": 30.0, "cuda": 90.0}


@dataclass(frozen=True)
class Fault:
    """A fault of one rank, and the exception that the other ranks must get.

    The exception must name the rank. If ``everyone`` is set, the rank itself must get it, too.
    """

    name: str
    does: str
    raises: str
    everyone: bool = False


FAULTS = (
    Fault("killed", "is killed inside the job", "SymmPeerError"),
    Fault("exited", "ends without a word", "SymmPeerError"),
    Fault("left", "leaves the group while others call", "SymmPeerError"),
    Fault("late", f"does not come within {TIMEOUT_S:g} s", "SymmTimeoutError"),
    Fault("stopped", f"is stopped for more than {TIMEOUT_S:g} s", "SymmTimeoutError"),
    Fault("other", "calls with another length", "SymmMismatchError", everyone=True),
)


@dataclass(frozen=True)
class Told:
    """The error of a rank, and the seconds from its call to the error."""

    rank: int
    kind: str
    text: str
    seconds: float


@dataclass(frozen=True)
class Seen:
    """A fault and whether every error was right; ``text`` is the observation."""

    fault: Fault
    right: bool
    text: str


def play(device: str = "cpu", world: int = RANKS) -> Iterator[Seen]:
    """Plays each fault in turn, on ``world`` ranks with tensors on ``device``, without logs and traces."""
    for fault in FAULTS:
        with tempfile.TemporaryDirectory(prefix="torch-symm-check-") as folder:
            yield _played(fault, device, world, Path(folder))


def _played(fault: Fault, device: str, world: int, folder: Path) -> Seen:
    results = ranks.queue()
    rendezvous = "symm+" + (folder / "rendezvous").as_uri()
    told: list[Told] = []
    limit = LIMIT_S[device]
    deadline = time.monotonic() + limit
    settings = {"SYMM_LOG": "off", "SYMM_TRACE_DIR": str(folder)}
    with ranks.started(main, (fault, device, world, rendezvous, results), world, True, settings) as started:
        while len(told) < expected(fault, world) and time.monotonic() < deadline:
            try:
                told.append(results.get(timeout=0.2))
            except queue.Empty:
                if not any(process.is_alive() for process in started.processes):
                    break
        for process in started.processes:
            process.kill()
    return judged(fault, told, world, limit)


def expected(fault: Fault, world: int) -> int:
    """Number of ranks that must get an error."""
    return world if fault.everyone else world - 1


def judged(fault: Fault, told: list[Told], world: int = RANKS, limit: float = LIMIT_S["cpu"]) -> Seen:
    """Judges whether enough ranks got the right error."""
    for one in told:
        if one.kind != fault.raises or f"rank {world - 1}" not in one.text:
            return Seen(fault, False, f"rank {one.rank} got {one.kind}: {one.text}")
    if len(told) < expected(fault, world):
        return Seen(fault, False, f"{len(told)} of {expected(fault, world)} ranks were told within {limit:g} s")
    return Seen(fault, True, f"{fault.raises} on {len(told)} ranks after {max(one.seconds for one in told):.2f} s")


def main(rank: int, fault: Fault, device: str, world: int, rendezvous: str, results: Queue[Told]) -> None:
    """Entry point of a rank process: one call that succeeds, and the fault."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    limit = timedelta(seconds=LIMIT_S[device])
    dist.init_process_group("symm", init_method=rendezvous, rank=rank, world_size=world, timeout=limit)
    tensor = torch.ones(1000, device=device)
    dist.all_reduce(tensor)
    # Kernels report errors when the host waits for them.
    settle = torch.cuda.synchronize if device == "cuda" else _nothing
    settle()
    if fault.raises == "SymmTimeoutError":
        set_timeout(timedelta(seconds=TIMEOUT_S))
    fails = rank == world - 1
    if fails:
        _fail(fault, LIMIT_S[device])
    started = time.monotonic()
    try:
        for _ in range(100):
            dist.all_reduce(tensor[: 500 if fails else 1000])
            settle()
        told = Told(rank, "no exception", "100 calls went through", time.monotonic() - started)
    except Exception as error:
        told = Told(rank, type(error).__name__, str(error), time.monotonic() - started)
    results.put(told)
    results.close()
    results.join_thread()
    os._exit(0)


def _nothing() -> None:
    return None


def _fail(fault: Fault, limit: float) -> None:
    if fault.name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.name == "exited":
        os._exit(3)
    elif fault.name == "left":
        dist.destroy_process_group()
        os._exit(0)
    elif fault.name == "stopped":
        # Stopped until it is killed.
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.name == "late":
        time.sleep(limit)

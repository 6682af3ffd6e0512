"""What the other ranks are told when one fails: each fault on ranks of its own, on CPU tensors."""

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
from typing import Any

import torch
import torch.distributed as dist

from torch_symm.tune import processes

RANKS = 3
#: The rank that fails: the last.
CULPRIT = RANKS - 1
TIMEOUT_S = 2.0
#: Seconds for a fault, starting included.
LIMIT_S = 30.0


@dataclass(frozen=True)
class Fault:
    """What a rank does, and which exception with which words the others must get."""

    name: str
    does: str
    raises: str
    says: str
    #: Ranks that must get it.
    told: int = RANKS - 1


FAULTS = (
    Fault("killed", "is killed inside the job", "SymmPeerError", f"rank {CULPRIT}"),
    Fault("exited", "ends without a word", "SymmPeerError", f"rank {CULPRIT}"),
    Fault("left", "leaves the group while others call", "SymmPeerError", f"rank {CULPRIT}"),
    Fault("late", f"does not come within {TIMEOUT_S:g} s", "SymmTimeout", f"rank {CULPRIT}"),
    Fault("other", "calls with another length", "SymmMismatch", f"rank {CULPRIT}", RANKS),
)


@dataclass(frozen=True)
class Told:
    """What a rank was told, and how many seconds after its call."""

    rank: int
    kind: str
    text: str
    seconds: float


@dataclass(frozen=True)
class Seen:
    """A fault and whether all was as it must be; ``text`` says what was."""

    fault: Fault
    right: bool
    text: str


def play() -> Iterator[Seen]:
    """Each fault in turn. Its ranks' logs are off, and their traces go with them."""
    before = {name: os.environ.get(name) for name in ("SYMM_LOG", "SYMM_TRACE_DIR")}
    try:
        for fault in FAULTS:
            with tempfile.TemporaryDirectory(prefix="torch-symm-check-") as folder:
                os.environ.update(SYMM_LOG="off", SYMM_TRACE_DIR=folder)
                yield _played(fault, Path(folder))
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _played(fault: Fault, folder: Path) -> Seen:
    results = processes.queue()
    rendezvous = "symm+" + (folder / "rendezvous").as_uri()
    started: Any = processes.start(main, (fault, rendezvous, results), RANKS, None)
    told: list[Told] = []
    deadline = time.monotonic() + LIMIT_S
    try:
        while len(told) < fault.told and time.monotonic() < deadline:
            try:
                told.append(results.get(timeout=0.2))
            except queue.Empty:
                if not any(process.is_alive() for process in started.processes):
                    break
    finally:
        for process in started.processes:
            if process.is_alive():
                process.kill()
            process.join()
    return judged(fault, told)


def judged(fault: Fault, told: list[Told]) -> Seen:
    """Whether enough ranks were told the right thing."""
    for one in told:
        if one.kind != fault.raises or fault.says not in one.text:
            return Seen(fault, False, f"rank {one.rank} got {one.kind}: {one.text}")
    if len(told) < fault.told:
        return Seen(fault, False, f"{len(told)} of {fault.told} ranks were told within {LIMIT_S:g} s")
    return Seen(fault, True, f"{fault.raises} on {len(told)} ranks after {max(one.seconds for one in told):.2f} s")


def main(rank: int, fault: Fault, rendezvous: str, results: Queue[Told]) -> None:
    """Entry point of a rank process: one call that goes well, and the fault."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "symm",
        init_method=rendezvous,
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=TIMEOUT_S if fault.name == "late" else LIMIT_S),
    )
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    if rank == CULPRIT:
        _fail(fault)
    started = time.monotonic()
    try:
        for _ in range(100):
            dist.all_reduce(tensor[: 500 if rank == CULPRIT else 1000])
        told = Told(rank, "no exception", "100 calls went through", time.monotonic() - started)
    except Exception as error:
        told = Told(rank, type(error).__name__, str(error), time.monotonic() - started)
    results.put(told)
    results.close()
    results.join_thread()
    os._exit(0)


def _fail(fault: Fault) -> None:
    if fault.name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.name == "exited":
        os._exit(3)
    elif fault.name == "left":
        dist.destroy_process_group()
        os._exit(0)
    elif fault.name == "late":
        time.sleep(LIMIT_S)

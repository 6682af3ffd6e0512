"""Rank processes, one per GPU, that run one scenario after another.

Importing torch and making a context on a GPU take seconds, so the processes stay. A scenario is a function of a test
module, ``fn(rank, world, *args)``; it runs on the first ``world`` processes. After a failure, or a scenario that kills
a rank, all processes are replaced. Every wait has a limit: ranks that do not answer print the stacks of all their
threads and are killed.

SYMM_TEST_DEVICE=cpu runs the tests that need no GPU on CPU tensors. With SYMM_ALLOW_SHARED_GPUS=1 there may be more
ranks than GPUs, as in SYMM_TEST_WORLDS="5,8"; several ranks then use one GPU.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_symm
from ranks import log_to

DEVICE = os.environ.get("SYMM_TEST_DEVICE", "cuda")


def _gpus() -> int:
    """Number of usable GPUs of this node. Querying the driver would open its devices in the test process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return there if visible is None else min(there, len([each for each in visible.split(",") if each.strip()]))


def _wanted(usual: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the numbers of ranks in SYMM_TEST_WORLDS ("3,5,8"), or ``usual`` if it is not set."""
    named = os.environ.get("SYMM_TEST_WORLDS")
    return tuple(int(world) for world in named.split(",")) if named else usual


GPUS = _gpus()
SHARED = os.environ.get("SYMM_ALLOW_SHARED_GPUS") == "1"
#: Maximum number of ranks.
PLACES = 3 if DEVICE != "cuda" else 16 if GPUS and SHARED else GPUS
FULL = min(8, PLACES)
#: World sizes of most tests: all ranks, and smaller sizes that use other algorithms. SYMM_TEST_WORLDS replaces them.
WORLDS = tuple(sorted({world for world in _wanted((2, 3, FULL)) if world <= max(2, PLACES)}))

needs_ranks = pytest.mark.skipif(PLACES < 2, reason="needs two GPUs (SYMM_TEST_DEVICE=cpu runs it on CPU tensors)")
needs_gpus = pytest.mark.skipif(DEVICE != "cuda" or PLACES < 2, reason="needs two GPUs")
needs_unshared_gpus = pytest.mark.skipif(DEVICE != "cuda" or GPUS < 2, reason="needs a GPU for each of two ranks")

#: Seconds that the other ranks have to end after the first has failed.
GRACE_S = 8.0

#: Set only in rank processes: the directory for their files, and the number of the scenario.
scratch: Path
scenario = 0


def device() -> torch.device:
    """The device of this rank's tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if DEVICE == "cuda" else torch.device("cpu")


def settle() -> None:
    """Returns once this rank's GPU has finished all work."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def captured(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A graph of a call that has run once, so that all memory and kernels exist."""
    run()
    settle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def init(
    rank: int,
    world: int,
    backend: str = "symm",
    timeout: float = 60,
    name: str = "default",
    options: Any = None,
    device_id: torch.device | None = None,
) -> None:
    """``init_process_group`` over a fresh file store."""
    given = {"timeout": timedelta(seconds=timeout), "pg_options": options, "device_id": device_id}
    store = torch_symm.FileStore(scratch / f"store-{scenario}-{name}", world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, **given)


def meet(name: str, rank: int, world: int, timeout: float = 60) -> None:
    """Returns once every rank has called it with this name; works without a group."""
    (scratch / f"meet-{scenario}-{name}-{rank}").touch()
    deadline = time.monotonic() + timeout
    while not all((scratch / f"meet-{scenario}-{name}-{other}").exists() for other in range(world)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all ranks came to {name!r}")
        time.sleep(0.002)


class Pool:
    """At least ``places`` rank processes, which start when a test first needs them."""

    def __init__(self, places: int = FULL) -> None:
        self._places = places
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "torch_symm"])
        self._ranks: list[tuple[Any, Connection]] = []
        self._numbers = itertools.count(1)

    def run(
        self,
        fn: Callable[..., Any],
        world: int,
        *args: Any,
        backend: str | None = "symm",
        timeout: float = 120,
        group_timeout: float = 60,
        killed: Collection[int] = (),
    ) -> list[Any]:
        """Calls ``fn(rank, world, *args)`` on ``world`` ranks and returns the results.

        ``backend``: of the default group, which is made before the call and destroyed after it; ``None`` if ``fn``
        makes it. ``timeout``: seconds for everything. ``killed``: ranks that must exit by SIGKILL. An exception of a
        rank fails the test.
        """
        self._start(max(world, self._places))
        number = next(self._numbers)
        self._log_from = [self._log(rank).stat().st_size for rank in range(world)]
        for rank in range(world):
            self._ranks[rank][1].send((fn, number, rank, world, args, backend, group_timeout))
        answers = self._collect(world, time.monotonic() + timeout, killed)
        problems = []
        for rank in range(world):
            kind, value = answers.get(rank, ("late", "it did not answer in time"))
            if (kind == "killed") != (rank in killed) or kind in ("error", "late", "gone"):
                problems.append(f"rank {rank}: {value}\n{self._tail(rank)}")
        if problems or killed:
            self.stop()
        if problems:
            raise AssertionError(f"{fn.__name__} on {world} ranks\n" + "\n".join(problems))
        return [answers[rank][1] for rank in range(world)]

    def stop(self) -> None:
        """Ends all processes."""
        for process, connection in self._ranks:
            connection.close()
            process.kill()
            process.join()
        self._ranks = []

    def _start(self, count: int) -> None:
        if len(self._ranks) >= count:
            return
        self.stop()
        self._place = tempfile.TemporaryDirectory(prefix="symm-test-")
        for rank in range(count):
            ours, theirs = self._context.Pipe()
            self._log(rank).touch()
            process = self._context.Process(target=_serve, args=(rank, theirs, self._place.name), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def _collect(self, world: int, deadline: float, killed: Collection[int]) -> dict[int, tuple[str, Any]]:
        answers: dict[int, tuple[str, Any]] = {}
        dumped = False
        while missing := [rank for rank in range(world) if rank not in answers]:
            if time.monotonic() > deadline:
                if dumped:
                    break
                for rank in missing:
                    os.kill(self._ranks[rank][0].pid, signal.SIGUSR1)
                dumped, deadline = True, time.monotonic() + 0.5
            wait([self._ranks[rank][1] for rank in missing], timeout=0.05)
            for rank in missing:
                process, connection = self._ranks[rank]
                try:
                    if connection.poll():
                        answers[rank] = connection.recv()
                except (EOFError, ConnectionError):
                    process.join(5)
                    gone = process.exitcode == -signal.SIGKILL and rank in killed
                    answers[rank] = ("killed", None) if gone else ("gone", f"ended with {process.exitcode}")
                if answers.get(rank, ("ok", None))[0] in ("error", "gone"):
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers

    def _log(self, rank: int) -> Path:
        return Path(self._place.name) / f"log-{rank}"

    def _tail(self, rank: int) -> str:
        return self._log(rank).read_text(errors="replace")[self._log_from[rank] :][-4000:]


def _serve(rank: int, connection: Connection, place: str) -> None:
    """The main loop of a rank process."""
    global scratch, scenario
    scratch = Path(place)
    log_to(scratch / f"log-{rank}")
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            try:
                fn, scenario, rank, world, args, backend, group_timeout = connection.recv()
                if DEVICE == "cuda":
                    torch.cuda.set_device(rank % GPUS)
                if backend is not None:
                    init(rank, world, backend, group_timeout)
                result = fn(rank, world, *args)
                if dist.is_initialized():
                    dist.destroy_process_group()
                connection.send(("ok", result))
            except (EOFError, ConnectionError):
                raise
            except BaseException:  # Whatever the error, the parent reports it and replaces this process
                connection.send(("error", traceback.format_exc()))
    os._exit(0)

"""Runs a function on real processes, one per rank.

The processes are forked from pytest, which imports torch but makes no group and no thread of its own, so that
starting a rank takes milliseconds. Every wait has a limit: ranks that do not end print the stacks of all their threads
and are killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch_symm

#: Where the ranks of this run meet and leave files; set in ranks only.
scratch: Path

#: The line that a rank logs when a group fails.
DUMPED = re.compile(r"^.*the last calls of this process are in (.*?); for those of all ranks: .*\n", re.MULTILINE)

#: Seconds that the other ranks have to end after the first has failed.
GRACE_S = 8.0


class Results(list[Any]):
    """What the function returned, by rank; ``None`` for ranks that were killed.

    ``logs``: what each rank printed, but for where its trace is, which is in ``dumps``.
    """

    logs: list[str]
    dumps: list[list[Path]]
    seconds: float


def file_store(name: str, world_size: int) -> torch_symm.FileStore:
    """A store that the ranks of this run share under ``name``."""
    return torch_symm.FileStore(scratch / f"store-{name}", world_size)


def init(rank: int, world_size: int, backend: str = "symm", timeout: float = 60, name: str = "default") -> None:
    """``init_process_group`` over a fresh file store."""
    dist.init_process_group(
        backend,
        store=file_store(name, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )


def meet(name: str, rank: int, world_size: int, timeout: float = 30) -> None:
    """Returns once every rank has called it with this name; works without a group."""
    (scratch / f"meet-{name}-{rank}").touch()
    deadline = time.monotonic() + timeout
    while not all((scratch / f"meet-{name}-{r}").exists() for r in range(world_size)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all ranks came to {name!r}")
        time.sleep(0.002)


def on_threads(bodies: list[Callable[[], None]]) -> None:
    """Runs all at once and raises the first exception."""
    errors: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str | None = "symm",
    timeout: float = 60,
    group_timeout: float = 60,
    expect_killed: Collection[int] = (),
    expect_gone: Collection[int] = (),
    env: dict[str, str] | None = None,
) -> Results:
    """Calls ``fn(rank, world_size, *args)`` on ``world_size`` processes and returns the results.

    ``backend``: of the default group, made before and destroyed after; ``None``: ``fn`` makes its own.
    ``timeout``: seconds for everything. ``expect_killed``: ranks that must die of SIGKILL; ``expect_gone``:
    that may end in any way. A rank's exception, with its traceback, fails the caller.
    """
    context = get_context("fork")
    with tempfile.TemporaryDirectory(prefix="symm-test-") as directory, _environment(env or {}):
        place = Path(directory)
        start = time.monotonic()
        processes = [
            context.Process(target=_rank, args=(fn, rank, world_size, args, backend, group_timeout, place))
            for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.start()
            late = _await(processes, start + timeout, {*expect_killed, *expect_gone})
        finally:
            for process in processes:
                if process.pid is not None and process.is_alive():
                    process.kill()
                    process.join()
        return _collect(processes, place, late, expect_killed, expect_gone, time.monotonic() - start)


def spawn_rank(fn: Callable[..., Any], rank: int, world_size: int, *args: Any) -> int:
    """Forks this rank; the child calls ``fn(rank, world_size, *args)`` and ends with 0, or 1 after a traceback."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        fn(rank, world_size, *args)
        status = 0
    except BaseException:  # The child must not return into the parent's code
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _await(processes: list[Any], deadline: float, expect_killed: Collection[int]) -> list[int]:
    """Waits for all to end; returns those that did not, after they printed their stacks."""
    while True:
        running = [rank for rank, process in enumerate(processes) if process.exitcode is None]
        if not running:
            return []
        failed = any(
            process.exitcode not in (None, 0) for rank, process in enumerate(processes) if rank not in expect_killed
        )
        if failed:
            deadline = min(deadline, time.monotonic() + GRACE_S)
        if time.monotonic() > deadline:
            break
        wait([processes[rank].sentinel for rank in running], timeout=0.05)
    for rank in running:
        os.kill(processes[rank].pid, signal.SIGCONT)
        os.kill(processes[rank].pid, signal.SIGUSR1)
    time.sleep(0.5)
    return running


def _collect(
    processes: list[Any],
    place: Path,
    late: list[int],
    expect_killed: Collection[int],
    expect_gone: Collection[int],
    seconds: float,
) -> Results:
    results = Results([None] * len(processes))
    results.seconds = seconds
    results.logs = []
    results.dumps = []
    failures = []
    for rank, process in enumerate(processes):
        log = (place / f"log-{rank}").read_text(errors="replace") if (place / f"log-{rank}").exists() else ""
        results.dumps.append([Path(path) for path in DUMPED.findall(log)])
        results.logs.append(DUMPED.sub("", log))
        killed = rank in expect_killed
        if rank in late:
            failures.append((float("inf"), f"rank {rank} did not end; its threads:\n{log[-8000:]}"))
        elif killed and process.exitcode != -signal.SIGKILL:
            failures.append(
                (0.0, f"rank {rank} should have been killed, it ended with {process.exitcode}\n{log[-4000:]}")
            )
        elif rank in expect_gone:
            continue
        elif not killed and process.exitcode != 0:
            trace = place / f"trace-{rank}"
            when = trace.stat().st_mtime if trace.exists() else 0.0
            text = trace.read_text() if trace.exists() else f"exit code {process.exitcode}, no traceback"
            failures.append((when, f"rank {rank} failed:\n{text}\n{log[-4000:]}"))
        elif not killed:
            results[rank] = pickle.loads((place / f"result-{rank}").read_bytes())
    if failures:
        raise AssertionError("\n\n".join(text for _, text in sorted(failures, key=lambda failure: failure[0])))
    return results


def log_to(path: Path) -> None:
    """From now on this process prints into ``path``, and at SIGUSR1 the stacks of its threads."""
    log = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    # pytest's capture holds other objects than the descriptors.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - as long as the process
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


def _rank(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
    backend: str | None,
    group_timeout: float,
    place: Path,
) -> None:
    global scratch
    scratch = place
    signal.setitimer(signal.ITIMER_REAL, 0)
    log_to(place / f"log-{rank}")
    torch.set_num_threads(1)
    try:
        if backend is not None:
            init(rank, world_size, backend, group_timeout)
        result = fn(rank, world_size, *args)
        if dist.is_initialized():
            dist.destroy_process_group()
        (place / f"result-{rank}").write_bytes(pickle.dumps(result))
    except BaseException:  # Whatever it is, the parent reports it
        (place / f"trace-{rank}").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)

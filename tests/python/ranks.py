"""Runs a function on N real processes, quickly, and says what happened to each.

The ranks are forked from the test process, which has torch loaded and no thread of its own, so they start in
milliseconds and the function may be a closure. Every run has its own store. A run that takes too long ends with the
stacks of all ranks.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import selectors
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

torch.set_num_threads(1)

BACKEND = os.environ.get("SYMM_TEST_BACKEND", "symm")
# Once one rank has failed, the others have this long to end by themselves.
GRACE_S = 12.0


@dataclass
class Outcome:
    """What became of one rank."""

    rank: int
    pid: int
    value: Any = None
    error: str | None = None
    signal: int | None = None
    late: bool = False
    output: str = ""
    seconds: float = 0.0


@dataclass
class Running:
    """A rank that has been started."""

    outcome: Outcome
    pipe: int
    log: Path
    data: bytearray = field(default_factory=bytearray)
    ended: bool = False


class RanksFailed(AssertionError):
    """At least one rank failed, died or was late."""


def run_ranks(
    world: int,
    body: Callable[[int], Any],
    *,
    timeout: float = 40,
    group_timeout: float = 30,
    join: bool = True,
    backend: str | None = None,
    env: Mapping[str, str] | None = None,
    may_die: Collection[int] = (),
    meanwhile: Callable[[list[int]], None] | None = None,
) -> list[Outcome]:
    """Calls ``body(rank)`` in ``world`` processes and returns their outcomes in order of rank.

    Args:
        timeout: seconds until all ranks are killed and the test fails with their stacks.
        group_timeout: seconds given to ``init_process_group``.
        join: make the default group first and destroy it afterwards; otherwise ``body`` does so with ``init``.
        env: environment of the ranks, on top of this process's.
        may_die: ranks that may end by a signal or by ``os._exit``.
        meanwhile: called with the pids while the ranks run.

    Raises:
        RanksFailed: a rank raised, died or was late; with the traceback and the output of every rank concerned.
    """
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    running = []
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        gc.collect()
        gc.freeze()
        for rank in range(world):
            running.append(_start(rank, world, body, folder, group_timeout, join, backend or BACKEND, env or {}))
        gc.unfreeze()
        if meanwhile is not None:
            meanwhile([one.outcome.pid for one in running])
        _collect(running, timeout, may_die)
    finally:
        for one in running:
            if not one.ended:
                os.kill(one.outcome.pid, signal.SIGKILL)
                os.waitpid(one.outcome.pid, 0)
            one.outcome.output = one.log.read_text(errors="replace")
            os.close(one.pipe)
        shutil.rmtree(folder, ignore_errors=True)
    outcomes = [one.outcome for one in running]
    _judge(outcomes, may_die, timeout)
    return outcomes


def values(outcomes: list[Outcome]) -> list[Any]:
    """What each rank returned."""
    return [outcome.value for outcome in outcomes]


def init(
    rank: int, world: int, *, timeout: float = 30, name: str = "store", backend: str | None = None, **more: Any
) -> None:
    """``init_process_group`` over a file store that the ranks of this run share; another ``name`` gives a fresh one."""
    store = dist.FileStore(os.path.join(os.environ["RANKS_FOLDER"], name), world)
    limit = timedelta(seconds=timeout)
    dist.init_process_group(backend or BACKEND, store=store, rank=rank, world_size=world, timeout=limit, **more)


def meet(name: str, rank: int, world: int, timeout: float = 20) -> None:
    """A barrier over files, for tests whose group may be broken."""
    folder = Path(os.environ["RANKS_FOLDER"]) / f"meet-{name}"
    folder.mkdir(exist_ok=True)
    (folder / str(rank)).touch()
    until = time.monotonic() + timeout
    while len(list(folder.iterdir())) < world:
        if time.monotonic() > until:
            raise TimeoutError(f"meeting {name!r}: only ranks {sorted(p.name for p in folder.iterdir())} came")
        time.sleep(0.002)


@contextmanager
def raises_within(
    limit: float, *types: type[BaseException], match: str = ""
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """``pytest.raises`` with a limit in seconds."""
    started = time.monotonic()
    with pytest.raises(types, match=match or None) as info:
        yield info
    took = time.monotonic() - started
    assert took <= limit, f"raised after {took:.2f} s, more than {limit} s: {info.value}"


def _start(
    rank: int,
    world: int,
    body: Callable[[int], Any],
    folder: Path,
    group_timeout: float,
    join: bool,
    backend: str,
    env: Mapping[str, str],
) -> Running:
    reader, writer = os.pipe()
    log = folder / f"log-{rank}"
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _child(rank, world, body, folder, log, writer, group_timeout, join, backend, env)
    os.close(writer)
    os.set_blocking(reader, False)
    return Running(Outcome(rank, pid), reader, log)


def _child(
    rank: int,
    world: int,
    body: Callable[[int], Any],
    folder: Path,
    log: Path,
    writer: int,
    group_timeout: float,
    join: bool,
    backend: str,
    env: Mapping[str, str],
) -> NoReturn:
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    # pytest's capture holds its own objects; write to the descriptors.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    os.environ.update(env)
    os.environ.update(RANKS_FOLDER=str(folder), RANK=str(rank), WORLD_SIZE=str(world))
    if "TORCH_DISTRIBUTED_DEBUG" in env:
        dist.set_debug_level_from_env()
    value: Any = None
    error: str | None = None
    started = time.monotonic()
    own = os.getpid()
    try:
        if join:
            init(rank, world, timeout=group_timeout, backend=backend)
        value = body(rank)
        if join and dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        error = traceback.format_exc()
    if os.getpid() != own:
        # A child forked by the body: its end is no result of the rank.
        os._exit(0)
    seconds = time.monotonic() - started
    try:
        data = pickle.dumps((value, error, seconds))
    except Exception:
        data = pickle.dumps((None, f"what the rank returned cannot be pickled: {value!r}", seconds))
    while data:
        data = data[os.write(writer, data) :]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _collect(running: list[Running], timeout: float, may_die: Collection[int]) -> None:
    """Reads results until every rank has ended or the time is over."""
    until = time.monotonic() + timeout
    with selectors.DefaultSelector() as selector:
        for one in running:
            selector.register(one.pipe, selectors.EVENT_READ, one)
            selector.register(os.pidfd_open(one.outcome.pid), selectors.EVENT_READ, one)
        try:
            while not all(one.ended for one in running):
                left = until - time.monotonic()
                if left <= 0:
                    _dump_stacks(running)
                    return
                for key, _ in selector.select(left):
                    one = key.data
                    if key.fd == one.pipe:
                        _read(one)
                        continue
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    _read(one)
                    _finish(one, may_die)
                    if one.outcome.error or (one.outcome.signal and one.outcome.rank not in may_die):
                        until = min(until, time.monotonic() + GRACE_S)
        finally:
            for key in list(selector.get_map().values()):
                if key.fd != key.data.pipe:
                    os.close(key.fd)


def _read(one: Running) -> None:
    while True:
        try:
            some = os.read(one.pipe, 1 << 16)
        except BlockingIOError:
            return
        if not some:
            # A closed pipe is always readable: what is left to wait for is the end of the process.
            time.sleep(0.0005)
            return
        one.data += some


def _finish(one: Running, may_die: Collection[int]) -> None:
    _, status = os.waitpid(one.outcome.pid, 0)
    one.ended = True
    if os.WIFSIGNALED(status):
        one.outcome.signal = os.WTERMSIG(status)
    elif one.data:
        one.outcome.value, one.outcome.error, one.outcome.seconds = pickle.loads(bytes(one.data))
    elif one.outcome.rank not in may_die:
        one.outcome.error = f"ended with status {os.WEXITSTATUS(status)} and without a result"


def _dump_stacks(running: list[Running]) -> None:
    for one in running:
        if not one.ended:
            one.outcome.late = True
            os.kill(one.outcome.pid, signal.SIGCONT)
            os.kill(one.outcome.pid, signal.SIGUSR1)
    time.sleep(0.5)


def _judge(outcomes: list[Outcome], may_die: Collection[int], timeout: float) -> None:
    parts = []
    for outcome in outcomes:
        if outcome.late:
            parts.append(f"rank {outcome.rank} (pid {outcome.pid}) was still running; its stacks are in its output")
        elif outcome.signal and outcome.rank not in may_die:
            parts.append(
                f"rank {outcome.rank} (pid {outcome.pid}) died of signal {signal.Signals(outcome.signal).name}"
            )
        elif outcome.error:
            parts.append(f"rank {outcome.rank} (pid {outcome.pid}) raised\n{outcome.error}")
        else:
            continue
        if outcome.output:
            parts.append(f"rank {outcome.rank} wrote\n{outcome.output[-8000:]}")
    if parts:
        raise RanksFailed("\n\n".join(parts))

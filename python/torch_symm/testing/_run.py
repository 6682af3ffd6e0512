"""Forks the ranks of a case, waits for them with a limit, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from torch_symm.launch.ranks import Forked

from . import _rank
from ._rank import Order
from ._report import DUMPED, Ending
from ._report import describe as report

#: How many seconds the other ranks have to end after the first has failed.
GRACE_S = 8.0
#: How many seconds ranks have to print their stacks.
STACKS_S = 0.5


class RanksFailedError(AssertionError):
    """A rank of a case failed, died or did not end. The text has its number, the line, and the state of the others."""


class Results(list[Any]):
    """The function's results by rank; ``None`` for ranks that ended as expected without returning.

    ``logs``: each rank's output. ``seconds``: from the first fork until the last rank had ended.
    """

    logs: list[str]
    seconds: float


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str | None = "symm",
    timeout: float = 60.0,
    group_timeout: float = 60.0,
    expect_killed: Collection[int] = (),
    expect_gone: Collection[int] = (),
    env: dict[str, str] | None = None,
) -> Results:
    """Calls ``fn(rank, world_size, *args)`` in ``world_size`` processes forked from this one; returns the results.

    Args:
        backend: of the default group, which is made before ``fn`` and destroyed after it, without a port; ``None``: no
            group.
        timeout: seconds for the whole case; the remaining ranks then print their stacks and are killed.
        group_timeout: the timeout of the group in seconds.
        expect_killed: ranks that must die of SIGKILL.
        expect_gone: ranks that may end in any way.
        env: of the ranks, in addition to this process's environment.

    The function and its arguments need not be picklable; its result must be.

    Raises:
        RanksFailedError: a rank raised, died or did not end.
        ValueError: ``world_size`` is below 1, or ``timeout`` is not positive.
    """
    if world_size < 1:
        raise ValueError(f"run_ranks: world_size is {world_size}, and must be at least 1")
    if not timeout > 0:
        raise ValueError(f"run_ranks: timeout is {timeout} s, and must be positive")
    start = time.monotonic()
    endings = run_case(
        lambda rank, size: fn(rank, size, *args),
        world_size,
        backend=backend,
        timeout=timeout,
        group_timeout=group_timeout,
        may_end={*expect_killed, *expect_gone},
        env=lambda rank: env or {},
    )
    results = Results([None] * world_size)
    results.seconds = time.monotonic() - start
    results.logs = [ending.log for ending in endings]
    bad = []
    for ending in endings:
        if ending.rank in expect_killed:
            if ending.status != -signal.SIGKILL:
                bad.append(ending.rank)
        elif ending.rank in expect_gone and ending.status is not None:
            continue
        elif ending.failed:
            bad.append(ending.rank)
        elif ending.outcome is not None:
            results[ending.rank] = ending.outcome.value
    if bad:
        printed = {rank: DUMPED.sub("", results.logs[rank])[-4000:] for rank in bad}
        logs = "".join(f"\n\nrank {rank} printed:\n{log}" for rank, log in printed.items() if log)
        raise RanksFailedError(report(endings, bad, expect_killed) + logs)
    return results


def run_case(
    body: Callable[[int, int], Any],
    world_size: int,
    *,
    backend: str | None,
    timeout: float,
    group_timeout: float,
    may_end: Collection[int] = (),
    env: Callable[[int], dict[str, str]] = lambda rank: {},
    describe: Callable[[BaseException], str] | None = None,
    keep_streams: bool = False,
) -> list[Ending]:
    """Runs ``body(rank, world_size)`` on forked ranks and returns how each ended, after all ranks have ended."""
    with tempfile.TemporaryDirectory(prefix="symm-test-", ignore_cleanup_errors=True) as directory:
        folder = Path(directory)
        order = Order(body, world_size, backend, group_timeout, folder, env, describe, keep_streams)
        ranks = _Ranks()
        try:
            for rank in range(world_size):
                ranks.fork(order, rank)
            ranks.wait(timeout, may_end, folder)
        finally:
            ranks.kill()
        return [_ending(folder, ranks, rank) for rank in range(world_size)]


class _Ranks:
    """The ranks of a case until all of them have been reaped."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self.waited = 0.0
        #: Ranks that ran when the time was up. They have not passed, even if they end while they print their stacks.
        self.late: set[int] = set()
        self.forked = Forked()
        self._start = time.monotonic()

    def fork(self, order: Order, rank: int) -> None:
        parent = os.getpid()
        self.pids.append(self.forked.fork(lambda: _rank.serve(order, rank, parent)))

    def wait(self, timeout: float, may_end: Collection[int], folder: Path) -> None:
        """Returns when all ranks have ended or the time is up, after asking the remaining ones for their stacks.

        In the ranks' ``folder``, a rank that has ended counts as arrived where the others wait before they leave.
        """
        since, deadline = self._start, self._start + timeout
        while self.forked.running and (left := deadline - time.monotonic()) > 0:
            for pid in self.forked.wait(left):
                rank = self.pids.index(pid)
                _rank.arrival(folder, _rank.LEAVING, rank).touch()
                if self.forked.status[pid] != 0 and rank not in may_end and time.monotonic() + GRACE_S < deadline:
                    since, deadline = time.monotonic(), time.monotonic() + GRACE_S
        self.forked.wait(0)
        self.waited = time.monotonic() - since
        self.late = set(self.forked.running)
        for pid in self.forked.running:
            # A stopped rank must print its stacks before it continues.
            os.kill(pid, signal.SIGUSR1)
            os.kill(pid, signal.SIGCONT)
        if self.forked.running:
            time.sleep(STACKS_S)
            self.forked.wait(0)

    def kill(self) -> None:
        """Kills the remaining ranks and all children of ranks, and removes the shared memory of the killed ranks."""
        left = self.forked.running
        for pid in left:
            # Stop the rank first, so that it maps and forks nothing more.
            os.kill(pid, signal.SIGSTOP)
        # A rank inherits the mappings of this process, such as those of a fixture.
        memory = {path for pid in left for path in _shared_memory(pid)} - _shared_memory(os.getpid())
        self.forked.end()
        for path in memory:
            with contextlib.suppress(OSError):
                if path.stat().st_ctime >= time.time() - (time.monotonic() - self._start) - 1:
                    path.unlink()


def _shared_memory(pid: int) -> set[Path]:
    """Returns the files of /dev/shm that a process has mapped."""
    with contextlib.suppress(OSError):
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        return {
            Path(path) for path in re.findall(r" (/dev/shm/[^\n]+)$", maps, re.MULTILINE) if "(deleted)" not in path
        }
    return set()


def _ending(folder: Path, ranks: _Ranks, rank: int) -> Ending:
    def text(name: str) -> str:
        with contextlib.suppress(OSError):
            return (folder / f"{name}-{rank}").read_text(errors="replace")
        return ""

    outcome = None
    with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
        # Safe to unpickle: a process that this process forked wrote the file, in a directory of mode 0700.
        outcome = pickle.loads((folder / f"outcome-{rank}").read_bytes())
    # A rank that has an outcome without this file has not used symm.
    calls = text("calls").splitlines() if outcome or (folder / f"calls-{rank}").exists() else None
    status = ranks.forked.status.get(ranks.pids[rank])
    if ranks.pids[rank] in ranks.late and not (outcome and outcome.kind == "failed"):
        status = None
    return Ending(rank, ranks.pids[rank], status, outcome, text("log"), calls, text("stacks"), ranks.waited)

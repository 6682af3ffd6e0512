"""Runs ranks as processes that may exit, hang or raise, and collects the observations of each."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable
from datetime import timedelta
from functools import partial
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch_symm.launch.ranks import Forked
from torch_symm.tools.doctor.smoke_test import free_port

from . import resource_leaks
from .case import CRASH, GONE, HANG, RIGHT, WRONG, Case, Outcome, Promise, Saw, add

WORLD = 4
#: The line that a rank logs when a group fails.
DUMPED = re.compile(r"^.*the last calls of this process are in .*; for those of all ranks: .*\n", re.MULTILINE)
#: Number of nodes, 1 or 2, which are all this machine; each of two has half of the ranks.
NODES = 1


#: Number of ranks on each node, node "a" first; empty: all are on one.
Layout = tuple[int, ...]


def node_of(rank: int, layout: Layout) -> str:
    """The name of a rank's node."""
    return "".join(name * count for name, count in zip("abcd", layout, strict=False))[rank]


def placed(rank: int, world: int, layout: Layout = ()) -> dict[str, str]:
    """Settings of a rank that place it on its node."""
    layout = layout or ((world // 2, world - world // 2) if NODES > 1 else ())
    if not layout:
        return {}
    return {"SYMM_INTER_NODE_BACKEND": "gloo", "SYMM_TEST_NODE": node_of(rank, layout), "GLOO_SOCKET_IFNAME": "lo"}


class Stage:
    """The shared state of the ranks of one run; created before they are forked."""

    def __init__(
        self, side: str, world: int, place: Path, timeout: float, port: int | None = None, layout: Layout = ()
    ) -> None:
        self.side = side
        self.world = world
        self.layout = layout
        self.place = place
        self.timeout = timeout
        self.port = port
        self._store: dist.Store | None = None
        # The time of the fault, by the clock that all processes share.
        self._moment = RawArray("d", 1)
        self.pids = RawArray("i", world)

    def now_it_happens(self) -> None:
        """Marks the time from which survivors are timed."""
        self._moment[0] = time.monotonic()

    @property
    def since(self) -> float:
        """Seconds since the time that ``now_it_happens`` marked."""
        return time.monotonic() - self._moment[0] if self._moment[0] else 0.0

    def join(self, rank: int, world: int | None = None, name: str = "default", timeout: float | None = None) -> None:
        """``init_process_group`` over a fresh FileStore of torch's, or over the TCPStore if one was opened."""
        world = self.world if world is None else world
        dist.init_process_group(
            self.side,
            store=self._store or dist.FileStore(str(self.place / f"store-{name}"), world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=self.timeout if timeout is None else timeout),
        )

    def open_store(self, rank: int) -> None:
        """Opens torch's TCPStore if requested, before a rank's resources are counted, since torch keeps it open."""
        if self.port is not None:
            limit = timedelta(seconds=self.timeout)
            self._store = dist.TCPStore("127.0.0.1", self.port, self.world, rank == 0, timeout=limit)

    def meet(self, name: str, rank: int, others: Iterable[int], limit: float = 30.0) -> bool:
        """Returns true if all of ``others`` have also arrived here before the limit; needs no group."""
        (self.place / f"meet-{name}-{rank}").touch()
        deadline = time.monotonic() + limit
        while not all((self.place / f"meet-{name}-{r}").exists() for r in others):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def log(self, rank: int) -> str:
        """The output of a rank, without the path of its trace."""
        path = self.place / f"log-{rank}"
        return DUMPED.sub("", path.read_text(errors="replace")) if path.exists() else ""

    def bystander(self, seconds: float) -> None:
        """Forks a child that holds what this process holds and does nothing."""
        pid = os.fork()
        if pid == 0:
            time.sleep(seconds)
            os._exit(0)
        self.spare(pid)

    def spare(self, pid: int) -> None:
        """Marks a child that may outlive its rank, so that it does not count as a leftover."""
        (self.place / f"bystander-{pid}").touch()

    @property
    def backend(self) -> Any:
        """The backend of the default group."""
        return dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[attr-defined]

    def shorten(self, seconds: float) -> None:
        """Sets this timeout for later calls of the default group; it did not apply to joining."""
        self.backend._set_default_timeout(timedelta(seconds=seconds))

    def later(self, seconds: float, act: Callable[[], object]) -> threading.Thread:
        """Starts a thread that marks the time of the fault ``seconds`` from now, and acts."""

        def wait() -> None:
            time.sleep(seconds)
            self.now_it_happens()
            act()

        thread = threading.Thread(target=wait)
        thread.start()
        return thread

    def observe(self, call: Callable[[], object]) -> Saw:
        """Makes a call that should fail, or return ``True`` or ``None``."""
        begun = time.monotonic()
        try:
            answer = call()
        except Exception as error:
            return Saw(type(error).__name__, str(error), self.since or time.monotonic() - begun)
        seconds = self.since or time.monotonic() - begun
        return (
            Saw(RIGHT, "", seconds)
            if answer in (None, True)
            else Saw(WRONG, "it returned as if all were well", seconds)
        )


Body = Callable[[Stage, int], Saw | None]


def play(
    body: Body,
    side: str,
    *,
    world: int = WORLD,
    timeout: float = 10.0,
    limit: float = 30.0,
    join: bool = True,
    victims: Collection[int] = (),
    before: Callable[[Path], None] | None = None,
    env: dict[str, str] | None = None,
    over_tcp: bool = False,
    layout: Layout = (),
) -> Outcome:
    """Runs ``body`` on forked ranks and returns what each rank saw, except victims.

    ``timeout``: of the group. ``limit``: seconds for everything; a rank that has not exited by then hangs. ``join``:
    whether the ranks make the default group first. ``before`` gets the directory of the play before the ranks start.
    ``over_tcp``: the default group's store is torch's TCPStore, as under torchrun; its FileStore polls only every 10
    ms. ``layout``: the number of ranks on each of several nodes.
    """
    world = sum(layout) or world
    with resource_leaks.fresh_folder() as place, resource_leaks.adopting_orphans():
        for name in ("tmp", "run"):
            (place / name).mkdir(0o700)
        if before is not None:
            before(place)
        stage = Stage(side, world, place, timeout, free_port() if over_tcp else None, layout)
        names, adopted = resource_leaks.shared_names(), resource_leaks.children()
        deadline = time.monotonic() + limit
        forked = Forked()
        pids = [forked.fork(partial(_rank, stage, body, rank, join, env or {})) for rank in range(world)]
        statuses = _await(forked, pids, deadline, victims)
        outcome = Outcome(pids=dict(enumerate(pids)))
        bystanders = {int(path.name.rpartition("-")[2]) for path in place.glob("bystander-*")}
        outcome.left["processes"] += resource_leaks.end_orphans(adopted, bystanders)
        outcome.left["files"] += len(resource_leaks.left_names(names))
        outcome.left["files"] += sum(1 for name in ("tmp", "run") for _ in (place / name).iterdir())
        for rank in range(world):
            if rank in victims:
                continue
            saw = outcome.saw[rank] = _report(stage, rank, statuses[rank])
            outcome.left.update(saw.left)
            for name, value in saw.figures.items():
                outcome.figures[name] = max(outcome.figures.get(name, value), value)
        outcome.left = +outcome.left
        return outcome


def _rank(stage: Stage, body: Body, rank: int, join: bool, env: dict[str, str]) -> None:
    log = os.open(stage.place / f"log-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - as long as the process
    signal.setitimer(signal.ITIMER_REAL, 0)
    os.environ.update(TMPDIR=str(stage.place / "tmp"), XDG_RUNTIME_DIR=str(stage.place / "run"), **env)
    os.environ.update(placed(rank, stage.world, stage.layout))
    tempfile.tempdir = None
    torch.set_num_threads(1)
    stage.pids[rank] = os.getpid()
    stage.open_store(rank)
    had = resource_leaks.own()
    saw: Saw | None = None
    if join:
        # Without this wait, the group's timeout would include the time until the other ranks are forked.
        stage.meet("forked", rank, range(stage.world))
        saw = stage.observe(lambda: stage.join(rank))
    if saw is None or saw.kind == RIGHT:
        try:
            saw = body(stage, rank) or Saw(RIGHT)
        except Exception as error:
            saw = Saw(type(error).__name__, str(error), stage.since)
    # Written before this rank leaves the group, because leaving may crash or hang.
    (stage.place / f"saw-{rank}").write_bytes(pickle.dumps(saw))
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
    saw.left = dict(resource_leaks.beyond(had))
    (stage.place / f"saw-{rank}").write_bytes(pickle.dumps(saw))
    os._exit(0)


def _await(forked: Forked, pids: list[int], deadline: float, victims: Collection[int]) -> list[int | None]:
    """Exit codes, negative for signals; ``None`` for processes that never exited. Waits only briefly for victims."""
    while forked.running and (left := deadline - time.monotonic()) > 0:
        if {pids.index(pid) for pid in forked.running} <= set(victims):
            left, deadline = min(left, 0.5), min(deadline, time.monotonic() + 0.5)
        forked.wait(left)
    forked.end()
    return [forked.status.get(pid) for pid in pids]


def _report(stage: Stage, rank: int, code: int | None) -> Saw:
    saw = None
    with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
        saw = pickle.loads((stage.place / f"saw-{rank}").read_bytes())
    log = stage.log(rank)
    if code is None:
        return Saw(HANG, log[-400:])
    if code < 0:
        return Saw(CRASH, f"{signal.Signals(-code).name}: {log[-400:]}")
    saw = saw or Saw(GONE, f"exit code {code}: {log[-400:]}")
    saw.log = log
    return saw


def scene(
    name: str,
    row: str,
    target: str,
    promise: Promise,
    note: str = "",
    sides: tuple[str, ...] = ("gloo", "symm"),
    where: str = "one",
    **settings: Any,
) -> Callable[[Body], Body]:
    """Makes a case of the body below, played with these settings of ``play``; on several nodes if it has a layout."""

    def register(body: Body) -> Body:
        place = "nodes" if settings.get("layout") else where
        add(Case(name, row, partial(play, body, **settings), promise, target, note, sides, place))
        return body

    return register

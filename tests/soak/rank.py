"""One process of the run: runs a rank in each round, checks each result and each failure, counts its resources."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import calls
import draw
import faults
import torch
import torch.distributed as dist
import torch_symm
from calls import Place, Started
from ranks import log_to
from table import ARRIVED, JOINING, LEAVING, PID, STORMING, STRUCK, Table

#: Failures of a group or of a call; anything else that a call raises is a bug.
TYPED = (
    torch_symm.SymmPeerError,
    torch_symm.SymmTimeoutError,
    torch_symm.SymmMismatchError,
    torch_symm.SymmAbortedError,
    torch_symm.SymmConfigError,
)


@dataclass
class Failure:
    """An exception of a call, and its timestamps."""

    error: BaseException
    where: str
    began: float
    called: float
    raised: float


@dataclass
class Outcome:
    """The report of a successful round to the supervisor."""

    calls: int = 0
    bytes: int = 0
    #: Seconds between a fault, or the end of a timeout, and its exception.
    noticed: list[float] = field(default_factory=list)
    leaving: float = 0.0
    rejoining: float = 0.0
    held: dict[str, int] = field(default_factory=dict)


class Round:
    """A round from the view of one rank."""

    def __init__(self, program: draw.Program, rank: int, table: Table, folder: Path, device: torch.device) -> None:
        self.program = program
        self.rank = rank
        self.table = table
        self.folder = folder
        self.device = device
        self.places: list[Place | None] = []
        self.threads: list[threading.Thread] = []
        self.outcome = Outcome()
        self.victim = rank in program.fault.victims

    def play(self) -> Outcome:
        program, fault = self.program, self.program.fault
        self.table.put(self.rank, PID, os.getpid())
        # Opened before ranks may be stopped, because others wait without limit for a file lock that such a rank holds.
        store = open_store(program.store, self._place_of_store("first"), self.rank, program.world, self._limit)
        self.table.meet(self.rank, range(program.world), 1)
        failure = self._join(store)
        del store
        pending: deque[Started] = deque()
        if failure is None:
            if fault.phase != "join":
                self._run(program.before)
                # Messages between others may still be in progress when this rank has finished its own.
                self.table.meet(self.rank, range(program.world), 2)
            failure = self._storm(pending)
        if fault.kind not in draw.HARMLESS:
            self._aftermath(failure, pending)
        self._leave()
        self._again()
        return self.outcome

    @property
    def _limit(self) -> timedelta:
        return timedelta(seconds=self.program.timeout)

    def _place_of_store(self, name: str) -> Path:
        return self.folder / f"store-{name}"

    def _join(self, store: Any) -> Failure | None:
        """Makes the groups; returns a failure that the fault explains."""
        program, limit = self.program, self._limit
        self.table.mark(self.rank, JOINING)
        began = time.monotonic()
        try:
            init(store, self.rank, program.world, limit)
            self.places.append(self._place(dist.group.WORLD, 0))
            for number, members in enumerate(program.groups[1:], 1):
                began = time.monotonic()
                group = dist.new_group(list(members), timeout=limit)
                self.places.append(self._place(group, number) if self.rank in members else None)
        except faults.JOINING as error:
            if program.fault.phase != "join":
                raise
            return Failure(error, "joining", began, began, time.monotonic())
        return None

    def _place(self, group: Any, number: int) -> Place:
        members = self.program.groups[number]
        return Place(group, members, members.index(self.rank), self.device, self.program.timeout)

    def _mine(self, run: tuple[draw.Call, ...]) -> Iterator[tuple[Place, draw.Call]]:
        for call in run:
            if (place := self.places[call.group]) is not None:
                yield place, call

    def _run(self, run: tuple[draw.Call, ...]) -> None:
        """Makes all calls of ``run``; each is awaited after some more were started."""
        own: deque[Started] = deque()
        for place, call in self._mine(run):
            own.append(calls.begin(place, call))
            while own and len(own) > own[0].call.linger:
                self._finish(own.popleft())
        while own:
            self._finish(own.popleft())

    def _finish(self, started: Started) -> None:
        started.finish()
        self.outcome.calls += 1
        self.outcome.bytes += started.bytes

    def _storm(self, pending: deque[Started]) -> Failure | None:
        """Makes the calls during the fault: once if no rank may notice it, otherwise repeatedly until one fails."""
        program, fault = self.program, self.program.fault
        mine = list(self._mine(program.storm))
        if not mine and fault.kind not in draw.HARMLESS:
            return None
        if fault.kind == "kill with a child" and self.victim:
            faults.leave_child(self)
        self.table.mark(self.rank, STORMING)
        if fault.kind in draw.HARMLESS:
            self._harmless()
            return None
        for number in count():
            if number == fault.at and (failed := self._strike()) is not None:
                return failed
            place, call = mine[number % len(mine)]
            if failed := self._attempt(place, call, pending):
                return failed
        raise AssertionError

    def _harmless(self) -> None:
        fault, storm = self.program.fault, self.program.storm
        half = min(fault.at, len(storm))
        self._run(storm[:half])
        if self.victim and not fault.phase:
            faults.act(self)
        self._run(storm[half:])

    def _strike(self) -> Failure | None:
        """Makes the call at which the victims act."""
        fault = self.program.fault
        began = time.monotonic()
        self.table.put(self.rank, ARRIVED, began)
        try:
            if self.victim and not fault.phase:
                faults.act(self)
            elif fault.kind in ("mismatch", "argument"):
                faults.agreed(self)
        except Exception as error:
            return Failure(error, "strike", began, began, time.monotonic())
        if self.victim and fault.kind == "leave" and fault.variant != "thread":
            return Failure(torch_symm.SymmAbortedError("left"), "leaving", began, began, time.monotonic())
        return None

    def _attempt(self, place: Place, call: draw.Call, pending: deque[Started]) -> Failure | None:
        began = called = time.monotonic()
        where = str(call)
        try:
            pending.append(calls.begin(place, call))
            pending[-1].began = began
            while pending and len(pending) > pending[0].call.linger:
                first = pending.popleft()
                began, called, where = first.began, time.monotonic(), f"waiting for {first.call}"
                first.wait()
                first.check()
                self.outcome.calls += 1
                self.outcome.bytes += first.bytes
        except AssertionError:
            raise
        except Exception as error:
            return Failure(error, where, began, max(called, place.called), time.monotonic())
        return None

    def _aftermath(self, failure: Failure | None, pending: deque[Started]) -> None:
        """Checks that every rank has noticed and named the fault, and that groups without a victim still work."""
        program, fault = self.program, self.program.fault
        for thread in self.threads:
            thread.join(faults.LIMIT)
            assert not thread.is_alive(), f"{fault.kind} from a thread does not return"
        if failure is not None:
            self._judge(failure)
        if self.rank not in program.survivors:
            time.sleep(60)
        gone = fault.kind == "leave" and fault.variant == "all" and self.victim
        # A rank that was only stopped may join groups that others joined before they timed out.
        joining = fault.kind == "stop joining" and failure is not None and failure.where == "joining"
        if not gone and not joining:
            self._others_fail_too(failure, pending)
        self.table.meet(self.rank, program.survivors, 3)
        if failure is not None:
            self._note(failure)
        if fault.phase != "join":
            survivors = set(program.survivors)
            left = set(fault.victims) if fault.kind == "leave" and fault.variant == "all" else set()
            for number, place in enumerate(self.places):
                members = set(program.groups[number])
                if place is not None and not program.spoiled(number) and members <= survivors - left:
                    for call in program.after:
                        root = call.root % place.size
                        self._finish(calls.begin(place, draw.moved(call, number, root)))
        self.table.meet(self.rank, program.survivors, 4)

    def _others_fail_too(self, failure: Failure | None, pending: deque[Started]) -> None:
        fault = self.program.fault
        limit = faults.LIMIT
        for started in pending:
            began = time.monotonic()
            try:
                started.wait()
            except TYPED as error:
                self._judge(Failure(error, f"pending {started.call}", began, began, time.monotonic()))
            taken = time.monotonic() - began
            assert taken < limit, f"{started.call}, pending when {fault.kind} was noticed, took {taken:.2f} s to fail"
        pending.clear()
        if fault.kind == "argument" and self.victim:
            return
        for number, place in enumerate(self.places):
            if place is None or not self.program.spoiled(number):
                continue
            began = time.monotonic()
            try:
                dist.barrier(group=place.group)
            except TYPED as error:
                failed = Failure(error, f"a barrier of group {number}", began, began, time.monotonic())
                self._judge(failed)
                assert failed.raised - began < faults.LIMIT, (
                    f"{failed.where} took {failed.raised - began:.2f} s to fail"
                )
            else:
                raise AssertionError(f"a barrier of group {number} succeeds after {fault.kind}")

    def _judge(self, failure: Failure) -> None:
        """Fails unless the error is the one that the fault must cause on this rank."""
        fault, text = self.program.fault, str(failure.error)
        felt = self.victim and fault.kind in faults.FELT
        if fault.kind == "argument" and failure.where.startswith("pending"):
            # The rejected call made the group fail, on this rank as on others, while an earlier call was in progress.
            felt = False
        types = faults.FELT[fault.kind] if felt else faults.HEARD[fault.kind]
        if failure.where == "joining":
            types = faults.JOINING
        about = f"{failure.where}: {type(failure.error).__name__}: {text}"
        if not isinstance(failure.error, types):
            raise AssertionError(f"after {fault}, not one of {types}: {about}") from failure.error
        if felt or failure.where == "joining":
            return
        pids = [int(self.table.get(victim, PID)) for victim in fault.victims]
        if not any(re.search(rf"pid {pid}\b", text) for pid in pids):
            raise AssertionError(f"after {fault}, does not name {pids}: {about}") from failure.error
        if not self.victim and faults.WORDS.get(fault.kind, "") not in text:
            raise AssertionError(f"after {fault}, does not say {faults.WORDS[fault.kind]!r}: {about}")

    def _note(self, failure: Failure) -> None:
        """Records how long the failure took to be noticed."""
        program, fault = self.program, self.program.fault
        if self.victim and fault.kind in faults.FELT:
            return
        if fault.kind in ("mismatch", "argument"):
            members = program.groups[fault.group]
            since = max(self.table.get(rank, ARRIVED) for rank in members)
        elif fault.kind in draw.SLOW:
            since = max(failure.began + program.timeout, failure.called)
            if self.victim:
                return
        else:
            struck = [self.table.get(victim, STRUCK) for victim in fault.victims]
            since = max(failure.called, min(struck))
        seconds = max(failure.raised - since, 0.0)
        self.outcome.noticed.append(seconds)
        limit = faults.LIMIT + (program.timeout + 1 if fault.phase == "join" else 0.0)
        assert seconds < limit, f"{fault} was noticed after {seconds:.2f} s in {failure.where}: {failure.error}"

    def _leave(self) -> None:
        program = self.program
        self.table.mark(self.rank, LEAVING)
        began = time.monotonic()
        if dist.is_initialized():
            if program.ending == "one by one":
                for place in reversed(self.places[1:]):
                    if place is not None:
                        dist.destroy_process_group(place.group)
            if program.ending == "abort" and program.fault.kind not in draw.HARMLESS:
                dist.distributed_c10d._abort_process_group()
            else:
                dist.destroy_process_group()
        self.outcome.leaving = time.monotonic() - began
        self.places.clear()
        if self.rank not in program.survivors:
            time.sleep(60)
        limit = faults.LIMIT + 1 if program.fault.kind not in draw.HARMLESS else faults.LIMIT + 8
        assert self.outcome.leaving < limit, f"leaving took {self.outcome.leaving:.2f} s after {program.fault}"

    def _again(self) -> None:
        """Makes a new group of the survivors, and checks that it works."""
        members = self.program.survivors
        self.table.meet(self.rank, members, 5)
        me = members.index(self.rank)
        began = time.monotonic()
        limit = timedelta(seconds=40)
        init(open_store("file", self._place_of_store("again"), me, len(members), limit), me, len(members), limit)
        self.places.append(Place(dist.group.WORLD, range(len(members)), me, self.device, 40))
        dist.barrier()
        self.outcome.rejoining = time.monotonic() - began
        for call in self.program.after:
            self._finish(calls.begin(self.places[0], draw.moved(call, 0, call.root % len(members))))
        dist.destroy_process_group()
        self.places.clear()


def open_store(kind: str, place: Path, rank: int, world: int, limit: timedelta) -> Any:
    """Returns a store of this kind, or the URL of one."""
    if kind == "url":
        return f"symm+file://{place}"
    if kind == "file":
        return torch_symm.FileStore(place, world)
    if kind == "torch":
        return dist.FileStore(str(place), world)
    return torch_symm.TCPStore(f"unix:{place}", 0, world, is_master=rank == 0, timeout=limit)


def init(store: Any, rank: int, world: int, limit: timedelta) -> None:
    """Makes the default group with this store."""
    where = {"init_method" if isinstance(store, str) else "store": store}
    dist.init_process_group("symm", rank=rank, world_size=world, timeout=limit, **where)


def held() -> dict[str, int]:
    """Returns the resources of this process, which has no group at this time."""
    gc.collect()
    # Memory that the allocator caches does not count.
    ctypes.CDLL(None).malloc_trim(0)
    # The thread that watched the peers exits on its own once no group needs it.
    deadline = time.monotonic() + 1
    while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < deadline:
        time.sleep(0.002)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings of groups": Path("/proc/self/maps").read_text().count("memfd:symm"),
        "resident KiB": resident >> 10,
    }


def serve(process: int, orders: Any, table: Table, folder: Path, log: Path, device: str) -> None:
    """Runs the rounds that the supervisor requests until it sends ``None``."""
    log_to(log)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    where = torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(process)
        where = torch.device("cuda", process)
    answer: Callable[[Any], None] = orders.send
    while (requested := orders.recv()) is not None:
        seed, number, world, only = requested
        program = draw.program(seed, number, world, only)
        rank = program.order.index(process)
        try:
            outcome = Round(program, rank, table, folder / f"round-{number}", where).play()
            # The failures, whose tracebacks refer to groups, are dropped only now.
            outcome.held = held()
            answer(outcome)
        except BaseException:
            answer(f"rank {rank} (process {process}, pid {os.getpid()}):\n{traceback.format_exc()}")
    os._exit(0)

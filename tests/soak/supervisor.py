"""Keeps the processes of the ranks, sends the signals of a round, and never waits past a deadline."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import draw
import rank
from table import CHILD, JOINING, LEAVING, PID, STORMING, STRUCK, Table
from torch_symm.launch.ranks import Forked

#: Seconds for a round; the longest wait in one is a timeout of about 3 s, twice.
DEADLINE = 90.0
#: Seconds that others have to exit after one has found an error.
GRACE = 4.0
PR_SET_CHILD_SUBREAPER = 36
MARKS = {"join": JOINING, "storm": STORMING, "leave": LEAVING}


class Violation(Exception):
    """A promise was broken; the text has all known details."""


class Supervisor:
    """The processes of a run."""

    def __init__(self, world: int, folder: Path, device: str) -> None:
        self.world = world
        self.folder = folder
        self.device = device
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        os.environ["TMPDIR"] = str(self.temporary)
        # Dumps of the flight recorder are meant to stay.
        os.environ["SYMM_TRACE_DIR"] = str(folder / "traces")
        # Without this, a call on a GPU returns before it has failed.
        os.environ["SYMM_BLOCKING_WAIT"] = "1"
        self.table = Table(world)
        self.shared = _shared()
        self.forked = Forked()
        self.pids = [0] * world
        self.orders: list[Any] = [None] * world
        # Adopts the children of killed ranks, so that none is overlooked.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def play(self, seed: int, number: int, only: str) -> tuple[draw.Program, dict[int, rank.Outcome]]:
        """Runs one round; returns the outcome of each living process."""
        program = draw.program(seed, number, self.world, only)
        place = self.folder / f"round-{number}"
        place.mkdir()
        self.table.clear()
        for process in range(self.world):
            self._start(process)
            self.orders[process].send((seed, number, self.world, only))
        try:
            answers = self._watch(program)
        except Violation as violation:
            raise Violation(f"{violation}\n{self._stacks()}") from None
        self._check_ends(program)
        shutil.rmtree(place)
        self._check_remains()
        return program, answers

    def _start(self, process: int) -> None:
        if self._is_alive(process):
            return
        if self.pids[process]:
            self.orders[process].close()
        self.orders[process], theirs = Pipe()
        log = self.folder / f"log-{process}"
        arguments = (process, theirs, self.table, self.folder, log, self.device)
        self.pids[process] = self.forked.fork(lambda: rank.serve(*arguments))
        theirs.close()

    def _is_alive(self, process: int) -> bool:
        self.forked.wait(0)
        return self.pids[process] in self.forked.running

    def _watch(self, program: draw.Program) -> dict[int, rank.Outcome]:
        """Waits until every rank that should live has answered; sends signals meanwhile."""
        answers: dict[int, rank.Outcome] = {}
        wrong: list[str] = []
        deadline = time.monotonic() + DEADLINE
        expected = {program.order[r] for r in program.survivors}
        doomed = {program.order[r] for r in program.fault.victims} if program.fault.kind in draw.LETHAL else set()
        pending = self._signals(program)
        while True:
            now = time.monotonic()
            pending = [(due, send) for due, send in pending if not self._sent(due(), now, send)]
            for process in range(self.world):
                if (answer := self._answer(process)) is not None:
                    if isinstance(answer, str):
                        wrong.append(answer)
                        deadline = min(deadline, now + GRACE)
                    else:
                        answers[process] = answer
                elif process in expected - answers.keys() and not self._is_alive(process):
                    wrong.append(f"process {process} ended with {self.forked.status[self.pids[process]]}")
                    deadline = min(deadline, now + GRACE)
                    expected = expected - {process}
            ended = not any(map(self._is_alive, doomed))
            if not wrong and not pending and expected <= answers.keys() and ended:
                return answers
            if wrong and len(wrong) + len(answers) >= self.world - len(doomed):
                raise Violation("\n".join(wrong))
            if now > deadline:
                missing = sorted(expected - answers.keys())
                raise Violation("\n".join([*wrong, f"processes {missing} have not finished the round"]))
            time.sleep(0.0005)

    def _answer(self, process: int) -> Any:
        """An outcome, or a text that describes an error; ``None`` if there is neither yet."""
        try:
            return self.orders[process].recv() if self.orders[process].poll() else None
        except (EOFError, ConnectionResetError):
            return None

    def _signals(self, program: draw.Program) -> list[tuple[Callable[[], float | None], Callable[[], None]]]:
        """Signals and their times; a time is unknown until the victim has started the phase."""
        fault = program.fault
        if not fault.phase:
            return []
        signals: list[tuple[Callable[[], float | None], Callable[[], None]]] = []
        for victim in fault.victims:

            def due(victim: int = victim) -> float | None:
                begun = self.table.get(victim, MARKS[fault.phase])
                return begun + fault.delay if begun else None

            def resume(victim: int = victim) -> float | None:
                # Counted from the signal, which may have been late. A shorter stop may have no effect.
                struck = self.table.get(victim, STRUCK)
                return struck + fault.seconds if struck else None

            def send(number: int, victim: int = victim) -> None:
                self.table.mark(victim, STRUCK)
                os.kill(int(self.table.get(victim, PID)), number)

            if fault.kind.startswith("kill"):
                signals.append((due, lambda send=send: send(signal.SIGKILL)))
            else:
                signals.append((due, lambda send=send: send(signal.SIGSTOP)))
                signals.append((resume, lambda send=send: send(signal.SIGCONT)))
        return signals

    @staticmethod
    def _sent(due: float | None, now: float, send: Callable[[], None]) -> bool:
        if due is None or now < due:
            return False
        send()
        return True

    def _check_ends(self, program: draw.Program) -> None:
        fault = program.fault
        if fault.kind in draw.LETHAL:
            codes = {"code 0": 0, "code 3": 3, "in order": 0, "segfault": -signal.SIGSEGV}
            wanted = codes[fault.variant] if fault.kind == "exit" else -signal.SIGKILL
            for victim in fault.victims:
                status = self.forked.status[self.pids[program.order[victim]]]
                if status != wanted:
                    raise Violation(f"rank {victim} ended with {status}, should be {wanted}")
        for number in range(self.world):
            if child := int(self.table.get(number, CHILD)):
                os.kill(child, signal.SIGKILL)
        self._reap()

    def _reap(self) -> None:
        """Reaps children of ranks that have exited."""
        own = set(self.forked.running)
        deadline = time.monotonic() + 5
        while leftovers := set(_children()) - own:
            for leftover in leftovers:
                os.waitpid(leftover, os.WNOHANG)
            if time.monotonic() > deadline:
                raise Violation(f"processes {leftovers} were left by their ranks")

    def _check_remains(self) -> None:
        if left := [entry.name for entry in self.temporary.iterdir()]:
            raise Violation(f"left in TMPDIR: {left}")
        if left := sorted(name for name in _shared() - self.shared if "symm" in name and not self._of_others(name)):
            raise Violation(f"left in /dev/shm: {left}")

    def _of_others(self, name: str) -> bool:
        """Returns true if a name has the pid of a process that runs, such as one of a concurrent test."""
        pid = re.search(r"\d+", name)
        return pid is not None and int(pid[0]) not in self.pids and Path(f"/proc/{pid[0]}").exists()

    def _stacks(self) -> str:
        self.forked.wait(0)
        for pid in self.forked.running:
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGUSR1)
        time.sleep(1)
        logs = [(number, self.folder / f"log-{number}") for number in range(self.world)]
        return "\n".join(f"--- process {n}\n{log.read_text()[-6000:]}" for n, log in logs if log.exists())

    def close(self) -> None:
        """Ends all processes."""
        for process in filter(self._is_alive, range(self.world)):
            with suppress(OSError):
                self.orders[process].send(None)
        until = time.monotonic() + 2
        while self.forked.running and time.monotonic() < until:
            self.forked.wait(until - time.monotonic())
        self.forked.end()


def _children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def _shared() -> set[str]:
    place = Path("/dev/shm")
    return {entry.name for entry in place.iterdir()} if place.exists() else set()

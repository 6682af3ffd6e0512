"""One rank process: makes the sides, walks through the cells; rank 0 reports to the launcher."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.queues import Queue
from typing import TypeAlias

import torch
import torch.distributed as dist

from ..ops import DTYPES
from ..record import Cell
from .calls import OPS, Call, Setting
from .clock import GpuClock, HostClock
from .inputs import Inputs
from .meeting import Meeting
from .record import Absent, Figure, Measured
from .sides import CPU_SIDES, GPU_SIDES, GROUP_TIMEOUT, NotThere, Side

FEW_TURNS = 3
LARGE = 4 << 20
MANY_CALLS, FEW_CALLS = 20, 5
HOST_SIZE = 64 << 10
HOST_TURNS = 5

Message: TypeAlias = Absent | Measured


@dataclass(frozen=True)
class Task:
    """What all ranks do. ``deadline`` by ``time.monotonic()``: when the run is late for it, turns become few."""

    world: int
    device: str
    sides: tuple[str, ...]
    cells: tuple[Cell, ...]
    rendezvous: str
    seconds: float
    turns: int


def calls_for(size: int) -> int:
    """Calls per graph, and per eager loop."""
    return MANY_CALLS if size < LARGE else FEW_CALLS


def turns_for(wanted: int, elapsed: float, budget: float, done: int, total: int) -> int:
    """Turns of the next cell: few when the run is behind its budget, of which the first tenth is granted to start."""
    behind = elapsed > budget * (0.1 + 0.9 * done / max(1, total))
    return min(wanted, FEW_TURNS) if behind else wanted


def main(rank: int, task: Task, meeting: Meeting, results: Queue[Message]) -> None:
    """Entry point of a rank process."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    if task.device == "cuda":
        torch.cuda.set_device(rank)
    device = torch.device(f"cuda:{rank}" if task.device == "cuda" else "cpu")
    dist.init_process_group(
        "symm" if "symm" in task.sides else task.sides[0],
        init_method=task.rendezvous,
        rank=rank,
        world_size=task.world,
        timeout=GROUP_TIMEOUT,
    )
    started = time.monotonic()
    process = _Process(rank, device, task, meeting)
    for absent in process.make_sides():
        if rank == 0:
            results.put(absent)
    for number, cell in enumerate(task.cells):
        turns = turns_for(task.turns, time.monotonic() - started, task.seconds, number, len(task.cells))
        measured = process.measure(cell, meeting.decide(rank, turns), number)
        if rank == 0:
            results.put(measured)
        gc.collect()
    process.sides.clear()
    gc.collect()
    # Rank 0 must not take the store away from those that still use it, nor a failed group keep the figures back.
    with suppress(RuntimeError):
        dist.destroy_process_group()


class _Process:
    """This rank's sides and clock."""

    def __init__(self, rank: int, device: torch.device, task: Task, meeting: Meeting) -> None:
        self._rank, self._device, self._task, self._meeting = rank, device, task, meeting
        self._clock = GpuClock() if device.type == "cuda" else HostClock()
        self.sides: dict[int, Side] = {}

    def _together(self, body: Callable[[], str | None]) -> str | None:
        """Runs ``body`` on every rank; what went wrong on any, on all of them: a text of its own or an exception."""
        try:
            error = body()
        except NotThere as missing:
            error = str(missing)
        except Exception as failure:
            error = f"{type(failure).__name__}: {str(failure).strip().splitlines()[0] if str(failure) else ''}"
        return self._meeting.agree(self._rank, error)

    def make_sides(self) -> list[Absent]:
        """Makes every side; those that cannot be made are returned."""
        makers = GPU_SIDES if self._device.type == "cuda" else CPU_SIDES
        room = max(cell.bytes for cell in self._task.cells) or 16
        absent = []
        for number, name in enumerate(self._task.sides):
            found: list[Side] = []
            error = self._together(lambda name=name, found=found: found.append(makers[name](self._device, room)))  # type: ignore[misc]
            if error is None:
                self.sides[number] = found[0]
            else:
                absent.append(Absent(name, error))
        return absent

    def measure(self, cell: Cell, turns: int, seed: int) -> Measured:
        """One cell on all sides."""
        dtype = DTYPES[cell.dtype]
        inputs = Inputs(self._task.world, cell.bytes // dtype.itemsize, dtype, self._device, seed)
        pristine = torch.empty(inputs.count, dtype=dtype, device=self._device)
        inputs.fill(pristine, self._rank)
        calls = calls_for(cell.size)
        figures: dict[str, Figure] = {}
        ready: dict[int, tuple[Call, torch.cuda.CUDAGraph | None]] = {}
        for number, side in self.sides.items():
            build = side.builder(cell.op, cell.bytes)
            if build is None:
                continue
            figure = figures[side.name] = Figure()
            setting = Setting(self._rank, inputs, pristine, side.group, side.place)
            call = self._prepare(side, build, setting, figure)
            if call is not None:
                ready[number] = call, self._capture(side, call, calls, figure)
        self._alternate(ready, figures, calls, turns)
        divisor = calls * OPS[cell.op].messages_per_call
        for number, (call, _graph) in ready.items():
            figure = figures[self.sides[number].name]
            if not self._still_right(self.sides[number], call, calls, figure):
                continue
            self._read(number, figure, divisor, turns)
            if cell.op == "all_reduce" and cell.size == HOST_SIZE and figure.eager_us is not None:
                self._host_time(number, call, figure)
        return Measured(cell, calls, figures)

    def _fail(self, side: Side, figure: Figure, error: str) -> None:
        figure.note = error if figure.note is None else f"{figure.note}; {error}"
        if not error.startswith(("NotImplementedError", "wrong", "in a graph")):
            # Whatever it was, the group may be dead.
            lost = self._together(lambda: side.failed())
            figure.note += f"; no new group: {lost}" if lost else ""

    def _prepare(self, side: Side, build: Callable[[Setting], Call], setting: Setting, figure: Figure) -> Call | None:
        """The call, once it has been made and found right."""
        found: list[Call] = []

        def once() -> str | None:
            call = build(setting)
            call.reset()
            call.run()
            self._clock.settle()
            found.append(call)
            wrong = call.check(1)
            return wrong and f"wrong: {wrong}"

        error = self._together(once)
        if error is None:
            return found[0]
        self._fail(side, figure, error)
        return None

    def _capture(self, side: Side, call: Call, calls: int, figure: Figure) -> torch.cuda.CUDAGraph | None:
        """A graph of ``calls`` calls that was replayed once and found right."""
        if not self._clock.has_graphs:
            return None
        graphs: list[torch.cuda.CUDAGraph] = []

        def capture() -> None:
            graphs.append(self._clock.capture(call, calls))

        def replay() -> str | None:
            call.reset()
            graphs[0].replay()
            self._clock.settle()
            wrong = call.check(calls)
            return wrong and f"wrong in a graph: {wrong}"

        # Two steps: where one rank has no graph, the others must not wait for it on the GPU.
        error = self._together(capture)
        if error is not None:
            self._fail(side, figure, f"in a graph: {error}")
            return None
        error = self._together(replay)
        if error is not None:
            self._fail(side, figure, error)
            return None
        return graphs[0]

    def _alternate(
        self,
        ready: dict[int, tuple[Call, torch.cuda.CUDAGraph | None]],
        figures: dict[str, Figure],
        calls: int,
        turns: int,
    ) -> None:
        """The sides in turn, each turn in the opposite order; samples go to the meeting."""
        for turn in range(turns):
            order: Sequence[int] = list(ready) if turn % 2 == 0 else list(reversed(ready))
            for number in order:
                call, graph = ready[number]
                for mode in ("graph", "eager") if graph is not None else ("eager",):

                    def sample(
                        mode: str = mode,
                        call: Call = call,
                        graph: torch.cuda.CUDAGraph | None = graph,
                        number: int = number,
                        turn: int = turn,
                    ) -> None:
                        call.reset()
                        if mode == "graph":
                            assert graph is not None
                            us = self._clock.replay_us(graph)
                        else:
                            us = self._clock.eager_us(call, calls)
                        self._meeting.note(number, mode, self._rank, turn, us)

                    self._meeting.align()
                    error = self._together(sample)
                    if error is not None:
                        figure = figures[self.sides[number].name]
                        self._fail(self.sides[number], figure, error)
                        del ready[number]
                        break

    def _still_right(self, side: Side, call: Call, calls: int, figure: Figure) -> bool:
        """Whether calls in a row give the right result, too."""

        def check() -> str | None:
            call.reset()
            for _ in range(calls):
                call.run()
            self._clock.settle()
            wrong = call.check(calls)
            return wrong and f"wrong after {calls} calls: {wrong}"

        error = self._together(check)
        if error is not None:
            self._fail(side, figure, error)
        return error is None

    def _read(self, number: int, figure: Figure, divisor: int, turns: int) -> None:
        figure.eager_turns = [us / divisor for us in self._meeting.slowest(number, "eager", turns)]
        figure.eager_us = statistics.median(figure.eager_turns)
        if self._clock.has_graphs and not (figure.note and "graph" in figure.note):
            figure.graph_turns = [us / divisor for us in self._meeting.slowest(number, "graph", turns)]
            figure.graph_us = statistics.median(figure.graph_turns)

    def _host_time(self, number: int, call: Call, figure: Figure) -> None:
        for turn in range(HOST_TURNS):

            def sample(turn: int = turn) -> None:
                call.reset()
                self._meeting.note(number, "host", self._rank, turn, self._clock.host_us(call))

            error = self._together(sample)
            if error is not None:
                self._fail(self.sides[number], figure, error)
                return
        figure.host_us = statistics.median(self._meeting.slowest(number, "host", HOST_TURNS))

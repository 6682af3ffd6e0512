"""Measures one cell on all sides.

Each side's call is made and its result compared, then captured in a graph and compared again. The sides are timed in
turns, and all results are compared once more.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from ..ops import DTYPES, OPS
from . import exact_inputs
from .contenders import Builder, GpuSide
from .inputs import GpuCall, Inputs, Setting
from .process import Entrances, Process
from .record import Cell, GpuFigure, Measured

LARGE = 4 << 20
MANY_CALLS, FEW_CALLS = 20, 5
HOST_TURNS = 5

#: A side's call, and its graph if it has one, by the side's number.
Ready: TypeAlias = dict[int, tuple[GpuCall, torch.cuda.CUDAGraph | None]]


def calls_for(size: int) -> int:
    """Calls per graph, and per eager loop."""
    return MANY_CALLS if size < LARGE else FEW_CALLS


def measure(process: Process, cell: Cell, turns: int, seed: int) -> Measured:
    """Measures ``cell`` on all sides of ``process``. Called by all ranks."""
    return CellBench(process, cell, turns, seed).measured()


class CellBench:
    """A cell, its tensors, and the figures so far."""

    def __init__(self, process: Process, cell: Cell, turns: int, seed: int) -> None:
        self._process, self._cell, self._turns = process, cell, turns
        self._clock, self._meeting = process.clock, process.meeting
        self._calls = calls_for(cell.size)
        dtype = DTYPES[cell.dtype]
        self._inputs = Inputs(process.task.world, cell.bytes // dtype.itemsize, dtype, process.device, seed)
        self._pristine = torch.empty(self._inputs.count, dtype=dtype, device=process.device)
        if not exact_inputs.wanted(cell):
            self._inputs.fill(self._pristine, process.rank)
        self._figures: dict[str, GpuFigure] = {}

    def measured(self) -> Measured:
        """Measures all sides. Called by all ranks."""
        cell, ready = self._cell, Ready()
        for number, side in list(self._process.sides.items()):
            build = self._builder(side)
            if build is None:
                continue
            self._figures[side.name] = GpuFigure()
            call = self._prepared(number, build)
            if call is not None:
                graph = self._captured(number, call)
                # Capture or replay may have ended the side.
                if number in self._process.sides:
                    ready[number] = call, graph
        self._alternate(ready, lambda number: self._modes(*ready[number]))
        for number, (call, _graph) in ready.items():
            if self._process.task.checks and not self._still_right(number, call):
                continue
            self._read(number)
            if self._process.task.entrances is not None and not exact_inputs.wanted(cell):
                self._host_times(number, call, self._process.task.entrances)
        return Measured(cell, self._calls, self._figures)

    def _builder(self, side: GpuSide) -> Builder | None:
        if not exact_inputs.wanted(self._cell):
            return side.builder(self._cell.op, self._cell.bytes)
        return exact_inputs.builder(self._cell) if side.is_plain else None

    def _figure(self, number: int) -> GpuFigure:
        return self._figures[self._process.task.sides[number]]

    def _setting(self, number: int) -> Setting:
        side = self._process.sides[number]
        return Setting(self._process.rank, self._inputs, self._pristine, side.group, side.place)

    def _prepared(self, number: int, build: Builder) -> GpuCall | None:
        """Returns the call, once it has been made and its result checked."""
        found: list[GpuCall] = []
        task = self._process.task

        def once() -> str | None:
            call = build(self._setting(number))
            call.reset()
            call.run()
            self._process.settle(self._process.sides[number])
            found.append(call)
            wrong = call.check(1) if task.checks else None
            for _ in range(task.checks - 1):
                if wrong is None:
                    call.reset()
                    call.run()
                    wrong = call.check(1)
            for _ in range(task.warmup):
                call.run()
            self._process.settle(self._process.sides[number])
            return wrong and f"wrong: {wrong}"

        return found[0] if self._succeeds(number, once) else None

    def _succeeds(self, number: int, step: Callable[[], str | None], about: str = "") -> bool:
        """Takes a step of a side with all ranks. If the step fails on a rank, ends the side and returns false."""
        error = self._process.together(number, step)
        if error is not None:
            self._process.fail(number, self._figure(number), about + error)
        return error is None

    def _captured(self, number: int, call: GpuCall) -> torch.cuda.CUDAGraph | None:
        """Returns a graph of the calls that was replayed and checked once."""
        if not self._clock.has_graphs:
            return None
        graphs: list[torch.cuda.CUDAGraph] = []

        def capture() -> None:
            with self._process.sides[number].capturing():
                graphs.append(self._clock.capture(call.run, self._calls))

        def replay() -> str | None:
            call.reset()
            graphs[0].replay()
            self._process.settle(self._process.sides[number])
            wrong = call.check(self._calls) if self._process.task.checks else None
            return wrong and f"wrong in a graph: {wrong}"

        # Two steps: if one rank has no graph, the others must not wait for it on the GPU.
        right = self._succeeds(number, capture, "in a graph: ") and self._succeeds(number, replay)
        return graphs[0] if right else None

    def _alternate(self, ready: dict[int, Any], modes: Callable[[int], dict[str, Callable[[], float]]]) -> None:
        """Times the sides of ``ready`` in turns, every second turn in the opposite order. Removes those that fail.

        ``modes`` are ways to time a side, in us; samples are stored in the meeting.
        """
        for turn in range(self._turns):
            order: Sequence[int] = list(ready) if turn % 2 == 0 else list(reversed(ready))
            for number in order:
                for mode, timed in modes(number).items():

                    def sample(
                        mode: str = mode, timed: Callable[[], float] = timed, number: int = number, turn: int = turn
                    ) -> None:
                        us = timed()
                        self._process.sides[number].sound(self._process.device)
                        self._meeting.note(number, mode, self._process.rank, turn, us)

                    self._meeting.align()
                    if not self._succeeds(number, sample):
                        del ready[number]
                        break

    def _modes(self, call: GpuCall, graph: torch.cuda.CUDAGraph | None) -> dict[str, Callable[[], float]]:
        """Ways to time the calls of a side, eagerly and in its graph."""

        def eager() -> float:
            call.reset()
            return self._clock.eager_us(call, self._calls)

        def replayed() -> float:
            assert graph is not None
            call.reset()
            return self._clock.replay_us(graph)

        return {"eager": eager} if graph is None else {"graph": replayed, "eager": eager}

    def _still_right(self, number: int, call: GpuCall) -> bool:
        """Returns true if calls in a row give the right result, too."""

        def check() -> str | None:
            call.reset()
            for _ in range(self._calls):
                call.run()
            self._process.settle(self._process.sides[number])
            wrong = call.check(self._calls)
            return wrong and f"wrong after {self._calls} calls: {wrong}"

        return self._succeeds(number, check)

    def _read(self, number: int) -> None:
        messages = OPS[self._cell.op].messages_per_call if self._cell.op in OPS else 1
        figure, divisor = self._figure(number), self._calls * messages
        figure.eager_turns = [us / divisor for us in self._meeting.slowest(number, "eager", self._turns)]
        figure.eager_us = statistics.median(figure.eager_turns)
        if self._clock.has_graphs and not (figure.note and "graph" in figure.note):
            figure.graph_turns = [us / divisor for us in self._meeting.slowest(number, "graph", self._turns)]
            figure.graph_us = statistics.median(figure.graph_turns)

    def _host_times(self, number: int, whole: GpuCall, entrances: Entrances) -> None:
        side, figure = self._process.sides[number], self._figure(number)
        calls = entrances(self._setting(number), self._cell, whole, side)
        if not calls:
            return
        for turn in range(HOST_TURNS):

            def sample(turn: int = turn) -> str | None:
                for entrance, call in calls.items():
                    call.reset()
                    call.run()
                    self._process.settle(self._process.sides[number])
                    wrong = call.check(1)
                    if wrong:
                        return f"wrong through {entrance}: {wrong}"
                    self._meeting.note(number, entrance, self._process.rank, turn, self._clock.host_us(call))
                return None

            if not self._succeeds(number, sample):
                return
        for entrance in calls:
            us = statistics.median(self._meeting.slowest(number, entrance, HOST_TURNS))
            setattr(figure, f"{entrance}_us", us)

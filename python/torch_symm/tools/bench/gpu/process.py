"""The sides and clock of one rank process, and the handling of a side that fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from torch_symm.launch.messages import in_a_line

from .clock import GpuClock, HostClock
from .contenders import GpuSide, Makers, UnavailableError, is_timeout
from .inputs import GpuCall, Setting
from .rank_sync import Meeting
from .record import Cell, GpuAbsent, GpuFigure, Measured

Message: TypeAlias = GpuAbsent | Measured
#: A function of a module that returns the calls whose host time is measured, by the level at which they enter.
Entrances: TypeAlias = Callable[[Setting, Cell, GpuCall, GpuSide], Mapping[str, GpuCall]]


@dataclass(frozen=True)
class GpuTask:
    """The task of all ranks. ``seconds``: a run that is late gets few turns, and ends when the time is over.

    ``products``: the calls are measured while matrix products run.
    ``warmup`` untimed calls of a side precede its timed ones; ``checks`` of its results are compared, 0: none of them.
    """

    world: int
    device: str
    makers: Makers
    sides: tuple[str, ...]
    cells: tuple[Cell, ...]
    rendezvous: str
    seconds: float
    turns: int
    warmup: int = 0
    checks: int = 1
    entrances: Entrances | None = None
    products: bool = False


class Process:
    """One rank. All ranks call its methods in the same order. ``sides`` are keyed by their index in the task."""

    def __init__(
        self, rank: int, device: torch.device, task: GpuTask, meeting: Meeting, report: Callable[[Message], object]
    ) -> None:
        """``report`` receives the findings; one rank sends them to the launcher."""
        self.rank, self.device, self.task, self.meeting = rank, device, task, meeting
        self.clock = GpuClock() if device.type == "cuda" else HostClock()
        self.sides: dict[int, GpuSide] = {}
        self.cell: int | None = None
        self._report = report
        # Sides whose groups have failed are kept, because dropping them may block.
        self._given_up: list[GpuSide] = []

    def together(self, side: int, body: Callable[[], str | None]) -> str | None:
        """Runs ``body`` on every rank; returns the error of one rank on all: the result of ``body`` or an exception.

        If ranks saw different errors, a timeout takes precedence, because the other errors may be its consequences.
        """
        self.meeting.progress.enter(self.rank, self.cell, side)
        try:
            error = body()
        except UnavailableError as missing:
            error = str(missing)
        except Exception as failure:
            error = in_a_line(failure)
            # After some errors, this process cannot use the device any more; the launcher then starts new processes.
            self.clock.settle()
        errors = self.meeting.agree(self.rank, error)
        self.meeting.progress.enter(self.rank, self.cell, None)
        return next((error for error in errors if is_timeout(error)), errors[0] if errors else None)

    def settle(self, side: GpuSide) -> None:
        """Returns once the device has finished everything.

        Raises:
            GroupFailed: the group of ``side`` has failed meanwhile.
        """
        self.clock.settle()
        side.sound(self.device)

    def make_sides(self) -> None:
        """Makes every side; those that cannot be made are reported."""
        makers = self.task.makers()
        room = max(cell.bytes for cell in self.task.cells) or 16
        for number, name in enumerate(self.task.sides):
            found: list[GpuSide] = []

            def make(name: str = name, found: list[GpuSide] = found) -> None:
                found.append(makers[name](self.device, room))

            error = self.together(number, make)
            if error is None:
                self.sides[number] = found[0]
            else:
                self._report(GpuAbsent(name, error))

    def fail(self, number: int, figure: GpuFigure, error: str) -> None:
        """Notes ``error``. A side is abandoned after a timeout; if its group may have ended, it gets a new group."""
        figure.note = error if figure.note is None else f"{figure.note}; {error}"
        side = self.sides[number]
        if is_timeout(error):
            self._given_up.append(self.sides.pop(number))
            self._report(GpuAbsent(side.name, f"given up: {error}", lost=True))
        elif not error.startswith(("NotImplementedError", "wrong", "in a graph")):
            lost = self.together(number, lambda: side.failed())
            figure.note += f"; no new group: {lost}" if lost else ""

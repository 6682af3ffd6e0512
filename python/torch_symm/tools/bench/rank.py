"""One rank process: makes both groups, measures the memory, walks through the cells; rank 0 reports to the launcher."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.queues import Queue
from typing import TypeAlias

import torch
import torch.distributed as dist

from torch_symm._torch import new_group

from . import limits
from .machine import busy_seconds
from .ops import DTYPES, OPS, Shape, Work
from .pattern import WrongResult
from .record import Cell, Row, Side, judge, summarize
from .timing import Rhythm, SharedTensors, burst, check_once, plan

CALIBRATION_CALLS = 3
SLOW_US = 50_000.0
GROUP_TIMEOUT = timedelta(seconds=120)

# What rank 0 sends: first the copy bandwidth of all ranks in bytes/s, then rows.
Message: TypeAlias = float | Row


@dataclass(frozen=True)
class Task:
    """What all ranks of one world do. ``backends``: the tested one first. ``deadline`` by ``time.monotonic()``."""

    world: int
    backends: tuple[str, ...]
    cells: tuple[Cell, ...]
    rendezvous: str
    deadline: float
    side_seconds: float
    least: int
    rounds: int


def join(
    rank: int, world: int, backends: Sequence[str], rendezvous: str, timeout: timedelta = GROUP_TIMEOUT
) -> list[dist.ProcessGroup]:
    """Makes this process rank ``rank`` of a group of each backend, the default group first."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    dist.init_process_group(backends[0], init_method=rendezvous, rank=rank, world_size=world, timeout=timeout)
    default = dist.group.WORLD
    assert default is not None
    return [default, *(new_group(backend=peer, timeout=timeout) for peer in backends[1:])]


def copy_bandwidth(rank: int, shared: SharedTensors) -> float:
    """Bytes per second that all ranks copy at once; all call it."""
    shared.copy_rates[rank] = torch.tensor(limits.measure_copy(shared.align), dtype=torch.float64)
    shared.align()
    return float(shared.copy_rates.sum(dim=0).max())


def main(rank: int, task: Task, shared: SharedTensors, results: Queue[Message]) -> None:
    """Entry point of a rank process.

    Raises:
        WrongResult: a backend returned a wrong value; names backend, cell and element.
    """
    groups = join(rank, task.world, task.backends, task.rendezvous)
    bandwidth = copy_bandwidth(rank, shared)
    if rank == 0:
        results.put(bandwidth)
    gc.disable()
    for number, cell in enumerate(task.cells):
        measurement = _Measurement(rank, task, shared, groups, cell)
        measurement.agree_on_rhythm(cells_left=len(task.cells) - number)
        measurement.alternate()
        if rank == 0:
            results.put(measurement.row(bandwidth))
        shared.align()
        gc.collect()
    dist.destroy_process_group()


class _Measurement:
    """One cell on this rank."""

    def __init__(
        self, rank: int, task: Task, shared: SharedTensors, groups: list[dist.ProcessGroup], cell: Cell
    ) -> None:
        self._rank, self._task, self._shared, self._groups, self._cell = rank, task, shared, groups, cell
        dtype = DTYPES[cell.dtype]
        self._work: Work = OPS[cell.op].build(Shape(rank, task.world, dtype, cell.bytes // dtype.itemsize))
        self._rhythms: list[Rhythm] = []
        self._filled = [0] * len(groups)
        self._elapsed = self._busy = 0.0

    def agree_on_rhythm(self, cells_left: int) -> None:
        """Warms up, checks and estimates each side; every rank derives the same rhythm from the shared estimates."""
        shared, task = self._shared, self._task
        if self._rank == 0:
            share = max(0.0, task.deadline - time.monotonic()) / cells_left
            shared.budget_s[0] = min(task.side_seconds, 0.4 * share)
        for side, group in enumerate(self._groups):
            shared.align()
            with self._naming(side):
                check_once(self._work, group)
            self._work.reset()
            start = time.perf_counter_ns()
            for _ in range(CALIBRATION_CALLS):
                self._work.call(group)
            shared.estimates[side, self._rank] = (time.perf_counter_ns() - start) / 1e3 / CALIBRATION_CALLS
        shared.align()
        budget = float(shared.budget_s[0])
        for side in range(len(self._groups)):
            estimate = float(shared.estimates[side].max())
            least = task.least if estimate < SLOW_US else task.rounds
            self._rhythms.append(plan(estimate, budget, task.world, least, task.rounds))

    def alternate(self) -> None:
        """Blocks of the sides in turn, each turn in the opposite order; samples go to the shared tensors."""
        shared = self._shared
        sides = list(range(len(self._groups)))
        began, busy, own = time.monotonic(), busy_seconds(), time.process_time()
        for turn in range(self._task.rounds):
            for side in sides if turn % 2 == 0 else reversed(sides):
                shared.align()
                for _ in range(self._rhythms[side].bursts):
                    with self._naming(side):
                        samples = burst(self._work, self._groups[side], self._rhythms[side])
                    start = self._filled[side]
                    self._filled[side] += len(samples)
                    shared.samples[side, self._rank, start : self._filled[side]] = torch.tensor(
                        samples, dtype=torch.float64
                    )
        shared.cpu_seconds[self._rank] = time.process_time() - own
        shared.align()
        self._elapsed, self._busy = time.monotonic() - began, busy_seconds() - busy

    def row(self, bandwidth: float) -> Row:
        """The figures of the cell from the samples of all ranks."""
        sides = [self._summary(side) for side in range(len(self._groups))]
        others = (self._busy - float(self._shared.cpu_seconds.sum())) / max(1e-6, self._elapsed)
        return judge(self._cell, sides[0], sides[1] if len(sides) > 1 else None, bandwidth, max(0.0, others))

    def _summary(self, side: int) -> Side:
        slowest = self._shared.samples[side, :, : self._filled[side]].max(dim=0).values
        slowest /= OPS[self._cell.op].messages_per_call
        samples: list[float] = slowest.tolist()
        return summarize(self._cell, self._task.backends[side], samples, self._rhythms[side].iterations)

    @contextmanager
    def _naming(self, side: int) -> Iterator[None]:
        """Adds backend, rank and cell to a wrong result."""
        try:
            yield
        except WrongResult as wrong:
            cell = self._cell
            where = f"{self._task.backends[side]}, rank {self._rank} of {cell.world}, {cell.dtype}, {cell.bytes} bytes"
            raise WrongResult(f"{where}: {wrong}") from None

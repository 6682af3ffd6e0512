"""A rank process: a group for each side, row after row on all of them; rank 0 reports to the launcher."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.queues import Queue
from typing import TypeAlias

import torch
import torch.distributed as dist

from torch_symm.launch.messages import in_a_line
from torch_symm.launch.watch import Progress

from .. import limits
from ..ops import DTYPES, OPS, PLACEMENTS, Shape, Work
from ..pattern import WrongResult
from ..rank import copy_bandwidth, join
from ..record import quantile
from ..timing import Rhythm, SharedTensors, burst, check_once, fixed
from . import record
from .record import Figure, Found
from .request import Wanted

#: What rank 0 sends.
Message: TypeAlias = Found


@dataclass(frozen=True)
class Task:
    """What all ranks do. ``sides``: the tested one first; ``calls`` timed ones after ``warmup``, ``checks`` checked.

    ``bandwidth``: whether to measure that of plain copies; ``timeout_s``: of the groups.
    """

    world: int
    sides: tuple[str, ...]
    rows: tuple[Wanted, ...]
    rendezvous: str
    calls: int
    warmup: int
    checks: int
    bandwidth: bool
    timeout_s: float


def main(rank: int, task: Task, shared: SharedTensors, progress: Progress, results: Queue[Message]) -> None:
    """Entry point of a rank process."""
    groups = join(rank, task.world, task.sides, task.rendezvous, timedelta(seconds=task.timeout_s))
    bandwidth = copy_bandwidth(rank, shared) if task.bandwidth else 0.0
    gc.disable()
    for number, wanted in enumerate(task.rows):
        sides: dict[str, dict[str, Figure]] = {side: {} for side in task.sides}
        notes: dict[str, str] = {}
        for placement, build in zip(record.PLACEMENTS, PLACEMENTS[wanted.op], strict=True):
            if build is not None:
                _Row(rank, task, shared, progress, groups, number, build).measure(sides, placement, notes)
        if rank == 0:
            limit = limits.limit_us(wanted.op, wanted.size, task.world, bandwidth, staged=False)
            results.put(Found(wanted, sides, notes, limit))
        shared.align()
        gc.collect()
    dist.destroy_process_group()


class _Row:
    """A row with one placement, on this rank."""

    def __init__(
        self,
        rank: int,
        task: Task,
        shared: SharedTensors,
        progress: Progress,
        groups: Sequence[dist.ProcessGroup],
        number: int,
        build: Callable[[Shape], Work],
    ) -> None:
        wanted = task.rows[number]
        self._rank, self._task, self._shared, self._groups, self._wanted = rank, task, shared, groups, wanted
        self._enter = partial(progress.enter, rank, number)
        dtype = DTYPES[wanted.dtype]
        redop = "sum" if wanted.redop == "none" else wanted.redop
        shape = Shape(rank, task.world, dtype, wanted.size // dtype.itemsize, redop, max(0, wanted.root))
        self._work = build(shape)
        self._errors: dict[int, str] = {}
        self._filled = [0] * len(groups)

    def measure(self, sides: dict[str, dict[str, Figure]], placement: str, notes: dict[str, str]) -> None:
        """Adds the figures of each side, or a note."""
        shared, task = self._shared, self._task
        shared.wrong[:, self._rank] = shared.failed[:, self._rank] = 0.0
        able = []
        for side, name in enumerate(task.sides):
            if self._tried(side):
                able.append(side)
            else:
                notes[name] = self._errors.get(side, "fails on another rank")
        rhythms = {side: fixed(task.calls, float(shared.estimates[side].max()), task.world) for side in able}
        rounds = max((rhythm.rounds for rhythm in rhythms.values()), default=0)
        for turn in range(rounds):
            for side in able if turn % 2 == 0 else reversed(able):
                self._timed(side, rhythms[side])
        for side in able:
            self._enter(side)
            for _ in range(task.checks - 1):
                with self._counting(side):
                    check_once(self._work, self._groups[side])
        shared.align()
        for side in able:
            sides[task.sides[side]][placement] = self._figure(side, rhythms[side])

    def _tried(self, side: int) -> bool:
        """Makes the first call, checked, and the untimed ones; whether all ranks could."""
        shared, group, work = self._shared, self._groups[side], self._work
        shared.align()
        self._enter(side)
        try:
            work.reset()
            work.call(group)
            if self._task.checks:
                with self._counting(side):
                    work.check(1)
        except Exception as error:
            self._errors[side] = in_a_line(error)
            shared.failed[side, self._rank] = 1.0
        shared.align()
        if bool(shared.failed[side].any()):
            return False
        self._enter(side)
        work.reset()
        start = time.perf_counter_ns()
        for _ in range(self._task.warmup):
            work.call(group)
        shared.estimates[side, self._rank] = (time.perf_counter_ns() - start) / 1e3 / max(1, self._task.warmup)
        shared.align()
        return True

    def _timed(self, side: int, rhythm: Rhythm) -> None:
        self._shared.align()
        for _ in range(rhythm.bursts):
            self._enter(side)
            samples = burst(self._work, self._groups[side], rhythm, checked=False)
            start = self._filled[side]
            self._filled[side] += len(samples)
            self._shared.samples[side, self._rank, start : self._filled[side]] = torch.tensor(
                samples, dtype=torch.float64
            )

    def _figure(self, side: int, rhythm: Rhythm) -> Figure:
        slowest = self._shared.samples[side, :, : self._filled[side]].max(dim=0).values
        ordered: list[float] = sorted((slowest / OPS[self._wanted.op].messages_per_call).tolist())
        return Figure(
            median_us=quantile(ordered, 0.5),
            mean_us=sum(ordered) / len(ordered),
            p99_us=quantile(ordered, 0.99),
            min_us=ordered[0],
            iterations=rhythm.iterations,
            wrong=int(self._shared.wrong[side].sum()) if self._task.checks else None,
        )

    @contextmanager
    def _counting(self, side: int) -> Iterator[None]:
        try:
            yield
        except WrongResult as wrong:
            self._shared.wrong[side, self._rank] += wrong.count

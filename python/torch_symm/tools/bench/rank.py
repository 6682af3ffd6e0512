"""A rank process: it makes a group for each side and measures row after row on all sides; rank 0 reports the rows."""

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

from torch_symm._torch_compat import new_group
from torch_symm.launch.messages import in_a_line
from torch_symm.launch.watch import Progress

from . import limits, record
from .machine import busy_seconds
from .ops import DTYPES, OPS, Shape, Work
from .pattern import WrongResult
from .record import Figure, Found, quantile
from .request import Wanted
from .timing import Rhythm, SharedTensors, burst, check_once, fixed, plan

#: The messages of rank 0.
Message: TypeAlias = Found
#: With a deadline: maximum seconds of a side, minimum number of its samples, number of rounds, and the µs of a call
#: from which one sample per round suffices.
SIDE_S, LEAST, ROUNDS, SLOW_US = 1.5, 20, 5, 50_000.0


@dataclass(frozen=True)
class BenchTask:
    """The task of all ranks. ``sides``: the tested side first; ``warmup`` untimed calls, ``calls`` timed ones.

    ``checks``: number of checked calls. ``bandwidth``: whether to measure plain copies; ``timeout_s``: of the groups.
    ``deadline``: by ``time.monotonic()``, in place of ``calls``: as many calls as fit, with all bursts checked.
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
    deadline: float | None = None


def join(
    rank: int, world: int, backends: Sequence[str], rendezvous: str, timeout: timedelta
) -> list[dist.ProcessGroup]:
    """Makes this process rank ``rank`` of a group of each backend, the default group first."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    dist.init_process_group(backends[0], init_method=rendezvous, rank=rank, world_size=world, timeout=timeout)
    default = dist.group.WORLD
    assert default is not None
    return [default, *(new_group(backend=peer, timeout=timeout) for peer in backends[1:])]


def copy_bandwidth(rank: int, shared: SharedTensors) -> float:
    """Returns the bytes per second that all ranks copy at once; all ranks call it."""
    shared.copy_rates[rank] = torch.tensor(limits.measure_copy(shared.align), dtype=torch.float64)
    shared.align()
    return float(shared.copy_rates.sum(dim=0).max())


def main(rank: int, task: BenchTask, shared: SharedTensors, progress: Progress, results: Queue[Message]) -> None:
    """Entry point of a rank process."""
    groups = join(rank, task.world, task.sides, task.rendezvous, timedelta(seconds=task.timeout_s))
    bandwidth = copy_bandwidth(rank, shared) if task.bandwidth else 0.0
    gc.disable()
    for number, wanted in enumerate(task.rows):
        sides: dict[str, dict[str, Figure]] = {side: {} for side in task.sides}
        notes: dict[str, str] = {}
        began, busy, own = time.monotonic(), busy_seconds(), time.process_time()
        for placement, build in zip(record.PLACEMENTS, OPS[wanted.op].builds, strict=True):
            if build is not None:
                _Row(rank, task, shared, progress, groups, number, build).measure(sides, placement, notes)
        shared.cpu_seconds[rank] = time.process_time() - own
        shared.align()
        if rank == 0:
            of_others = busy_seconds() - busy - float(shared.cpu_seconds.sum())
            others = max(0.0, of_others / max(1e-6, time.monotonic() - began))
            limit, staged = (
                limits.limit_us(wanted.op, wanted.size, task.world, bandwidth, staged=staged)
                for staged in (False, True)
            )
            results.put(Found(wanted, sides, notes, limit, staged, others))
        shared.align()
        gc.collect()
    dist.destroy_process_group()


class _Row:
    """A row with one placement, on this rank."""

    def __init__(
        self,
        rank: int,
        task: BenchTask,
        shared: SharedTensors,
        progress: Progress,
        groups: Sequence[dist.ProcessGroup],
        number: int,
        build: Callable[[Shape], Work],
    ) -> None:
        wanted = task.rows[number]
        self._rank, self._task, self._shared, self._groups, self._wanted = rank, task, shared, groups, wanted
        self._enter, self._number = partial(progress.enter, rank, number), number
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
        if self._rank == 0 and task.deadline is not None:
            rows_left = len(task.rows) - self._number
            builds = sum(build is not None for build in OPS[self._wanted.op].builds)
            share = max(0.0, task.deadline - time.monotonic()) / rows_left / builds
            shared.budget_s[0] = min(SIDE_S, 0.8 / len(task.sides) * share)
        for side, name in enumerate(task.sides):
            if self._tried(side):
                able.append(side)
            else:
                notes[name] = self._errors.get(side, "fails on another rank")
        rhythms = {side: self._rhythm(float(shared.estimates[side].max())) for side in able}
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

    def _rhythm(self, estimate_us: float) -> Rhythm:
        task = self._task
        if task.deadline is None:
            return fixed(task.calls, estimate_us, task.world)
        least = LEAST if estimate_us < SLOW_US else ROUNDS
        return plan(estimate_us, float(self._shared.budget_s[0]), task.world, least, ROUNDS)

    def _tried(self, side: int) -> bool:
        """Makes the first call, checked, and the untimed ones; returns true if all ranks succeeded."""
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
        # A deadline needs the time of a call, even without untimed calls.
        warmup = self._task.warmup or int(self._task.deadline is not None)
        start = time.perf_counter_ns()
        for _ in range(warmup):
            work.call(group)
        shared.estimates[side, self._rank] = (time.perf_counter_ns() - start) / 1e3 / max(1, warmup)
        shared.align()
        return True

    def _timed(self, side: int, rhythm: Rhythm) -> None:
        self._shared.align()
        for _ in range(rhythm.bursts):
            self._enter(side)
            samples = burst(self._work, self._groups[side], rhythm)
            if self._task.deadline is not None and self._task.checks:
                with self._counting(side):
                    if self._work.checks_chain:
                        self._work.check(rhythm.samples * rhythm.batch + int(rhythm.lead))
                    else:
                        check_once(self._work, self._groups[side])
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

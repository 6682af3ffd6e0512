"""One process of a rank of one engine. All processes take the same steps; in each step one engine's side runs."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.queues import Queue
from typing import Any

import torch
import torch.distributed as dist
from fused_sides import TOLERANCE, Engine, Inputs, Shape, Side, engines, unfused
from torch_symm._torch_compat import new_group
from torch_symm.launch.messages import in_a_line
from torch_symm.tools.bench.gpu.clock import GpuClock, HostClock
from torch_symm.tools.bench.gpu.contenders import GROUP_TIMEOUT
from torch_symm.tools.bench.gpu.inputs import GpuCall
from torch_symm.tools.bench.gpu.rank_sync import Meeting

#: Calls of a graph, and of a timed loop.
CALLS = 10


@dataclass(frozen=True)
class Task:
    """The task of all processes. ``engines``: names in the order of the turns; ``rendezvous``: a URL for each."""

    world: int
    device: str
    shapes: tuple[Shape, ...]
    engines: tuple[str, ...]
    rendezvous: tuple[str, ...]
    turns: int

    def sides(self) -> list[tuple[int, Side]]:
        """All sides in the order of their numbers, each with the number of its engine."""
        known = engines(self.device)
        return [(number, side) for number, name in enumerate(self.engines) for side in known[name].sides]


@dataclass(frozen=True)
class Finished:
    """A shape: µs of each turn per call, by side and mode; errors by side."""

    shape: Shape
    turns: dict[str, dict[str, list[float]]]
    notes: dict[str, str]


class Process:
    """One rank of one engine. ``number``: the index of this process among the processes of all engines."""

    def __init__(self, engine: int, rank: int, task: Task, meeting: Meeting) -> None:
        self.engine, self.rank, self.task, self.meeting = engine, rank, task, meeting
        self.number = engine * task.world + rank
        self.device = torch.device(f"cuda:{rank}" if task.device == "cuda" else "cpu")
        self.clock = GpuClock() if task.device == "cuda" else HostClock()
        self.dtype = torch.bfloat16 if task.device == "cuda" else torch.float32
        self.modes = ("graph", "eager") if self.clock.has_graphs else ("eager",)
        self.groups: dict[str, dist.ProcessGroup] = {}
        self.calls: dict[int, tuple[GpuCall, Any]] = {}

    def start(self) -> None:
        """Makes the groups of this engine's sides."""
        engine: Engine = engines(self.task.device)[self.task.engines[self.engine]]
        backends = list(dict.fromkeys(side.backend for side in engine.sides))
        # No device_id, because torch would then have NCCL split a group of another backend.
        dist.init_process_group(
            backends[0],
            init_method=self.task.rendezvous[self.engine],
            rank=self.rank,
            world_size=self.task.world,
            timeout=GROUP_TIMEOUT,
        )
        for backend in backends:
            self.groups[backend] = new_group(backend=backend, timeout=GROUP_TIMEOUT)
        if self.task.engines[self.engine].startswith("torch"):
            from torch.distributed._symmetric_memory import enable_symm_mem_for_group

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # some versions of torch say that the call is not needed
                for group in self.groups.values():
                    enable_symm_mem_for_group(group.group_name)

    def step(self, engine: int, body: Callable[[], str | None]) -> str | None:
        """Runs ``body`` in the processes of ``engine`` while the others wait; returns one error, in all processes."""
        self.meeting.align()
        error = None
        if engine == self.engine:
            try:
                error = body()
            except Exception as failure:
                error = in_a_line(failure)
        return next(iter(self.meeting.agree(self.number, error)), None)

    def measure(self, shape: Shape) -> Finished:
        """Measures ``shape`` on all sides. Called by all processes."""
        inputs = Inputs.of(shape, self.rank, self.task.world, self.device, self.dtype)
        notes: dict[str, str] = {}
        ready: list[tuple[int, int, Side]] = []
        for number, (engine, side) in enumerate(self.task.sides()):
            error = self.step(engine, partial(self._prepare, number, side, inputs))
            if error is None:
                ready.append((number, engine, side))
            else:
                notes[side.name] = error
        for turn in range(self.task.turns):
            for number, engine, side in ready if turn % 2 == 0 else ready[::-1]:
                for mode in self.modes if side.name not in notes else ():

                    def sample(number: int = number, mode: str = mode, turn: int = turn) -> None:
                        self.meeting.note(number, mode, self.number, turn, self._sample(number, mode) / CALLS)

                    error = self.step(engine, sample)
                    if error is not None:
                        notes[side.name] = error
                        break
        for number, engine, side in ready:
            error = self.step(engine, partial(self._still_right, number))
            if error is not None:
                notes.setdefault(side.name, error)
        self.meeting.align()
        turns = {
            side.name: {mode: self.meeting.slowest(number, mode, self.task.turns) for mode in self.modes}
            for number, _, side in ready
            if side.name not in notes
        }
        self.calls.clear()
        gc.collect()
        return Finished(shape, turns, notes)

    def _prepare(self, number: int, side: Side, inputs: Inputs) -> str | None:
        """Makes the call and its graph, and compares their results with the unfused call of the same group."""
        group = self.groups[side.backend]
        results: list[torch.Tensor] = []

        def run() -> None:
            results[:] = [side.run(inputs, group)]

        def check(_calls: int) -> str | None:
            self.clock.settle()
            return difference(results[0], wanted) if side.checked else None

        wanted = unfused(inputs, group).clone()
        call = GpuCall(lambda: None, run, check)
        run()
        wrong = check(1)
        if wrong is not None:
            return wrong
        graph = None
        if self.clock.has_graphs:
            graph = self.clock.capture(call.run, CALLS)
            results[0].zero_()
            graph.replay()
            wrong = check(CALLS)
        self.calls[number] = call, graph
        return wrong and f"in a graph: {wrong}"

    def _still_right(self, number: int) -> str | None:
        return self.calls[number][0].check(CALLS)

    def _sample(self, number: int, mode: str) -> float:
        call, graph = self.calls[number]
        return self.clock.replay_us(graph) if mode == "graph" else self.clock.eager_us(call, CALLS)


def difference(found: torch.Tensor, wanted: torch.Tensor) -> str | None:
    """Returns how ``found`` differs from ``wanted``; ``None`` within the tolerance."""
    if found.shape != wanted.shape:
        return f"wrong: a result of {tuple(found.shape)} instead of {tuple(wanted.shape)}"
    off = float((found.double() - wanted.double()).norm() / wanted.double().norm())
    return None if off <= TOLERANCE else f"wrong: off by {off:.3g} of the result's norm"


def main(rank: int, engine: int, task: Task, meeting: Meeting, results: Queue[Finished]) -> None:
    """Entry point of a process; the process of rank 0 of the first engine reports."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    if task.device == "cuda":
        torch.cuda.set_device(rank)
    process = Process(engine, rank, task, meeting)
    process.start()
    for finished in _all(process):
        if process.number == 0:
            results.put(finished)
    meeting.align()
    with suppress(RuntimeError):
        dist.destroy_process_group()


def _all(process: Process) -> Iterator[Finished]:
    for shape in process.task.shapes:
        yield process.measure(shape)

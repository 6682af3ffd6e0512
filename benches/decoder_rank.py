"""One rank's part of the decoder, and how a batch is measured on all sides."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.queues import Queue
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch_symm._torch_compat import new_group
from torch_symm.launch.messages import in_a_line
from torch_symm.tools.bench.gpu.clock import GpuClock, HostClock
from torch_symm.tools.bench.gpu.contenders import GROUP_TIMEOUT
from torch_symm.tools.bench.gpu.inputs import GpuCall
from torch_symm.tools.bench.gpu.rank_sync import Meeting

WITHOUT, FUSED = "without", "fused"
PEER = {"cuda": "nccl", "cpu": "gloo"}
#: Elements of a row, and of a row in the MLP over all ranks; few for a test without a GPU.
WIDTHS = {"cuda": (8192, 28672), "cpu": (256, 896)}
#: All-reduces of a layer.
POINTS = 2
EPS, CACHES, TOLERANCE = 1e-6, 4, 0.03

#: (this rank's part of a product, residual, weight) -> (normed, new residual).
Step: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Task:
    """The task of all ranks."""

    world: int
    device: str
    batches: tuple[int, ...]
    layers: int
    sides: tuple[str, ...]
    turns: int
    rendezvous: str


@dataclass(frozen=True)
class Finished:
    """A batch: µs a token of each turn, by side; errors by side; for the norm, why it is not compiled."""

    batch: int
    bytes: int
    turns: dict[str, list[float]]
    notes: dict[str, str]

    def us(self, side: str) -> float | None:
        """Returns the µs per token."""
        return statistics.median(self.turns[side]) if self.turns.get(side) else None

    def more_us(self, side: str, all_reduces: int) -> float | None:
        """Returns the µs that each all-reduce adds to the time of ``without``."""
        whole, alone = self.us(side), self.us(WITHOUT)
        return None if whole is None or alone is None else (whole - alone) / all_reduces


def norm(part: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Addition and norm, by eager torch or compiled."""
    added = part + residual
    return F.rms_norm(added, weight.shape, weight, EPS), added


def distinct_layers(layer_bytes: int, cache_bytes: int) -> int:
    """Number of layers with separate weights."""
    return max(2, -(-CACHES * cache_bytes // layer_bytes))


class Rank:
    """One rank's part of the decoder."""

    def __init__(self, rank: int, task: Task, meeting: Meeting) -> None:
        self.rank, self.task, self.meeting = rank, task, meeting
        on_gpu = task.device == "cuda"
        self.device = torch.device(f"cuda:{rank}" if on_gpu else "cpu")
        self.clock = GpuClock() if on_gpu else HostClock()
        backends = ("symm", PEER[task.device])
        # No device_id, because torch would then have NCCL split a group of another backend.
        init: Any = {"init_method": task.rendezvous, "rank": rank, "world_size": task.world, "timeout": GROUP_TIMEOUT}
        dist.init_process_group("symm", **init)
        self.groups = {backend: new_group(backend=backend, timeout=GROUP_TIMEOUT) for backend in backends}
        self.hidden, wide = WIDTHS[task.device]
        self.widths = (self.hidden // task.world, wide // task.world)
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size if on_gpu else 0
        self.layers = distinct_layers(sum(self.widths) * self.hidden * 2, cache)
        torch.manual_seed(rank)
        self.weights = [[self._random(self.hidden, k) * k**-0.5 for k in self.widths] for _ in range(self.layers)]
        self.weight = torch.ones(self.hidden, device=self.device, dtype=torch.bfloat16)

    def _random(self, *size: int) -> torch.Tensor:
        return torch.randn(size, device=self.device, dtype=torch.bfloat16)

    def token(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns normed rows and residual after all layers."""
        normed, residual = self.rows, self.rows.clone()
        own = slice(self.rank * self.widths[0], (self.rank + 1) * self.widths[0])
        for layer in range(self.task.layers):
            out, down = self.weights[layer % self.layers]
            normed, residual = step(F.linear(normed[:, own], out), residual, self.weight)
            normed, residual = step(F.linear(self.activated, down), residual, self.weight)
        return normed, residual

    def reduced(self, backend: str, after: Step) -> Step:
        """Returns a step that runs an all-reduce, and then ``after``."""
        group = self.groups[backend]

        def step(part: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
            dist.all_reduce(part, group=group)
            return after(part, residual, weight)

        return step

    def fused(self, part: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
        """Calls the fused operator."""
        torch.ops.symm.all_reduce_add_rms_norm_(part, residual, weight, EPS, self.groups["symm"].group_name)
        return part, residual

    def together(self, body: Callable[[], str | None]) -> str | None:
        """Runs ``body`` on all ranks, which start together; returns the error of any rank on all ranks."""
        self.meeting.align()
        try:
            error = body()
            self.clock.settle()
        except Exception as failure:
            error = in_a_line(failure)
        return next(iter(self.meeting.agree(self.rank, error)), None)

    def measure(self, batch: int) -> Finished:
        """Measures ``batch`` on all sides. Called by all ranks."""
        task = self.task
        notes: dict[str, str] = {}
        torch.manual_seed(task.world)  # the residual is the same on all ranks
        self.rows, self.activated = self._random(batch, self.hidden), self._random(batch, self.widths[1])
        compiled: Any = norm
        if task.device == "cuda":
            torch._dynamo.reset()
            compiled = torch.compile(norm, dynamic=False)

            def compiles() -> str | None:
                return None if compiled(self.rows.clone(), self.rows, self.weight) else "no result"

            error = self.together(compiles)
            if error is not None:
                notes["norm"], compiled = f"eager, for it was not compiled: {error}", norm
        steps: dict[str, Step] = {WITHOUT: compiled, FUSED: self.fused}
        steps |= {backend: self.reduced(backend, compiled) for backend in self.groups}
        wanted = [rows.clone() for rows in self.token(self.reduced(PEER[task.device], norm))]
        ready: dict[str, tuple[GpuCall, torch.cuda.CUDAGraph | None]] = {}
        for side in task.sides:

            def prepare(side: str = side) -> str | None:
                call = self._call(side, steps[side], wanted)
                call.run()
                self.clock.settle()
                wrong = call.check(1)
                ready[side] = call, self.clock.capture(call.run, 1) if self.clock.has_graphs else None
                return wrong

            error = self.together(prepare)
            if error is None:
                error = self.together(partial(self._again, *ready[side]))
            if error is not None:
                notes[side] = error
                ready.pop(side, None)
        mode = "graph" if self.clock.has_graphs else "eager"
        for turn in range(task.turns):
            for side in list(ready) if turn % 2 == 0 else list(ready)[::-1]:

                def sample(side: str = side, turn: int = turn) -> None:
                    call, graph = ready[side]
                    us = self.clock.replay_us(graph) if graph is not None else self.clock.eager_us(call, 1)
                    self.meeting.note(task.sides.index(side), mode, self.rank, turn, us)

                error = self.together(sample)
                if error is not None:
                    notes[side] = error
                    del ready[side]
        for side in list(ready):
            error = self.together(partial(self._again, *ready[side]))
            if error is not None:
                notes[side] = error
                del ready[side]
        turns = {side: self.meeting.slowest(task.sides.index(side), mode, task.turns) for side in ready}
        self.meeting.align()
        ready.clear()
        gc.collect()
        return Finished(batch, batch * self.hidden * 2, turns, notes)

    def _call(self, side: str, step: Step, wanted: list[torch.Tensor]) -> GpuCall:
        """Returns the call of one token on ``side``; its ``check`` compares the rows with ``wanted``."""
        results: list[torch.Tensor] = []

        def run() -> None:
            results[:] = self.token(step)

        def check(_calls: int) -> str | None:
            for name, got, right in zip(("normed", "residual"), results, wanted, strict=True):
                off = float((got.float() - right.float()).norm() / right.float().norm())
                if side != WITHOUT and not off <= TOLERANCE:
                    return f"wrong: {name} is off by {off:.3g} of its norm"
            return None

        return GpuCall(lambda: [result.zero_() for result in results], run, check)

    def _again(self, call: GpuCall, graph: torch.cuda.CUDAGraph | None) -> str | None:
        call.reset()
        (graph.replay if graph is not None else call.run)()
        self.clock.settle()
        return call.check(1)


def enter(rank: int, task: Task, meeting: Meeting, results: Queue[Finished]) -> None:
    """Entry point of a rank process; rank 0 reports."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    if task.device == "cuda":
        torch.cuda.set_device(rank)
    decoder = Rank(rank, task, meeting)
    for batch in task.batches:
        finished = decoder.measure(batch)
        if rank == 0:
            results.put(finished)
    meeting.align()
    with suppress(RuntimeError):
        dist.destroy_process_group()

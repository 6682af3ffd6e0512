"""Calls while products run on the same GPU: in one CUDA graph, on two branches.

A side's calls are made as FSDP2 makes them: on a branch of high priority, and the input of an all-gather is a part of
its output. Matrix products are on the other branch. Three graphs are replayed in turn: the
calls alone, the products alone, and both. Each chain takes about `CHAIN_US`. Graphs leave out the host's time for
enqueueing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch

from .cell import CellBench, calls_for
from .inputs import GpuCall, Setting
from .process import Process
from .record import Cell, GpuFigure, Measured, Overlap

#: Duration in µs of the chain of calls, and of the chain of products.
CHAIN_US = 7000.0
MIN_CALLS, MAX_CALLS = 2, 2000
#: Rows, inner and columns of a product in bfloat16; about 0.75 ms on an H100.
SHAPE = (8192, 4096, 8192)
#: The same for CPU tensors.
SMALL = (64, 32, 64)
#: The graphs of a side by the mode under which their samples are noted.
Graphs: TypeAlias = dict[str, Callable[[], object]]


def chain_for(us: float) -> int:
    """Returns the number of calls or products in a chain, if one takes ``us``."""
    return max(MIN_CALLS, min(MAX_CALLS, round(CHAIN_US / max(us, 1e-3))))


def measure(process: Process, cell: Cell, turns: int, seed: int) -> Measured:
    """Measures ``cell`` on all sides of ``process``, with products and without. Called by all ranks."""
    return _Loaded(process, cell, turns, seed).measured()


@dataclass
class _Branches:
    """Records calls and products on two branches."""

    device: torch.device

    def __post_init__(self) -> None:
        rows, inner, columns = SHAPE if self.device.type == "cuda" else SMALL
        made: dict[str, Any] = {"device": self.device, "dtype": torch.bfloat16}
        self._factors = torch.randn(rows, inner, **made), torch.randn(inner, columns, **made)
        self._product = torch.empty(rows, columns, **made)
        if self.device.type == "cuda":
            streams: Any = torch.cuda.Stream
            self._main, self._side = streams(priority=0), streams(priority=-1)

    def multiply(self) -> None:
        """Computes one product."""
        torch.mm(*self._factors, out=self._product)

    def recorded(self, calls: Callable[[], object] | None, products: int) -> Callable[[], object]:
        """Returns a function that runs both branches; on CPUs one after the other."""

        def multiply() -> None:
            for _ in range(products):
                self.multiply()

        def in_turn() -> None:
            if calls is not None:
                calls()
            multiply()

        if self.device.type != "cuda":
            return in_turn
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # Allow unsafe calls of other threads during the capture, because the groups have threads that query events.
        with torch.cuda.graph(graph, stream=self._main, capture_error_mode="thread_local"):
            if calls is not None:
                self._side.wait_stream(self._main)
                with torch.cuda.stream(self._side):
                    calls()
            multiply()
            if calls is not None:
                self._main.wait_stream(self._side)
        return graph.replay


class _Loaded(CellBench):
    """A cell whose sides run while products run."""

    def measured(self) -> Measured:
        """Measures all sides."""
        self._branches = _Branches(self._process.device)
        self._products = self._agreed(self._timed(self._branches.multiply))
        self._chains: dict[int, int] = {}
        ready: dict[int, Graphs] = {}
        for number, side in list(self._process.sides.items()):
            build = self._builder(side)
            if build is None:
                continue
            self._figures[side.name] = GpuFigure()
            call = self._prepared(number, build)
            graphs = self._recorded(number, call) if call is not None else None
            if graphs is not None:
                ready[number] = graphs
        self._alternate(
            ready, lambda number: {mode: partial(self._timed, graph) for mode, graph in ready[number].items()}
        )
        for number in ready:
            alone, products, together = (
                statistics.median(self._meeting.slowest(number, mode, self._turns))
                for mode in ("graph", "products", "together")
            )
            figure = self._figure(number)
            figure.overlap = Overlap(self._chains[number], alone, products, together)
            figure.graph_us = figure.overlap.call_us
        return Measured(self._cell, calls_for(self._cell.size), self._figures)

    def _setting(self, number: int) -> Setting:
        return replace(super()._setting(number), in_place=True)

    def _timed(self, run: Callable[[], object]) -> float:
        return self._clock.eager_us(GpuCall(lambda: None, run, lambda _calls: None), 1)

    def _agreed(self, us: float) -> int:
        """Returns the length of a chain of calls, which rank 0 derives from its time for all ranks."""
        return self._meeting.decide(self._process.rank, chain_for(us))

    def _recorded(self, number: int, call: GpuCall) -> Graphs | None:
        """Returns the three graphs, after one replay of each."""
        graphs: Graphs = {}
        side = self._process.sides[number]
        times: list[float] = []

        def repeated(count: int) -> Callable[[], None]:
            def run() -> None:
                for _ in range(count):
                    call.run()

            return run

        def time_few() -> None:
            with side.capturing():
                few = self._branches.recorded(repeated(calls_for(self._cell.size)), 0)
            times.append(self._timed(few) / calls_for(self._cell.size))
            self._process.settle(side)

        def record() -> None:
            calls = repeated(self._chains[number])
            with side.capturing():
                graphs["graph"] = self._branches.recorded(calls, 0)
                graphs["products"] = self._branches.recorded(None, self._products)
                graphs["together"] = self._branches.recorded(calls, self._products)

        def replay() -> None:
            for graph in graphs.values():
                graph()
            self._process.settle(side)

        for step in (time_few, record, replay):
            if not self._succeeds(number, step, "in a graph: "):
                return None
            if step is time_few:
                self._chains[number] = self._agreed(times[0])
        return graphs

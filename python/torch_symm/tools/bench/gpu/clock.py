"""The duration of calls: between CUDA events, in graphs and eagerly; by the host's clock for CPU tensors."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from .inputs import GpuCall

LEAD_CALLS = 3
HOST_CALLS = 100


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class GpuClock:
    """Times calls on this process's GPU."""

    has_graphs = True

    def capture(self, run: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
        """Returns a graph of ``calls`` calls of ``run``, which must have been called before."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # Allow unsafe calls of other threads during the capture, because the groups have threads that query events.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(calls):
                run()
        return graph

    def settle(self) -> None:
        """Returns once the GPU has finished everything."""
        torch.cuda.synchronize()

    def replay_us(self, graph: torch.cuda.CUDAGraph) -> float:
        """Returns the time of one replay that follows another."""
        before, after = _event(), _event()
        graph.replay()
        before.record()
        graph.replay()
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after)) * 1e3

    def eager_us(self, call: GpuCall, calls: int) -> float:
        """Returns the time of ``calls`` calls that follow a few others."""
        before, after = _event(), _event()
        for _ in range(LEAD_CALLS):
            call.run()
        before.record()
        for _ in range(calls):
            call.run()
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after)) * 1e3

    def host_us(self, call: GpuCall) -> float:
        """Returns the host's time in one of many calls, which the GPU runs later."""
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        for _ in range(HOST_CALLS):
            call.run()
        spent = time.perf_counter_ns() - start
        torch.cuda.synchronize()
        return spent / 1e3 / HOST_CALLS


class HostClock(GpuClock):
    """The clock for CPU tensors, whose calls have finished when they return. Has no graphs."""

    has_graphs = False

    def settle(self) -> None:
        """Does nothing, because no call on CPU tensors is pending."""

    def eager_us(self, call: GpuCall, calls: int) -> float:
        """Returns the time of ``calls`` calls that follow a few others."""
        for _ in range(LEAD_CALLS):
            call.run()
        start = time.perf_counter_ns()
        for _ in range(calls):
            call.run()
        return (time.perf_counter_ns() - start) / 1e3

    def host_us(self, call: GpuCall) -> float:
        """Returns the time of one of many calls."""
        return self.eager_us(call, HOST_CALLS) / HOST_CALLS

"""One rank process: visits the points, times calls; rank 0 reports to the launcher."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from multiprocessing.queues import Queue
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor

from torch_symm._torch_compat import new_group
from torch_symm.tools.bench.gpu.clock import GpuClock

from .measurement_points import COPY, ITEM, SLICE, STEP, Point

GROUP_TIMEOUT = timedelta(seconds=120)
#: Seconds without a message after which the launcher ends the ranks: time to join, and for a call to fail.
STILL_S = 2 * GROUP_TIMEOUT.total_seconds() + 60.0
#: Minimum duration of a batch, so that the time to read the clock, or to record an event, is negligible.
BATCH_US, MOST_BATCH = 100.0, 16
FEWEST, MOST = 3, 100
#: Calls of at least this duration are made less often, and the skew of their start is negligible.
LONG_US, FEWEST_LONG = 20_000.0, 2
#: Number of calls in a CUDA graph, so many that the time to start the graph is negligible.
GRAPH_CALLS = 20
#: A broadcast that identifies the machine's state: size, batches, calls of each (``docs/design/cost-model.md``).
REFERENCE_BYTES, REFERENCE_BATCHES, REFERENCE_CALLS = 512 << 10, 3, 8


@dataclass(frozen=True)
class TuneTask:
    """The task of all ranks. ``seconds``: for all visits together, about.

    ``graphs``: calls are captured into CUDA graphs, whose replays are timed, so that the host's time is left out.
    """

    world: int
    device: str
    points: tuple[Point, ...]
    visits: int
    seconds: float
    rendezvous: str
    graphs: bool = False


@dataclass(frozen=True)
class Visit:
    """One visit of the point with number ``index``: the median of its bursts in µs.

    ``reference_us``: the time of the reference before or after the visit, whichever is longer; 0 on GPUs.
    """

    index: int
    us: float
    reference_us: float


@dataclass(frozen=True)
class TuneDone:
    """The last message."""


Message: TypeAlias = Visit | TuneDone


def main(rank: int, task: TuneTask, results: Queue[Message]) -> None:
    """Entry point of a rank process."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    device = torch.device("cpu")
    if task.device == "cuda":
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank)
    dist.init_process_group(
        "symm", init_method=task.rendezvous, rank=rank, world_size=task.world, timeout=GROUP_TIMEOUT
    )
    started = time.monotonic()
    caller = _Caller(rank, task, device)
    left = [(turn, index) for turn in range(task.visits) for index in range(len(task.points))]
    before = caller.reference()
    for number, (turn, index) in enumerate(left):
        budget_s = (task.seconds - (time.monotonic() - started)) / (len(left) - number)
        us = caller.visit(index, task.points[index], budget_s, must=turn == 0)
        if us is None:
            break
        after = caller.reference()
        if rank == 0:
            results.put(Visit(index, us, max(before, after)))
        before = after
    if rank == 0:
        results.put(TuneDone())
    dist.destroy_process_group()


class _Caller:
    """This rank's groups and tensors."""

    def __init__(self, rank: int, task: TuneTask, device: torch.device) -> None:
        self._device, self._graphs = device, task.graphs
        self._groups: dict[int, dist.ProcessGroup] = {}
        self._meshes: dict[int, DeviceMesh] = {}
        for ranks in dict.fromkeys(point.ranks for point in task.points):
            for first in range(0, task.world, ranks):
                members = list(range(first, first + ranks))
                group = new_group(members, timeout=GROUP_TIMEOUT)
                if rank in members:
                    self._groups[ranks] = group
                    self._meshes[ranks] = DeviceMesh.from_group(group, device.type)
        count = max(point.bytes for point in task.points) // ITEM
        # Written once, because the system allocates memory on the first write.
        self._given = torch.zeros(count, dtype=torch.float32, device=device)
        self._got = torch.zeros(count, dtype=torch.float32, device=device)
        self._estimates: dict[int, float] = {}

    def reference(self) -> float:
        """Returns µs of a fixed exchange among all ranks, the same on all; 0 on GPUs, which are not shared."""
        if self._device.type != "cpu":
            return 0.0
        tensor = self._given[: REFERENCE_BYTES // ITEM]
        found = self._burst(lambda: (dist.broadcast(tensor, 0), None)[1], REFERENCE_BATCHES, REFERENCE_CALLS)
        return self._agreed(statistics.median(found))[0]

    def visit(self, index: int, point: Point, budget_s: float, must: bool) -> float | None:
        """Returns the median µs of a call, of the slowest rank of all groups, within about ``budget_s``.

        Returns ``None`` on all ranks if no time is left, unless ``must`` is true.
        """
        call, calls = self._call(point), 1
        if self._graphs:
            call, calls = self._recorded(call), GRAPH_CALLS
        estimate = self._estimates.get(index)
        if estimate is None:
            estimate = self._burst(call, 1, 1)[0]
        # All ranks must make the same number of calls.
        estimate, spent = self._agreed(estimate, -budget_s)
        budget_us = -spent * 1e6
        if budget_us <= 0 and not must:
            return None
        batch = int(min(MOST_BATCH, max(1.0, BATCH_US / max(estimate, 0.1))))
        if point.op in (STEP, SLICE):
            # Steps take the host's time, which differs between calls and between ranks.
            batch = MOST_BATCH
        fewest = FEWEST_LONG if estimate > LONG_US else FEWEST
        samples = int(min(MOST, max(fewest, budget_us / (estimate * batch) - 1)))
        dist.barrier()
        found = torch.tensor(self._burst(call, samples, batch), dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        slowest: list[float] = found.tolist()
        median = statistics.median(slowest)
        self._estimates[index] = median
        return median / calls

    def _recorded(self, call: Callable[[], None]) -> Callable[[], None]:
        """Returns a replay of :data:`GRAPH_CALLS` calls.

        The replay owns its graph, so the graph is freed before the groups are.
        """
        # The first call must run outside the capture, because it sets up the group and loads its kernels.
        call()
        return GpuClock().capture(call, GRAPH_CALLS).replay

    def _agreed(self, *values: float) -> list[float]:
        both = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(both, dist.ReduceOp.MAX)
        agreed: list[float] = both.tolist()
        return agreed

    def _burst(self, call: Callable[[], None], samples: int, batch: int) -> list[float]:
        """Returns µs per call of each of ``samples`` batches."""
        call()
        if self._device.type == "cuda":
            return self._on_gpu(call, samples, batch)
        stamps = [time.perf_counter_ns()]
        for _ in range(samples):
            for _ in range(batch):
                call()
            stamps.append(time.perf_counter_ns())
        return [(after - before) / 1e3 / batch for before, after in pairwise(stamps)]

    def _on_gpu(self, call: Callable[[], None], samples: int, batch: int) -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(samples + 1)]  # type: ignore[no-untyped-call]
        events[0].record()
        for event in events[1:]:
            for _ in range(batch):
                call()
            event.record()
        events[-1].synchronize()
        return [before.elapsed_time(after) * 1e3 / batch for before, after in pairwise(events)]

    def _call(self, point: Point) -> Callable[[], None]:
        if point.op in (STEP, SLICE):
            return self._step(point)
        group, count = self._groups[point.ranks], point.bytes // ITEM
        given, got, part = self._given[:count], self._got[:count], count // point.ranks
        first = dist.get_global_rank(group, 0)
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(given, group=group),
            "all_gather": lambda: dist.all_gather_into_tensor(got, given[:part], group=group),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(got[:part], given, group=group),
            "all_to_all": lambda: dist.all_to_all_single(got, given, group=group),
            "broadcast": lambda: dist.broadcast(given, first, group=group),
            COPY: lambda: got.copy_(given),
        }
        call = calls[point.op]
        return lambda: (call(), None)[1]

    def _step(self, point: Point) -> Callable[[], None]:
        placements: dict[str, Placement] = {"P": Partial(), "R": Replicate(), "S(0)": Shard(0)}
        local = self._given[: point.bytes // ITEM].view(point.ranks, -1)
        meta = TensorMeta(local.shape, local.stride(), local.dtype)
        mesh = self._meshes[point.ranks]
        source, target = (DTensorSpec(mesh, (placements[name],), meta) for name in point.op.split(" -> "))
        return lambda: (redistribute_local_tensor(local, source, target), None)[1]

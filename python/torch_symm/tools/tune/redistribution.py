"""The benefit of a cost model: is the redistribution that it finds cheapest the fastest one?

A case is a mesh, a tensor and two placements. Its plans are the paths from the first placement to the second in steps
along single mesh dimensions. A path has at most one step more than the mesh has dimensions. On a path, no two mesh
dimensions cut the same tensor dimension, because the order of the cuts would matter. Each plan is run as torch runs it.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor

from torch_symm.dtensor._cost import MeshTopoInfo, PriceSource, from_prices
from torch_symm.dtensor._redistribute_cost import local_bytes, price_step
from torch_symm.launch import ranks as launched
from torch_symm.launch.messages import reported_in_time

from .measurement_points import Point
from .rank import GROUP_TIMEOUT, STILL_S

State: TypeAlias = tuple[Placement, ...]
#: Range of the tensors' sizes, as powers of two.
SMALLEST, LARGEST = 16, 25
MOST_PLANS, REPEATS = 16, 15
MODELS: tuple[PriceSource, ...] = ("measured", "links", "torch")
#: Plans that are slower than the fastest by at most this factor are equally good.
AS_GOOD = 1.1
SEED = 20261121


@dataclass(frozen=True)
class Timed:
    """A plan: its states, its time in µs, and each model's price of it in µs."""

    states: tuple[str, ...]
    us: float
    prices: dict[str, float]


@dataclass(frozen=True)
class RedistributionCase:
    """A redistribution and its plans, the shortest first."""

    mesh: tuple[int, ...]
    bytes: int
    plans: tuple[Timed, ...]


@dataclass(frozen=True)
class RedistributionTask:
    """The task of all ranks."""

    world: int
    device: str
    cases: int
    profile: Path | None
    rendezvous: str


def measure(
    world: int, device: str, cases: int, profile: Path | None, on_visit: Callable[[Point, float], None]
) -> list[RedistributionCase]:
    """Times every plan of ``cases`` random redistributions.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank failed, for example for lack of a profile.
        StalledError: rank 0 finished no case for :data:`STILL_S`.
    """
    results = launched.queue()
    found: list[RedistributionCase] = []
    with tempfile.TemporaryDirectory(prefix="torch-symm-tune-") as folder:
        rendezvous = "symm+" + (Path(folder) / "rendezvous").as_uri()
        task = RedistributionTask(world, device, cases, profile, rendezvous)
        settings = {"SYMM_COST_PROFILE": str(profile)} if profile else {}
        with launched.started(main, (task, results), world, warm=True, settings=settings) as started:
            for case in reported_in_time(started, results, cases, STILL_S, STILL_S):
                found.append(case)
                on_visit(Point(world, "redistribute", case.bytes), min(plan.us for plan in case.plans))
    return found


def main(rank: int, task: RedistributionTask, results: Queue[RedistributionCase]) -> None:
    """Entry point of a rank process."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    warnings.simplefilter("ignore")
    if task.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "symm", init_method=task.rendezvous, rank=rank, world_size=task.world, timeout=GROUP_TIMEOUT
    )
    shapes = [(task.world,), *([(2, task.world // 2)] if task.world % 2 == 0 and task.world > 2 else [])]
    meshes = [init_device_mesh(task.device, shape) for shape in shapes]
    topos = {(mesh, source): _topo(mesh, source, task) for mesh in meshes for source in MODELS}
    draw = random.Random(SEED)
    for number in range(task.cases):
        mesh = meshes[number % len(meshes)]
        size, plans = _case(draw, mesh, task.world)
        specs = [[_spec(mesh, state, size) for state in plan] for plan in plans]
        prices = [{source: _price(plan, topos[mesh, source]) for source in MODELS} for plan in specs]
        times = _times(specs, task.device)
        if rank == 0:
            texts = [tuple(str(spec.placements) for spec in plan) for plan in specs]
            timed = tuple(itertools.starmap(Timed, zip(texts, times, prices, strict=True)))
            results.put(RedistributionCase(tuple(mesh.shape), 4 * math.prod(size), timed))
    dist.destroy_process_group()


def _topo(mesh: DeviceMesh, source: PriceSource, task: RedistributionTask) -> MeshTopoInfo:
    sizes = [mesh.size(dim) for dim in range(mesh.ndim)]
    profile = task.profile if source == "measured" else None
    topo = from_prices(mesh, sizes, source, task.world, task.world, profile)
    if topo is None:
        raise RuntimeError("there is no profile of this hardware: run `python -m torch_symm tune` first")
    return topo


def _case(draw: random.Random, mesh: DeviceMesh, world: int) -> tuple[tuple[int, int], list[list[State]]]:
    """Draws a tensor's size and the plans of a redistribution that has more than one."""
    sources: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Partial())
    while True:
        source, target = tuple(draw.choices(sources, k=mesh.ndim)), tuple(draw.choices(sources[:3], k=mesh.ndim))
        plans = sorted(_plans(source, target, mesh.ndim + 1), key=len)
        items = 2 ** draw.uniform(SMALLEST - 2, LARGEST - 2)
        rows = world * max(1, int(math.sqrt(items) * 2 ** draw.uniform(-2, 2)) // world)
        size = (rows, world * max(1, round(items / rows / world)))
        if len(plans) > 1 and _moves(plans[0]):
            kept = plans[:1] + draw.sample(plans[1:], min(MOST_PLANS, len(plans)) - 1)
            return size, sorted(kept, key=len)


def _moves(plan: Sequence[State]) -> bool:
    """Returns true if data must be exchanged, beyond cutting the data that every rank has."""
    pairs = zip(plan[0], plan[-1], strict=True)
    return any(before != after and not before.is_replicate() for before, after in pairs)


def _plans(source: State, target: State, steps: int) -> Iterator[list[State]]:
    """Yields all paths from ``source`` to ``target`` in at most ``steps`` steps, without repeating a state."""
    if not _clear(source) or not _clear(target):
        return

    def onwards(path: list[State]) -> Iterator[list[State]]:
        if path[-1] == target:
            yield path
        elif len(path) <= steps:
            for state in _neighbours(path[-1]):
                if state not in path:
                    yield from onwards([*path, state])

    yield from onwards([source])


def _clear(state: State) -> bool:
    cuts = [placement.dim for placement in state if isinstance(placement, Shard)]
    return len(cuts) == len(set(cuts))


def _neighbours(state: State) -> Iterator[State]:
    for dim, before in enumerate(state):
        for after in (Replicate(), Shard(0), Shard(1)):
            new = (*state[:dim], after, *state[dim + 1 :])
            if after != before and _clear(new):
                yield new


def _spec(mesh: DeviceMesh, state: State, size: tuple[int, int]) -> DTensorSpec:
    return DTensorSpec(mesh, state, TensorMeta(torch.Size(size), (size[1], 1), torch.float32))


def _price(plan: Sequence[DTensorSpec], topo: MeshTopoInfo) -> float:
    total = 0.0
    for before, after in itertools.pairwise(plan):
        pairs = enumerate(zip(before.placements, after.placements, strict=True))
        dim, (source, target) = next((dim, pair) for dim, pair in pairs if pair[0] != pair[1])
        total += price_step(source, target, dim, local_bytes(before), topo).us
    return total


def _times(plans: Sequence[Sequence[DTensorSpec]], device: str) -> list[float]:
    """Returns µs of each plan on the slowest rank: the minimum of several runs, with plans taking turns."""
    rows, columns = plans[0][0].shape
    cuts = [(placement, plans[0][0].mesh.size(dim)) for dim, placement in enumerate(plans[0][0].placements)]
    for placement, ranks in cuts:
        rows //= ranks if placement == Shard(0) else 1
        columns //= ranks if placement == Shard(1) else 1
    local = torch.zeros(rows, columns, device=device)
    runs: list[list[float]] = [[] for _ in plans]
    for _ in range(REPEATS + 1):
        for times, plan in zip(runs, plans, strict=True):
            dist.barrier()
            _settle(device)
            start = time.perf_counter_ns()
            held = local
            for before, after in itertools.pairwise(plan):
                held = redistribute_local_tensor(held, before, after)
            _settle(device)
            times.append((time.perf_counter_ns() - start) / 1e3)
    found = torch.tensor([times[1:] for times in runs], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    least: list[float] = found.min(dim=1).values.tolist()
    return least


def _settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


HEADINGS = ("mesh", "model", "cases", "fastest", f"within {AS_GOOD - 1:.0%}", "median loss", "worst loss")


def summary(cases: Sequence[RedistributionCase]) -> list[list[str]]:
    """Returns rows of a table. Loss: how much longer a model's cheapest plan takes than the fastest."""
    rows = []
    for mesh in [*dict.fromkeys(case.mesh for case in cases), None]:
        part = [case for case in cases if mesh is None or case.mesh == mesh]
        for model in MODELS:
            losses = [loss(case, model) for case in part]
            fastest, good = (sum(each <= most for each in losses) / len(losses) for most in (1.0, AS_GOOD))
            shown = [f"{fastest:.0%}", f"{good:.0%}", f"{statistics.median(losses) - 1:.0%}", f"{max(losses) - 1:.0%}"]
            name = " × ".join(map(str, mesh)) if mesh else "all"
            rows.append([name, model, str(len(part)), *shown])
    return rows


def loss(case: RedistributionCase, model: str) -> float:
    """Returns the time of the plan that ``model`` finds cheapest, the shortest of equals, over the fastest time."""
    cheapest = min(case.plans, key=lambda plan: plan.prices[model])
    return cheapest.us / min(plan.us for plan in case.plans)

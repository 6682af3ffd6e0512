"""``tune --inter-node``: the speed of the network between nodes, and the sizes at which calls change algorithms.

Started by torchrun on all nodes. The network is measured with groups like rails, one for each local rank: of Gloo for
CPU tensors, of NCCL for CUDA tensors. The thresholds are found by calls of groups that differ in one threshold and take
turns.
"""

from __future__ import annotations

import math
import os
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torch_symm._native import load
from torch_symm._torch_compat import new_group

from . import profile
from .measurement_points import ITEM, Point
from .report import say
from .thresholds import WORTH, choose

GROUP_TIMEOUT = timedelta(seconds=120)
#: Size of the first exchange of every call, in bytes.
SLOT = 4096
#: Size sent to each other node to measure the rate, in bytes.
LONG = 4 << 20
#: Thresholds above and below the size of every call.
ALL, NONE = 1 << 30, 0
#: Number of rounds, and maximum number of calls of a group in a round. In each round every group is measured once.
ROUNDS, MOST = 5, 20


@dataclass(frozen=True)
class Kind:
    """The parameters of the measurement on a device.

    Attributes:
        backend: Backend of torch that connects nodes.
        usual: Default thresholds of groups without measurements, as in ``src/coll/cost/network.rs``.
        around: Sizes of the calls by which ``multi_rail_bytes`` and ``gather_bytes`` are found, in bytes.
        turns: Sizes of the calls by which ``chunk_bytes`` is found, in bytes.
        pieces: Values of ``chunk_bytes`` that are compared.
    """

    backend: str
    usual: Mapping[str, int]
    around: tuple[int, ...]
    turns: tuple[int, ...]
    pieces: tuple[int, ...]


KINDS = {
    "cpu": Kind(
        "gloo",
        {"multi_rail_bytes": 64 << 10, "chunk_bytes": 512 << 10, "gather_bytes": 256 << 10},
        tuple(16 << 10 << shift for shift in range(7)),
        (8 << 20,),
        (256 << 10, 512 << 10, 1 << 20, 2 << 20),
    ),
    "cuda": Kind(
        "nccl",
        {"multi_rail_bytes": 64 << 10, "chunk_bytes": 16 << 20, "gather_bytes": 256 << 10},
        tuple(16 << 10 << shift for shift in range(9)),
        (128 << 20,),
        (4 << 20, 16 << 20, 64 << 20),
    ),
}


@dataclass(frozen=True)
class Layout:
    """The ranks of each node of the job, in order; ``local``: this rank's index among the ranks of its node."""

    nodes: list[list[int]]
    local: int

    @property
    def rails(self) -> int:
        """Number of local ranks that all nodes have."""
        return min(map(len, self.nodes))


def layout() -> Layout:
    """Returns the location of the ranks of the default group."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, load()._node_id())
    nodes: dict[str, list[int]] = {}
    for rank, node in enumerate(told):
        nodes.setdefault(node, []).append(rank)
    own = nodes[told[dist.get_rank()]]
    return Layout(list(nodes.values()), own.index(dist.get_rank()))


class Clock:
    """Times calls of all ranks; the slowest rank counts. ``seconds``: total time, about."""

    def __init__(self, seconds: float, parts: int, device: str) -> None:
        self._budget_us = seconds / parts * 1e6
        self._device = device

    def compare(self, calls: Sequence[Callable[[], None]]) -> list[float]:
        """Returns µs of each of ``calls``, which take turns: medians over rounds."""
        found: list[list[float]] = [[] for _ in calls]
        estimates = self._agreed([self._once(call, 1) for call in calls])
        repeats = [max(1, min(MOST, int(self._budget_us / len(calls) / ROUNDS / max(us, 1.0)))) for us in estimates]
        for _ in range(ROUNDS):
            for number, call in enumerate(calls):
                found[number].append(self._once(call, repeats[number]))
        slowest = self._agreed([us for times in found for us in times])
        return [statistics.median(slowest[at : at + ROUNDS]) for at in range(0, len(slowest), ROUNDS)]

    def _once(self, call: Callable[[], None], repeats: int) -> float:
        call()
        self._end()
        dist.barrier()
        start = time.perf_counter_ns()
        for _ in range(repeats):
            call()
        self._end()
        return (time.perf_counter_ns() - start) / 1e3 / repeats

    def _end(self) -> None:
        """Returns once all enqueued work has ended."""
        if self._device == "cuda":
            torch.cuda.synchronize()

    def _agreed(self, values: list[float]) -> list[float]:
        slowest = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        agreed: list[float] = slowest.tolist()
        return agreed


def measure(seconds: float, device: str, **changed: Any) -> dict[str, Any]:
    """Measures the entry ``inter_node`` of a profile, the same on all ranks of the multi-node default group.

    Args:
        seconds: Time for all measurements, about.
        device: Device of the tensors: ``"cpu"`` or ``"cuda"``, the current GPU.
        changed: Attributes of ``Kind`` that replace the usual ones.
    """
    placed, kind = layout(), replace(KINDS[device], **changed)
    searches = 1 + (placed.rails > 1) + (len(placed.nodes) > 2)
    clock = Clock(seconds, placed.rails * 2 + searches * len(kind.around) * 2, device)
    search = Search(clock, kind, device)
    rails = _rails(placed, clock, kind, device)
    thresholds = {**kind.usual, "chunk_bytes": search.piece()}
    if placed.rails > 1:
        thresholds["multi_rail_bytes"] = search.limit("multi_rail_bytes", placed.rails)
    if len(placed.nodes) > 2:
        thresholds["gather_bytes"] = search.limit("gather_bytes", placed.rails)
    # For GPUs, the price is per GPU.
    sharing = placed.rails if device == "cuda" else 1
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "nodes": len(placed.nodes),
        "backend": kind.backend,
        "gb_per_s": round(rails[-1]["gb_per_s"] / sharing, 4),
        "us": rails[0]["us"],
        "rails": rails,
        "thresholds": thresholds,
    }


def _rails(placed: Layout, clock: Clock, kind: Kind, device: str) -> list[dict[str, Any]]:
    """Measures the speed of one rail, of two, and so on up to all rails."""
    nodes, groups = len(placed.nodes), []
    for local in range(placed.rails):
        members = [ranks[local] for ranks in placed.nodes]
        groups.append(dist.new_group(members, backend=kind.backend, timeout=GROUP_TIMEOUT))
    count = LONG * nodes
    given, got, shown, seen = (
        torch.zeros(length, dtype=torch.uint8, device=device) for length in (count, count, SLOT, SLOT * nodes)
    )
    found = []
    for rails in range(1, placed.rails + 1):
        works = placed.local < rails
        group = groups[placed.local] if works else None

        def trip(group: Any = group) -> None:
            if group is not None:
                dist.all_gather_into_tensor(seen, shown, group=group)

        def bring(group: Any = group) -> None:
            if group is not None:
                dist.all_to_all_single(got, given, group=group)

        us, long_us = clock.compare([trip, bring])
        rate = rails * (nodes - 1) * LONG / max(long_us - us, 1.0) / 1e3
        found.append({"rails": rails, "gb_per_s": round(rate, 4), "us": round(us, 1)})
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return found


OPS = ("all_reduce", "reduce_scatter")


class Search:
    """Finds thresholds of ``kind`` by calls on ``device``."""

    def __init__(self, clock: Clock, kind: Kind, device: str) -> None:
        self._clock, self._kind, self._device = clock, kind, device

    def _tried(self, **changed: int) -> Any:
        """Makes a group of all ranks with the usual thresholds, except for those ``changed``."""
        values = {**self._kind.usual, **changed}
        native = load()
        native._set_trial_thresholds(values["multi_rail_bytes"], values["chunk_bytes"], values["gather_bytes"])
        try:
            return new_group(list(range(dist.get_world_size())), timeout=GROUP_TIMEOUT)
        finally:
            native._set_trial_thresholds(0, 0, 0)

    def _calls(self, group: Any, size: int) -> list[Callable[[], None]]:
        """Returns the collectives that judge a threshold, on tensors of ``size`` bytes."""
        world = dist.get_world_size()
        count = max(1, size // ITEM // world) * world
        whole, part = (torch.zeros(length, device=self._device) for length in (count, count // world))
        return [
            lambda: (dist.all_reduce(whole, group=group), None)[1],
            lambda: (dist.reduce_scatter_tensor(part, whole, group=group), None)[1],
        ]

    def limit(self, name: str, rails: int) -> int:
        """Returns the largest size at which the algorithm for short calls was faster.

        ``gather_bytes`` counts a rail's slice.
        """
        below, above = self._tried(**{name: ALL}), self._tried(**{name: NONE})
        parts = rails if name == "gather_bytes" else 1
        ops = OPS[:1] if name == "gather_bytes" else OPS
        times: tuple[dict[Point, float], dict[Point, float]] = ({}, {})
        for size in self._kind.around:
            for place, op in enumerate(ops):
                both = self._clock.compare([self._calls(group, size)[place] for group in (below, above)])
                for found, us in zip(times, both, strict=True):
                    found[Point(dist.get_world_size(), op, size)] = us
        for group in (below, above):
            dist.destroy_process_group(group)

        def length(point: Point) -> int:
            return point.bytes // parts

        usual = self._kind.usual[name]
        best = choose(list(times[0]), length, *times, lambda point: length(point) <= usual)
        return usual if best is None else best

    def piece(self) -> int:
        """Returns the fastest length of pipeline steps for long calls, or the usual length if that is about as fast."""
        pieces, sizes, usual = self._kind.pieces, self._kind.turns, self._kind.usual["chunk_bytes"]
        groups = [self._tried(chunk_bytes=piece) for piece in pieces]
        costs = dict.fromkeys(pieces, 0.0)
        for size in sizes:
            for place in range(len(OPS)):
                found = self._clock.compare([self._calls(group, size)[place] for group in groups])
                for piece, us in zip(pieces, found, strict=True):
                    costs[piece] += math.log(us)
        for group in groups:
            dist.destroy_process_group(group)
        best = min(pieces, key=lambda piece: costs[piece])
        worth = costs[usual] - costs[best] >= WORTH * len(sizes) * len(OPS)
        return best if worth else usual


def node_key(placed: Layout, device: str) -> profile.Key:
    """Returns the key of this node's profile."""
    own = next(ranks for ranks in placed.nodes if dist.get_rank() in ranks)
    return profile.key(device, len(own))


def output_errors(placed: Layout, output: Path | None, device: str) -> list[str]:
    """Returns the nodes that cannot write their profile, and why; the same on all ranks."""
    error = None if output or placed.local else profile.output_error(node_key(placed, device))
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error and f"{socket.gethostname()}: {error}")
    return [error for error in errors if error]


def write(placed: Layout, found: Mapping[str, Any], output: Path | None, device: str) -> Path | None:
    """Writes ``found`` into this node's profile, keeping other entries; returns its path, if it has one.

    Only the first rank of each node writes; to ``output``, if it is given, only rank 0.
    """
    here = node_key(placed, device)
    path = output or profile.own_path(here)
    if dist.get_rank() == 0 if output else placed.local == 0:
        assert path is not None, "output_errors would have said so"
        kept = profile.known(path) or profile.bare(here, {})
        profile.write(path, {**kept, "inter_node": dict(found)})
    return path


def run(seconds: float, output: Path | None, device: str) -> int:
    """Measures in the job that torchrun has started; returns 0 on success."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        os.environ.setdefault("SYMM_INTER_NODE_BACKEND", "auto")
    else:
        os.environ.setdefault("SYMM_INTER_NODE_BACKEND", "gloo")
    dist.init_process_group("symm" if device == "cuda" else "cpu:symm", timeout=GROUP_TIMEOUT)
    try:
        placed = layout()
        first = dist.get_rank() == 0
        if len(placed.nodes) < 2:
            if first:
                say(f"all ranks are on one node, {socket.gethostname()}: there is no network to measure")
            return 1
        if first:
            ranks = " + ".join(str(len(node)) for node in placed.nodes)
            say(f"{len(placed.nodes)} nodes of {ranks} ranks; load {os.getloadavg()[0]:.2f}")
        if errors := output_errors(placed, output, device):
            if first:
                say("\n".join(errors))
            return 1
        found = measure(seconds, device)
        path = write(placed, found, output, device)
        if first:
            for rails in found["rails"]:
                say(f"by {rails['rails']}: {rails['gb_per_s']} GB/s of a node, {rails['us']} µs a trip")
            say(", ".join(f"{name} = {value}" for name, value in found["thresholds"].items()))
            say(f"written to {path}")
        dist.barrier()
        return 0
    finally:
        dist.destroy_process_group()

"""Rows on GPUs: the results of `torch_symm.tools.bench.gpu`, in the form of nccl-tests."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from . import links, machine
from .gpu.contenders import cpu_sides, sides_with_products
from .gpu.engines import all_sides
from .gpu.exact_inputs import IN_PLACE
from .gpu.launch import PATIENT_SETTINGS, STILL_S, GpuOptions, measure
from .gpu.rank_sync import MAX_TURNS
from .gpu.record import Cell, GpuAbsent, Measured
from .record import Absent, Figure, Found
from .request import REDUCING, ROOTED, Wanted

#: Sides of the benchmark, by their names in ``--against``.
AGAINST = {
    "nccl": ("nccl", "nccl window"),
    "torch": ("torch one-shot", "torch two-shot", "torch low contention"),
    "vllm": ("vllm",),
    "flashinfer": ("flashinfer", "flashinfer one-shot"),
    "gloo": ("gloo",),
}

#: Turns of each side while products run.
PRODUCT_TURNS = 5


@dataclass(frozen=True)
class How:
    """``calls``: approximate number of timed calls; ``graph``: time them in a CUDA graph; ``limit``: measure links."""

    calls: int
    warmup: int
    checks: int
    graph: bool = False
    limit: bool = False
    still_s: float = STILL_S
    device: str = "cuda"
    seconds: float = float("inf")


def run(rows: Sequence[Wanted], against: Sequence[str], how: How) -> Iterator[Found | Absent]:
    """Yields the rows, and sides that are not available.

    Raises:
        torch.multiprocessing.ProcessRaisedException, ProcessExitedException, StalledError: a rank failed outside of any
            side, or hangs there.
    """
    makers = all_sides if how.device == "cuda" else cpu_sides
    for name, value in (machine.MULTICAST_SETTINGS | PATIENT_SETTINGS).items():
        os.environ.setdefault(name, value)
    known = makers()
    sides = ["symm", *(side for name in against for side in AGAINST.get(name, ()) if side in known)]
    for name in against:
        if not any(side in known for side in AGAINST.get(name, ())):
            yield Absent(name, f"is not measured on {how.device} tensors")
    world = rows[0].world
    options = GpuOptions(
        world=world,
        device=how.device,
        makers=makers,
        sides=tuple(sides),
        ops=(),
        dtypes=(),
        sizes=(),
        seconds=how.seconds,
        # A turn has 20 calls, or 5 long calls; a median needs three turns.
        turns=min(MAX_TURNS, max(3, -(-how.calls // 20))),
        still_s=how.still_s,
        warmup=how.warmup,
        checks=how.checks,
        rows=tuple(_cell(wanted) for wanted in rows),
    )
    rate = _link_rate(world) if how.limit and how.device == "cuda" else 0.0
    for message in measure(options):
        yield Absent(message.side, message.reason) if isinstance(message, GpuAbsent) else _found(message, how, rate)


def run_with_products(rows: Sequence[Wanted], against: Sequence[str], how: How) -> Iterator[GpuAbsent | Measured]:
    """Yields the rows, measured while products run, and sides that are not available. Raises as :func:`run`."""
    for name, value in (machine.MULTICAST_SETTINGS | PATIENT_SETTINGS).items():
        os.environ.setdefault(name, value)
    on_gpus = how.device == "cuda"
    sides = ["symm", "symm pool", "nccl", "copies"] if on_gpus else ["symm"]
    sides += [side for name in against for side in AGAINST.get(name, ()) if side not in sides]
    yield from measure(
        GpuOptions(
            world=rows[0].world,
            device=how.device,
            makers=sides_with_products if on_gpus else cpu_sides,
            sides=tuple(sides),
            ops=(),
            dtypes=(),
            sizes=(),
            seconds=how.seconds,
            turns=min(MAX_TURNS, max(PRODUCT_TURNS, -(-how.calls // 20))),
            still_s=how.still_s,
            warmup=how.warmup,
            checks=how.checks,
            rows=tuple(_cell(wanted) for wanted in rows),
            products=True,
        )
    )


def _cell(wanted: Wanted) -> Cell:
    redop = "sum" if wanted.redop == "none" else wanted.redop
    return Cell(wanted.op, wanted.dtype, wanted.world, wanted.size, wanted.size, redop, max(0, wanted.root))


def _link_rate(world: int) -> float:
    """Bytes per second of a plain copy over the slowest link between two of the first ``world`` GPUs; 0 if unknown."""
    found = [pair for pair in links.measured().messages if "gb_per_s" in pair]
    rates = [pair["gb_per_s"] for pair in found if pair["from"] != pair["to"] and max(pair["from"], pair["to"]) < world]
    return min(rates, default=0.0) * 1e9


def _found(measured: Measured, how: How, rate: float) -> Found:
    cell = measured.cell
    root = cell.root if cell.op in ROOTED else -1
    redop = cell.redop if cell.op in REDUCING else "none"
    wanted = Wanted(cell.op, cell.dtype, redop, root, cell.bytes, cell.world)
    placement = "in_place" if cell.op in IN_PLACE else "out_of_place"
    sides: dict[str, dict[str, Figure]] = {}
    notes: dict[str, str] = {}
    for side, figure in measured.figures.items():
        sides[side] = {}
        turns = sorted(figure.graph_turns if how.graph else figure.eager_turns)
        us = figure.graph_us if how.graph else figure.eager_us
        if figure.note:
            notes[side] = figure.note
        if us is not None and turns:
            calls = measured.calls * len(turns)
            wrong = 0 if how.checks else None
            sides[side][placement] = Figure(us, sum(turns) / len(turns), turns[-1], turns[0], calls, wrong)
    return Found(wanted, sides, notes, wanted.size * wanted.bus_factor / rate * 1e6 if rate else None)

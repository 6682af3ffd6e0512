"""Rows on GPUs: what `torch_symm.bench.gpu` measures, as nccl-tests shows it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from .. import machine
from ..gpu.calls import OPS as GPU_OPS
from ..gpu.launch import PATIENT_SETTINGS, Options, measure
from ..gpu.record import Absent as GpuAbsent
from ..gpu.record import Measured
from ..gpu.sides import cpu_sides, gpu_sides
from .record import Absent, Figure, Found
from .request import Wanted

DTYPES = ("bf16", "f32")
#: Sides of the benchmark, by what ``--against`` calls them.
AGAINST = {
    "nccl": ("nccl", "nccl window"),
    "torch": ("torch one-shot", "torch two-shot", "torch low contention"),
    "gloo": ("gloo",),
}
#: Those that work over their input, as the benchmark calls them.
IN_PLACE = ("all_reduce", "broadcast")


def unmeasured(rows: Sequence[Wanted]) -> str | None:
    """Why ``rows`` cannot be measured on GPUs; ``None``: they can."""
    for wanted in rows:
        if wanted.op not in GPU_OPS:
            return (
                f"{wanted.op} is not measured on GPUs; there are {', '.join(op for op in GPU_OPS if op != 'barrier')}"
            )
        if wanted.dtype not in DTYPES:
            return f"-d {wanted.dtype} is not measured on GPUs; there are {', '.join(DTYPES)}"
        if wanted.redop not in ("sum", "none") or wanted.root > 0:
            return "on GPUs only -o sum and -r 0 are measured"
    return None


def run(
    rows: Sequence[Wanted], against: Sequence[str], calls: int, graph: bool, device: str = "cuda"
) -> Iterator[Found | Absent]:
    """The rows, and sides that are not there. ``graph``: the time of a call in a CUDA graph. Not in the order asked.

    Raises:
        torch.multiprocessing.ProcessRaisedException, ProcessExitedException, StandsStill: a rank failed outside of any
            side, or hangs there.
    """
    makers = gpu_sides if device == "cuda" else cpu_sides
    for name, value in (machine.MULTICAST_SETTINGS | PATIENT_SETTINGS).items():
        os.environ.setdefault(name, value)
    known = makers()
    sides = ["symm", *(side for name in against for side in AGAINST.get(name, ()) if side in known)]
    for name in against:
        if not any(side in known for side in AGAINST.get(name, ())):
            yield Absent(name, f"is not measured on {device} tensors")
    ops, dtypes = (list(dict.fromkeys(part)) for part in (([w.op for w in rows]), ([w.dtype for w in rows])))
    options = Options(
        world=rows[0].world,
        device=device,
        makers=makers,
        sides=tuple(sides),
        ops=tuple(ops),
        dtypes=tuple(dtypes),
        sizes=tuple(sorted({wanted.size for wanted in rows})),
        seconds=float("inf"),
        # Of 20 calls each, or 5 long ones; a median wants three.
        turns=max(3, -(-calls // 20)),
    )
    for message in measure(options):
        yield Absent(message.side, message.reason) if isinstance(message, GpuAbsent) else _found(message, graph)


def _found(measured: Measured, graph: bool) -> Found:
    cell = measured.cell
    root = 0 if cell.op == "broadcast" else -1
    redop = "sum" if cell.op in ("all_reduce", "reduce_scatter") else "none"
    wanted = Wanted(cell.op, cell.dtype, redop, root, cell.bytes, cell.world)
    placement = "in_place" if cell.op in IN_PLACE else "out_of_place"
    sides: dict[str, dict[str, Figure]] = {}
    notes: dict[str, str] = {}
    for side, figure in measured.figures.items():
        sides[side] = {}
        turns = sorted(figure.graph_turns if graph else figure.eager_turns)
        us = figure.graph_us if graph else figure.eager_us
        if figure.note:
            notes[side] = figure.note
        if us is not None and turns:
            calls = measured.calls * len(turns)
            sides[side][placement] = Figure(us, sum(turns) / len(turns), turns[-1], turns[0], calls, 0)
    return Found(wanted, sides, notes)

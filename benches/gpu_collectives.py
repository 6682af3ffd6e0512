"""``python benches/gpu_collectives.py``: measures, shows progress, writes tables and JSON."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import gpu_host as host
from gpu_shared import FAILURES, MAX_RANKS, begin, ranks, write_json
from gpu_table import progress_line, write_tables
from torch_symm.tools.bench.gpu.calls import OPS, USUAL
from torch_symm.tools.bench.gpu.contenders import cpu_sides, gpu_sides
from torch_symm.tools.bench.gpu.engines import all_sides
from torch_symm.tools.bench.gpu.inputs import RANDOM as DTYPES
from torch_symm.tools.bench.gpu.launch import PATIENT_SETTINGS, GpuOptions, cells, measure
from torch_symm.tools.bench.gpu.record import GpuAbsent, Measured
from torch_symm.tools.bench.machine import Gpus, Machine
from torch_symm.tools.bench.units import parse_size
from torch_symm.tools.command import count, positive

SIZES = "1K,8K,64K,256K,1M,4M,16M,64M,256M"
QUICK_SIZES = "1K,64K,1M,16M,64M"
SECONDS, QUICK_SECONDS = 300.0, 90.0
TURNS, QUICK_TURNS = 7, 3
HOST_SIDES = {"cuda": ["symm", "nccl", "torch one-shot"], "cpu": ["symm", "gloo"]}


@dataclass(frozen=True)
class Run:
    """The results of a run. ``cells_wanted``: the planned cells; ``failure``: why it ended early, if it did."""

    machine: Machine
    gpus: Gpus
    arguments: list[str]
    world: int
    cells: list[Measured]
    cells_wanted: int
    absent: list[GpuAbsent]
    seconds: float
    failure: str | None = None

    def write(self, path: Path) -> None:
        """Writes the run to ``path`` as JSON; an existing file is replaced as a whole."""
        write_json(path, asdict(self))


def options_from(arguments: Sequence[str]) -> tuple[GpuOptions, Path | None]:
    """The options from the command line, and the path of the JSON."""
    parser = argparse.ArgumentParser(
        prog="python benches/gpu_collectives.py",
        description="Compares the collectives on GPUs with NCCL and torch's symmetric memory, in one run.",
    )
    parser.add_argument("--ranks", type=count, help=f"number of GPUs (default: all, at most {MAX_RANKS})")
    parser.add_argument("--sizes", help=f"comma-separated total sizes (default: {SIZES}; --quick: {QUICK_SIZES})")
    parser.add_argument("--full", action="store_true", help="also measure 1 GB")
    parser.add_argument("--ops", default=",".join(USUAL), help="comma-separated, of: " + ", ".join(OPS))
    parser.add_argument("--dtypes", help=f"comma-separated, of: {', '.join(DTYPES)} (default: both; --quick: bf16)")
    parser.add_argument("--sides", help="comma-separated, of: " + ", ".join(all_sides()))
    parser.add_argument("--quick", action="store_true", help="measure fewer sizes and turns, and only bf16")
    parser.add_argument(
        "--host", action="store_true", help="measure only the host's time in the parts of eager calls of 64 KB"
    )
    parser.add_argument(
        "--seconds",
        type=positive,
        help=f"time for the run: if it is late, cells get fewer turns, and none starts after this time "
        f"(default: {SECONDS:.0f}; --quick: {QUICK_SECONDS:.0f})",
    )
    parser.add_argument("--json", type=Path, default=Path("out/bench-gpu.json"), help="file for all figures")
    parser.add_argument("--no-json", action="store_true", help="write no file")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: test this program without GPUs, against Gloo"
    )
    given = parser.parse_args(arguments)
    world = ranks(parser, given.ranks, given.device)
    makers = all_sides if given.device == "cuda" else cpu_sides
    usual = HOST_SIDES[given.device] if given.host else list(gpu_sides() if given.device == "cuda" else cpu_sides())
    sides = given.sides.split(",") if given.sides else usual
    ops = list(host.OPS) if given.host else given.ops.split(",")
    few = given.quick or given.host
    dtypes = given.dtypes.split(",") if given.dtypes else list(DTYPES[:1] if few else DTYPES)
    usual_sizes = str(host.SIZE) if given.host else QUICK_SIZES if given.quick else SIZES
    for what, wanted, known in (("sides", sides, makers()), ("ops", ops, OPS), ("dtypes", dtypes, DTYPES)):
        unknown = [each for each in wanted if each not in known]
        if unknown:
            parser.error(f"--{what}: no {unknown[0]!r}; there are {', '.join(known)}")
    try:
        sizes = [parse_size(size) for size in (given.sizes or usual_sizes).split(",")]
    except ValueError as error:
        parser.error(str(error))
    if given.host and host.SIZE not in sizes:
        parser.error(f"--host measures {host.SIZE >> 10}K; leave --sizes out")
    options = GpuOptions(
        world=world,
        device=given.device,
        makers=makers,
        sides=tuple(sides),
        ops=tuple(ops),
        dtypes=tuple(dtypes),
        sizes=(*sizes, 1 << 30) if given.full else tuple(sizes),
        seconds=given.seconds or (QUICK_SECONDS if given.quick else SECONDS),
        turns=QUICK_TURNS if given.quick else TURNS,
        entrances=host.entrances,
    )
    return options, None if given.no_json else given.json


def main(arguments: Sequence[str]) -> int:
    """Runs the benchmark; returns 0 if it finished or its time was over, and no result was wrong and no side lost.

    Otherwise returns 1. The JSON is written after every cell, so that it exists however the run ends.
    """
    options, path = options_from(arguments)
    here, gpus = begin(options.world, options.device, PATIENT_SETTINGS)
    total = len(cells(options))
    started = time.monotonic()
    found: list[Measured] = []
    absent: list[GpuAbsent] = []

    def write(failure: str | None) -> None:
        if path is not None:
            elapsed = time.monotonic() - started
            Run(here, gpus, list(arguments), options.world, found, total, absent, elapsed, failure).write(path)

    failure: str | None = None
    try:
        for message in measure(options):
            if isinstance(message, GpuAbsent):
                absent.append(message)
                print(f"left out: {message.side}: {message.reason}", flush=True)
            else:
                found.append(message)
                print(progress_line(message, len(found), total), flush=True)
            write("not finished")
    except FAILURES as error:
        failure = str(error)
    except KeyboardInterrupt:
        failure = "interrupted"
    if failure is None and len(found) < total and time.monotonic() - started < options.seconds:
        failure = "no side is left"
    write(failure)
    write_tables(found)
    wrong = [
        f"{side} {measured.cell.op} {measured.cell.dtype} {measured.cell.bytes} bytes"
        for measured in found
        for side, figure in measured.figures.items()
        if figure.note and "wrong" in figure.note
    ]
    over = "; the time was over" if failure is None and len(found) < total else ""
    spent = f"{len(found)} of {total} cells in {time.monotonic() - started:.0f} s{over}"
    print(f"{spent}; {len(wrong)} wrong results", *wrong, sep="\n  ", flush=True)
    if path is not None:
        print(f"written to {path}", flush=True)
    if failure is not None:
        print(f"failed: {failure.strip()}", file=sys.stderr, flush=True)
    return 1 if failure or wrong or any(side.lost for side in absent) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

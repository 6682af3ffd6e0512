"""``python -m torch_symm.bench.gpu``: measures, shows progress, writes tables and JSON."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from .. import machine
from ..units import parse_size
from .calls import OPS
from .launch import Options, cells, measure
from .record import Absent, Measured, Run
from .sides import CPU_SIDES, GPU_SIDES
from .table import progress_line, write_tables

SIZES = "1K,8K,64K,256K,1M,4M,16M,64M,256M"
QUICK_SIZES = "1K,64K,1M,16M,64M"
DTYPES = ("bf16", "f32")
MAX_RANKS = 8
SECONDS, QUICK_SECONDS = 150.0, 30.0
TURNS, QUICK_TURNS = 7, 3


def options_from(arguments: Sequence[str]) -> tuple[Options, Path | None]:
    """What the command line asks for, and where the JSON goes."""
    parser = argparse.ArgumentParser(
        prog="python -m torch_symm.bench.gpu",
        description="Measures the collectives of GPUs against NCCL and torch's symmetric memory, in one run.",
    )
    parser.add_argument("--ranks", type=int, help=f"number of GPUs (default: all, at most {MAX_RANKS})")
    parser.add_argument("--sizes", help=f"comma-separated total sizes (default: {SIZES}; --quick: {QUICK_SIZES})")
    parser.add_argument("--full", action="store_true", help="1 GB as well")
    parser.add_argument("--ops", default=",".join(OPS), help="comma-separated, of: " + ", ".join(OPS))
    parser.add_argument("--dtypes", help=f"comma-separated, of: {', '.join(DTYPES)} (default: both; --quick: bf16)")
    parser.add_argument("--sides", help="comma-separated, of: " + ", ".join(GPU_SIDES))
    parser.add_argument("--quick", action="store_true", help="few sizes and turns, bf16 only, less than a minute")
    parser.add_argument("--seconds", type=float, help=f"time to spend, about (default: {SECONDS:.0f})")
    parser.add_argument("--json", type=Path, default=Path("out/bench-gpu.json"), help="where to write all figures")
    parser.add_argument("--no-json", action="store_true", help="write no file")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tries this program without a GPU, against gloo"
    )
    given = parser.parse_args(arguments)
    # NVML answers, so that this process gets no context on a GPU.
    there = torch.cuda.device_count() if given.device == "cuda" else MAX_RANKS
    world = given.ranks or (min(there, MAX_RANKS) if given.device == "cuda" else 2)
    if world < 2 or world > there:
        parser.error(
            f"{world} ranks need as many GPUs and at least 2; this machine has {there} (--device cpu needs none)"
        )
    makers = GPU_SIDES if given.device == "cuda" else CPU_SIDES
    sides = given.sides.split(",") if given.sides else list(makers)
    ops = given.ops.split(",")
    dtypes = given.dtypes.split(",") if given.dtypes else list(DTYPES[:1] if given.quick else DTYPES)
    for what, wanted, known in (("sides", sides, makers), ("ops", ops, OPS), ("dtypes", dtypes, DTYPES)):
        unknown = [each for each in wanted if each not in known]
        if unknown:
            parser.error(f"--{what}: no {unknown[0]!r}; there are {', '.join(known)}")
    try:
        sizes = [parse_size(size) for size in (given.sizes or (QUICK_SIZES if given.quick else SIZES)).split(",")]
    except ValueError as error:
        parser.error(str(error))
    options = Options(
        world=world,
        device=given.device,
        sides=tuple(sides),
        ops=tuple(ops),
        dtypes=tuple(dtypes),
        sizes=(*sizes, 1 << 30) if given.full else tuple(sizes),
        seconds=given.seconds or (QUICK_SECONDS if given.quick else SECONDS),
        turns=QUICK_TURNS if given.quick else TURNS,
    )
    return options, None if given.no_json else given.json


def main(arguments: Sequence[str]) -> int:
    """Runs the benchmark; 0 if it went through and no result was wrong, 1 otherwise."""
    options, path = options_from(arguments)
    for name, value in machine.MULTICAST_SETTINGS.items():
        os.environ.setdefault(name, value)
    here, gpus = machine.describe(), machine.describe_gpus(options.world if options.device == "cuda" else 0)
    print(f"{here.date}  {gpus.summary()}, torch {here.torch}, commit {here.commit}", flush=True)
    total = len(cells(options))
    started = time.monotonic()
    found: list[Measured] = []
    absent: list[Absent] = []
    failure: str | None = None
    try:
        for message in measure(options):
            if isinstance(message, Absent):
                absent.append(message)
                print(f"left out: {message.side}: {message.reason}", flush=True)
            else:
                found.append(message)
                print(progress_line(message, len(found), total), flush=True)
    except (ProcessRaisedException, ProcessExitedException, RuntimeError) as error:
        failure = str(error)
    except KeyboardInterrupt:
        failure = "interrupted"
    elapsed = time.monotonic() - started
    write_tables(found)
    wrong = [
        f"{side} {measured.cell.op} {measured.cell.dtype} {measured.cell.bytes} bytes"
        for measured in found
        for side, figure in measured.figures.items()
        if figure.note and "wrong" in figure.note
    ]
    print(
        f"{len(found)} of {total} cells in {elapsed:.0f} s; {len(wrong)} wrong results", *wrong, sep="\n  ", flush=True
    )
    if path is not None:
        Run(here, gpus, list(arguments), options.world, found, absent, elapsed, failure).write(path)
        print(f"written to {path}", flush=True)
    if failure is not None:
        print(f"failed: {failure.strip()}", file=sys.stderr, flush=True)
    return 1 if failure or wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""``python -m torch_symm.tools.bench``: measures, shows progress, writes a table and JSON."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from torch_symm.tools.command import overloaded, positive, ranks

from . import machine, plot
from .beside import Beside
from .launch import CopyRate, Options, cells, measure
from .ops import DTYPES, OPS
from .record import Row, Run
from .table import progress_line, verdict, write_table
from .units import format_size, parse_size

FULL_SIZES = "8,1K,64K,1M,16M,64M,256M"
QUICK_SIZES = "8,64K,1M,16M"
FULL_SECONDS, QUICK_SECONDS = 480.0, 35.0


@dataclass(frozen=True)
class Outputs:
    """Where the figures go. ``drawn``: an earlier run, which is drawn in place of a new one."""

    json: Path | None
    plot: Path | None
    drawn: Path | None


def options_from(arguments: Sequence[str]) -> tuple[Options, Outputs]:
    """What the command line asks for, and where the figures go."""
    parser = argparse.ArgumentParser(
        prog="python -m torch_symm.tools.bench",
        description="Measures every collective against another backend, in one run.",
    )
    parser.add_argument("--backend", default="symm", help="the tested backend (default: symm)")
    parser.add_argument("--peer", default="gloo", help="the backend to compare with, or none (default: gloo)")
    parser.add_argument("--ops", default=",".join(OPS), help="comma-separated, of: " + ", ".join(OPS))
    parser.add_argument("--sizes", help=f"comma-separated total sizes (default: {FULL_SIZES})")
    parser.add_argument("--ranks", default="2,4", help="comma-separated numbers of ranks (default: 2,4)")
    parser.add_argument(
        "--dtype", help="comma-separated, of: " + ", ".join(DTYPES) + " (default: f32, and bf16 for all_reduce)"
    )
    parser.add_argument(
        "--beside",
        default="0",
        metavar="N",
        help="busy processes beside the ranks, or loader: one per core streams memory",
    )
    parser.add_argument("--quick", action="store_true", help="few sizes and calls, less than a minute")
    parser.add_argument("--seconds", type=positive, help="time to spend, about (default: 480; 35 with --quick)")
    parser.add_argument("--json", type=Path, default=Path("out/bench.json"), help="where to write all figures")
    parser.add_argument("--no-json", action="store_true", help="write no file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the times as curves (needs matplotlib)")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="with --plot: draw an earlier run, measure nothing")
    given = parser.parse_args(arguments)
    if given.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot: needs matplotlib, which is not installed: pip install matplotlib")
    if given.draw and not given.plot:
        parser.error("--draw: --plot says where the figure goes")
    try:
        listed = given.sizes or (QUICK_SIZES if given.quick else FULL_SIZES)
        sizes = tuple(parse_size(size) for size in listed.split(","))
        worlds = tuple(ranks(world) for world in given.ranks.split(","))
        beside = Beside.parse(given.beside)
    except argparse.ArgumentTypeError as error:
        parser.error(f"--ranks: {error}")
    except ValueError as error:
        parser.error(str(error))
    for flag, backend in (("--backend", given.backend), ("--peer", given.peer)):
        if (complaint := unusable(backend)) and (flag, backend) != ("--peer", "none"):
            parser.error(f"{flag}: {complaint}")
    ops: list[tuple[str, str]] = []
    for op in given.ops.split(","):
        if op not in OPS:
            parser.error(f"--ops: no operation {op!r}; there are {', '.join(OPS)}")
        default = "f32,bf16" if op == "all_reduce" else "f32"
        wanted = (given.dtype or default).split(",") if op != "barrier" else ["f32"]
        unknown = [dtype for dtype in wanted if dtype not in DTYPES]
        if unknown:
            parser.error(f"--dtype: no type {unknown[0]!r}; there are {', '.join(DTYPES)}")
        ops += [(op, dtype) for dtype in wanted]
    options = Options(
        backend=given.backend,
        peer=None if given.peer == "none" else given.peer,
        ops=tuple(ops),
        sizes=sizes,
        worlds=worlds,
        seconds=given.seconds or (QUICK_SECONDS if given.quick else FULL_SECONDS),
        side_seconds=0.3 if given.quick else 1.5,
        least=10 if given.quick else 20,
        rounds=3 if given.quick else 5,
        beside=beside,
    )
    return options, Outputs(None if given.no_json else given.json, given.plot, given.draw)


def unusable(backend: str) -> str | None:
    """Why ``backend``, a name or ``device:name`` pairs, cannot be measured on CPU tensors here; ``None``: it can."""
    known = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake")]
    serving = dict(pair.split(":", 1) for pair in backend.lower().split(",") if ":" in pair) or {"cpu": backend.lower()}
    for name in serving.values():
        if name not in known:
            return f"no backend {name!r}; torch knows {', '.join(known)}"
        if not dist.is_backend_available(name):
            return f"this torch was built without {name!r}"
    if "cpu" not in serving or (":" not in backend and "cpu" not in dist.Backend.backend_capability[serving["cpu"]]):
        return f"{backend!r} serves no CPU tensors; for GPUs there is python -m torch_symm.tools.bench.gpu"
    return None


def main(arguments: Sequence[str]) -> int:
    """Runs the benchmark; 0 if it went through with right results, 1 otherwise."""
    options, outputs = options_from(arguments)
    if outputs.drawn is not None:
        return _draw(outputs.drawn, outputs.plot)
    path = outputs.json
    here = machine.describe()
    total = sum(len(cells(options, world)) for world in options.worlds)
    load = f"load {here.loadavg[0]}"
    print(f"{here.date}  {here.cpu}, {here.cores} cores, {load}, torch {here.torch}, commit {here.commit}", flush=True)
    if busy := overloaded():
        print(f"warning: {busy}, so these times say little", flush=True)
    if max(options.worlds) > here.cores:
        print(f"note: {max(options.worlds)} ranks on {here.cores} cores wait for each other's time slices", flush=True)
    if options.beside.count:
        print(f"processes beside the ranks: {options.beside}", flush=True)
    started = time.monotonic()
    rows: list[Row] = []
    rates: dict[int, float] = {}
    failure: str | None = None
    try:
        for found in measure(options):
            if isinstance(found, CopyRate):
                rates[found.world] = found.bytes_per_s
                print(f"{found.world} ranks copy {found.bytes_per_s / 1e9:.1f} GB/s (read + written)", flush=True)
            else:
                rows.append(found)
                print(progress_line(found, len(rows), total), flush=True)
    except (ProcessRaisedException, ProcessExitedException, RuntimeError) as error:
        failure = str(error)
    except KeyboardInterrupt:
        failure = "interrupted"
    elapsed = time.monotonic() - started
    write_table(rows)
    checked = "every result checked and right" if failure is None else f"ended after {len(rows)} of {total} cells"
    print(f"{verdict(rows)}; {elapsed:.0f} s, {checked}", flush=True)
    if path is not None:
        Run(here, list(arguments), rows, rates, machine.loadavg(), elapsed, failure).write(path)
        print(f"written to {path}", flush=True)
    if outputs.plot is not None and rows:
        plot.draw(rows, plot.title(asdict(here)), outputs.plot)
        print(f"drawn to {outputs.plot}", flush=True)
    if failure is not None:
        where = f" after {_last(rows)}" if rows else ""
        print(f"failed{where}: {failure.strip()}", file=sys.stderr, flush=True)
        return 1
    return 0


def _draw(source: Path, path: Path | None) -> int:
    try:
        rows, title = plot.read(source)
        plot.draw(rows, title, path or source.with_suffix(".svg"))
    except (OSError, ValueError) as error:
        print(f"failed: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def _last(rows: Sequence[Row]) -> str:
    cell = rows[-1].cell
    return f"{cell.world} ranks {cell.op} {cell.dtype} {format_size(cell.size)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""``torch-symm bench``."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch_symm.tools.command import (
    Parser,
    check_folder,
    check_plot,
    closest,
    count,
    overloaded,
    positive,
    ranks,
    report,
    whole,
)

from .units import LIMIT_S, format_size, parse_size

if TYPE_CHECKING:
    from .cuda import How
    from .machine import Machine
    from .record import Absent, Found
    from .request import Wanted

#: The sides that ``--against`` accepts.
AGAINST = ("nccl", "gloo", "torch", "vllm", "flashinfer")
#: Sides that support only CUDA tensors.
ON_GPUS = ("nccl", "torch", "vllm", "flashinfer")
CPU_RANKS = 2


def parser() -> Parser:
    """Returns the parser of the command."""
    made = Parser(
        "bench",
        "Measures collectives on ordinary tensors, with the flags and columns of nccl-tests. The time is the median "
        "over -n calls of the slowest rank's time. Exit status 1 if a result is wrong.",
        [
            ("all_reduce -b 8 -e 64M -f 4 -g 2", "sizes from 8 bytes to 64 MiB on 2 ranks"),
            ("all_reduce all_gather -b 1K -e 1M -f 4 -d bf16 --against gloo", "two operations, Gloo in the same run"),
            ("all_reduce -b 64K -e 64M -f 2 --against gloo --plot out.html", "curves and table in one file"),
            ("all_gather all_reduce --sizes 16M,64M -d bf16 --background-load matmul", "while GPUs multiply matrices"),
            ("all_reduce_perf --device cuda -g 4 -b 8 -e 256M -f 2 --against nccl,torch", "on 4 GPUs"),
        ],
    )
    made.add_argument(
        "ops",
        nargs="*",
        default=["all_reduce"],
        metavar="OP",
        help="collectives by their names in torch or nccl-tests, or all (default: all_reduce)",
    )
    made.add_argument("-b", "--minbytes", default="32M", help="smallest size, such as 8, 64K, 32M, 1G (default: 32M)")
    made.add_argument("-e", "--maxbytes", help="largest size (default: -b)")
    made.add_argument("-f", "--stepfactor", type=positive, help="factor from each size to the next")
    made.add_argument("-i", "--stepbytes", help="difference between each size and the next (default: 1M)")
    made.add_argument(
        "-g",
        "--ngpus",
        "--ranks",
        dest="ranks",
        type=ranks,
        help=f"number of ranks (default: all GPUs; {CPU_RANKS} on CPU)",
    )
    made.add_argument("--sizes", help="comma-separated sizes, in place of -b, -e, -f and -i")
    made.add_argument("-n", "--iters", type=count, default=20, help="number of timed calls (default: 20)")
    made.add_argument(
        "--seconds", type=positive, help="approximate time of the run, in place of -n; on CPU, checks all calls"
    )
    made.add_argument(
        "--background-load",
        metavar="LOAD",
        default="0",
        help="on CPU: a number of busy processes, or loader for one data loader per core; on GPUs: matmul",
    )
    made.add_argument(
        "-w", "--warmup_iters", type=whole, default=5, help="untimed calls before the timed ones (default: 5)"
    )
    made.add_argument("-c", "--check", type=whole, default=1, help="calls whose result is compared (default: 1)")
    made.add_argument("-o", "--op", default="sum", help="comma-separated, of: sum, prod, min, max, avg; or all")
    made.add_argument("-d", "--datatype", default="float", help="comma-separated: float or f32, bf16, half, …; or all")
    made.add_argument("-r", "--root", type=_root, default="0", help="the root's rank, or all (default: 0)")
    made.add_argument("-G", "--cudagraph", type=whole, default=0, help="if not 0, time a call in a CUDA graph")
    made.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there are two GPUs, otherwise cpu")
    made.add_argument("--backend", default="symm", help="the measured backend, on CPU (default: symm)")
    made.add_argument(
        "--limit",
        type=positive,
        default=LIMIT_S,
        metavar="SECONDS",
        help=f"end a run whose ranks make no progress for this time (default: {LIMIT_S:.0f})",
    )
    made.add_argument(
        "--against", metavar="SIDES", help="compare with, in the same run (comma-separated): " + ", ".join(AGAINST)
    )
    made.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write JSON to FILE; without FILE, print only JSON"
    )
    made.add_argument("-F", "--output_file", "--csv", dest="csv", type=Path, metavar="FILE", help="write CSV to FILE")
    made.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw a .png, .svg, .pdf or .html (needs matplotlib)",
    )
    made.add_argument("--draw", type=Path, metavar="JSON", help="with --plot: draw an earlier run, measure nothing")
    return made


def _root(text: str) -> int | None:
    return None if text == "all" else whole(text)


@dataclass(frozen=True)
class Plan:
    """The rows, sides and clock of a run."""

    device: str
    world: int
    rows: list[Wanted]
    against: list[str]


def run(parser: Parser, given: argparse.Namespace) -> int:
    """Measures and prints row after row; returns 1 if a result was wrong or a rank failed."""
    if given.draw:
        return _draw(parser, given)
    _check_outputs(parser, given)
    todo = plan(parser, given)
    # Imported here, because these modules import torch.
    from . import columns, machine, plot
    from .record import Absent

    alone = given.json == "-"
    here = machine.describe()

    def say(line: str) -> None:
        if not alone:
            print(line, flush=True)

    several = bool(todo.against)
    for line in heading(todo, given, here):
        say(f"# {line}")
    if given.background_load == "matmul":
        return _with_products(todo, given, asdict(here), say)
    rows: list[Found] = []
    absent: list[Absent] = []
    failure = ""
    shown = ""
    for message in _measured(todo, given):
        if isinstance(message, str):
            failure = message
        elif isinstance(message, Absent):
            absent.append(message)
            say(f"# left out: {message.side}: {message.reason}")
        else:
            rows.append(message)
            if message.wanted.op != shown:
                shown = message.wanted.op
                say("\n".join(columns.opening(shown, several)))
            say("\n".join(columns.lines(message, several)))
        _progress(todo, len(rows))
    for line in columns.closing(rows, given.check > 0):
        say(line)
    found: dict[str, object] = {
        "machine": asdict(here),
        "arguments": sys.argv[1:],
        "device": todo.device,
        "absent": [asdict(one) for one in absent],
        "notes": [{**asdict(one.wanted), "notes": dict(one.notes)} for one in rows if one.notes],
        "rows": [record for one in rows for record in one.records()],
        "failure": failure or None,
    }
    try:
        written = _write(given, todo.device, rows, found, plot.title(asdict(here)))
        if written:
            say(f"# written: {', '.join(written)}")
        if given.plot and not plot.drawable(rows):
            say("# --plot: no row with a size was measured, so nothing is drawn")
    except (OSError, ValueError) as error:
        failure = f"{failure}\n{error}".strip()
    if failure:
        print(f"failed after {len(rows)} of {len(todo.rows)} rows: {failure}", file=sys.stderr)
    lost = any(not figures for one in rows for side, figures in one.sides.items() if side == given.backend)
    return int(bool(failure) or lost or any(one.wrong for one in rows))


def _with_products(todo: Plan, given: argparse.Namespace, here: dict[str, object], say: Callable[[str], None]) -> int:
    """Measures and prints the rows while products run; returns 1 if a row of symm is missing or a rank failed."""
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

    from . import cuda, with_products
    from .gpu.record import Measured

    for line in with_products.heading():
        say(f"# {line}")
    cells: list[Measured] = []
    absent, failure = [], ""
    try:
        for message in cuda.run_with_products(todo.rows, todo.against, _how(given)):
            if isinstance(message, Measured):
                for line in with_products.lines(message, cells[-1].cell if cells else None):
                    say(line)
                cells.append(message)
            else:
                absent.append(asdict(message))
                say(f"# left out: {message.side}: {message.reason}")
    except (ProcessRaisedException, ProcessExitedException, RuntimeError) as error:
        failure = str(error).strip()
        print(f"failed after {len(cells)} of {len(todo.rows)} rows: {failure}", file=sys.stderr)
    rows = [record for cell in cells for record in with_products.records(cell)]
    found = {"machine": here, "arguments": sys.argv[1:], "absent": absent, "rows": rows, "failure": failure or None}
    if given.json == "-":
        print(json.dumps(found, indent=1))
    elif given.json:
        try:
            Path(given.json).write_text(json.dumps(found, indent=1) + "\n")
        except OSError as error:
            failure = str(error)
            print(f"failed: {failure}", file=sys.stderr)
    measured = [cell for cell in cells if cell.figures["symm"].overlap]
    return int(bool(failure) or len(measured) < len(todo.rows))


def _draw(parser: Parser, given: argparse.Namespace) -> int:
    from . import plot
    from .record import read

    if not given.plot:
        parser.error("--draw: --plot says where the figure goes")
    try:
        rows, here = read(given.draw)
    except OSError as error:
        parser.error(f"--draw: {error}")
    except ValueError as error:
        parser.error(str(error))
    check_plot(parser, given.plot, plot.ENDINGS)
    try:
        plot.draw(rows, plot.title(here), given.plot)
    except (OSError, ValueError) as error:
        report(f"failed: {error}", given.json == "-")
        return 1
    return 0


def _check_outputs(parser: Parser, given: argparse.Namespace) -> None:
    from . import plot

    if given.plot:
        check_plot(parser, given.plot, plot.ENDINGS)
    for path in (given.csv, given.json and given.json != "-" and Path(given.json)):
        if path:
            check_folder(parser, path)


def plan(parser: Parser, given: argparse.Namespace) -> Plan:
    """Returns the run that the command line requests."""
    import torch

    from . import launch, request
    from .background_load import BackgroundLoad

    gpus = torch.cuda.device_count()
    device = given.device or ("cuda" if gpus > 1 else "cpu")
    world = given.ranks if given.ranks is not None else gpus if device == "cuda" else CPU_RANKS
    if device == "cuda" and not 2 <= world <= gpus:
        parser.error(f"-g {world}: from 2 ranks on, each with a GPU; torch finds {gpus} here (--device cpu needs none)")
    if device == "cpu" and (reason := launch.unusable(given.backend)):
        parser.error(f"--backend: {reason}")
    against = [name for name in (given.against or "").lower().split(",") if name]
    for name in against:
        if name not in AGAINST:
            parser.error(f"--against: no side {name!r}{closest(name, AGAINST) or '; there are ' + ', '.join(AGAINST)}")
    try:
        least = parse_size(given.minbytes)
        most = parse_size(given.maxbytes) if given.maxbytes else least
        step = parse_size(given.stepbytes) if given.stepbytes else None
        sizes = request.sizes(least, most, given.stepfactor, step or (None if given.stepfactor else 1 << 20))
        if given.sizes:
            sizes = [parse_size(size) for size in given.sizes.split(",")]
        load = BackgroundLoad.parse(given.background_load)
        if load.products and device != "cuda":
            raise ValueError("--background-load matmul: needs at least two GPUs, and measures nothing on CPU tensors")
        if load != BackgroundLoad() and not load.products and device == "cuda":
            raise ValueError(f"--background-load {given.background_load}: on CPU tensors only; GPUs have matmul")
        roots = list(range(world)) if given.root is None else [given.root]
        if not all(0 <= root < world for root in roots):
            raise ValueError(f"-r {given.root}: ranks are 0 to {world - 1}")
        rows = request.rows(
            request.operations(given.ops),
            request.types(given.datatype),
            request.reductions(given.op),
            roots,
            sizes,
            world,
        )
    except ValueError as error:
        parser.error(str(error))
    return Plan(device, world, rows, against)


def heading(plan: Plan, given: argparse.Namespace, here: Machine) -> Iterator[str]:
    """The lines above all rows."""
    sizes = [wanted.size for wanted in plan.rows]
    where = f"{here.cpu}, {here.cores} cores, load {here.loadavg[0]}"
    yield f"{given.backend} on {plan.world} ranks, {plan.device} tensors; {where}"
    yield (
        f"minBytes {min(sizes)} maxBytes {max(sizes)} warmup iters: {given.warmup_iters} iters: {given.iters} "
        f"validation: {given.check} graph: {given.cudagraph}"
    )
    yield "time: median over calls of the slowest rank's time; busbw: with the factors in nccl-tests' PERFORMANCE.md"
    if busy := overloaded():
        yield f"warning: {busy}, so these times say little"
    if given.background_load != "0":
        yield f"background load: {given.background_load}"
    if plan.device == "cpu" and plan.world > here.cores:
        yield f"{plan.world} ranks on {here.cores} cores wait for each other's time slices"


def _measured(plan: Plan, given: argparse.Namespace) -> Iterator[Found | Absent | str]:
    """Yields rows and absent sides; a text says why the run ended early."""
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

    try:
        yield from _on_gpus(plan, given) if plan.device == "cuda" else _on_cpus(plan, given)
    except (ProcessRaisedException, ProcessExitedException, RuntimeError) as error:
        yield _out_of_memory(error) or str(error).strip()
    except KeyboardInterrupt:
        yield "interrupted"


def _out_of_memory(error: Exception) -> str:
    """Returns a sentence if a rank failed because torch could not allocate its tensors; otherwise nothing."""
    found = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", str(error))
    if found is None:
        return ""
    rank = getattr(error, "error_index", None)
    return f"{'a rank' if rank is None else f'rank {rank}'} could not allocate {found[1]}: use smaller sizes (-e)"


def _on_gpus(plan: Plan, given: argparse.Namespace) -> Iterator[Found | Absent]:
    from . import cuda

    yield from cuda.run(plan.rows, plan.against, _how(given))


def _how(given: argparse.Namespace) -> How:
    from . import cuda

    return cuda.How(
        calls=given.iters,
        warmup=given.warmup_iters,
        checks=given.check,
        graph=bool(given.cudagraph),
        limit=bool(given.plot),
        still_s=given.limit,
        seconds=given.seconds or float("inf"),
    )


def _on_cpus(plan: Plan, given: argparse.Namespace) -> Iterator[Found | Absent | str]:
    from . import launch
    from .background_load import BackgroundLoad
    from .record import Absent

    sides = [given.backend]
    for name in plan.against:
        if reason := "serves CUDA tensors only" if name in ON_GPUS else launch.unusable(name):
            yield Absent(name, reason)
        elif name not in sides:
            sides.append(name)
    calls = (given.iters, given.warmup_iters, given.check)
    load = BackgroundLoad.parse(given.background_load)
    yield from launch.measure(plan.world, sides, plan.rows, *calls, bool(given.plot), given.limit, given.seconds, load)


def _progress(plan: Plan, done: int) -> None:
    """Shows the next measurement on a terminal; the next line replaces it."""
    if sys.stderr.isatty():
        following = plan.rows[done] if done < len(plan.rows) else None
        text = f"[{done}/{len(plan.rows)}] {following.op} {format_size(following.size)} …" if following else ""
        print(f"\r\033[K{text}\r", end="", file=sys.stderr, flush=True)


def _write(
    given: argparse.Namespace, device: str, rows: list[Found], found: dict[str, object], heading: str
) -> list[str]:
    """Writes the requested files, and returns their names."""
    from . import columns, plot

    if given.json == "-":
        print(json.dumps(found, indent=1))
    elif given.json:
        Path(given.json).write_text(json.dumps(found, indent=1) + "\n")
    if given.csv:
        columns.write_csv(rows, given.csv)
    drawn = given.plot if plot.drawable(rows) else None
    if drawn:
        plot.draw(rows, heading, drawn, "the slowest link" if device == "cuda" else "memory")
    return [str(path) for path in (given.json if given.json != "-" else None, given.csv, drawn) if path]

"""``torch-symm tune``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_symm.tools.bench.units import parse_size
from torch_symm.tools.command import (
    MOST_RANKS,
    Parser,
    check_figures,
    check_folder,
    check_plot,
    count,
    positive,
    report,
)

from . import measurement_points as sizes
from .measurement_points import LARGEST, OPS, SMALLEST, Point
from .report import progress, say, table

if TYPE_CHECKING:
    from .check import Compared
    from .launch import Launches

SECONDS = 60.0
#: The share of the seconds for the search for thresholds.
SEARCH = 0.2
#: Number of launches. Each starts new rank processes, because memory is placed differently in each.
LAUNCHES = 3
#: Number of visits of each point in each launch.
VISITS = 6
#: Number of ranks on CPU by default.
CPU_RANKS = 4


class Unmeasured(Exception):
    """Explains in a sentence why nothing was measured."""


def parser() -> Parser:
    """Returns the parser of the command."""
    made = Parser(
        "tune",
        "Measures the time of collectives on this machine and writes a profile for the cost model, or compares a "
        "profile with new measurements.",
        [
            ("", "measure for about a minute and write the profile into the user's cache directory"),
            ("--device cpu --ranks 2 --seconds 20", "measure 2 ranks for 20 s"),
            ("--check --json out/check.json", "report the errors of the profile"),
            ("--seconds 20 --json", "measure for 20 s and print one JSON object"),
            (
                "torchrun --nnodes 2 ... -m torch_symm tune --inter-node",
                "on every node: measure the network between them",
            ),
        ],
    )
    made.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there are two GPUs, otherwise cpu")
    made.add_argument("--ranks", type=count, help=f"number of ranks (default: all GPUs; {CPU_RANKS} on CPU)")
    made.add_argument(
        "--seconds",
        type=positive,
        default=SECONDS,
        help=f"approximate time for measuring (default: {SECONDS:.0f}); every point is measured at least once in each "
        f"of {LAUNCHES} launches, which may take longer",
    )
    made.add_argument("--largest", default=str(LARGEST), help="size of the largest tensor (default: 256M)")
    made.add_argument("--ops", default=",".join(OPS), help="comma-separated collectives, of: " + ", ".join(OPS))
    made.add_argument(
        "--output", type=Path, help="the profile to write (default: a file in the user's cache directory)"
    )
    made.add_argument(
        "--inter-node", action="store_true", help="measure the network between the nodes of a torchrun job"
    )
    made.add_argument("--check", action="store_true", help="compare a profile with measurements at other sizes")
    made.add_argument("--redistribution", type=count, metavar="N", help="time every plan of N random redistributions")
    made.add_argument("--profile", type=Path, help="the profile to check (default: the one that a job here would use)")
    made.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write JSON to FILE; without FILE, print only JSON"
    )
    made.add_argument("--plot", type=Path, help="the file into which --check draws the curves (needs matplotlib)")
    made.add_argument("--draw", type=Path, metavar="JSON", help="with --plot: draw an earlier check, measure nothing")
    return made


def run(parser: Parser, given: argparse.Namespace) -> int:
    """Measures, checks or draws; returns 0 on success.

    With ``--json``, one object has the measurements, or in ``error`` the reason for their absence. Without a
    file, it is the only output on standard output; text for human readers then goes to standard error.
    """
    if given.draw:
        return _draw(parser, given)
    if given.plot:
        _check_plot(parser, given.plot)
    if given.inter_node:
        return _inter_node(parser, given)
    import torch

    ops = tuple(given.ops.split(","))
    unknown = [op for op in ops if op not in OPS]
    if unknown:
        parser.error(f"--ops: no price for {unknown[0]!r}; there are {', '.join(OPS)}")
    try:
        largest = parse_size(given.largest)
    except ValueError as error:
        parser.error(f"--largest: {error}")
    if largest < 2 * SMALLEST:
        parser.error(f"--largest: at least {2 * SMALLEST} bytes, not {largest}")
    gpus = torch.cuda.device_count()
    device = given.device or ("cuda" if gpus > 1 else "cpu")
    world = given.ranks or (gpus if device == "cuda" else CPU_RANKS)
    if world > MOST_RANKS:
        parser.error(f"--ranks {world}: at most {MOST_RANKS}")
    if device == "cuda" and gpus < 2:
        parser.error(f"--device cuda: needs at least 2 GPUs, and torch finds {gpus} here; --device cpu needs none")
    if world < 2 or (device == "cuda" and world > gpus):
        parser.error(f"--ranks: {world} ranks cannot be measured on {gpus} GPUs" if gpus else "--ranks: at least 2")
    for path in (given.output, given.json and given.json != "-" and Path(given.json)):
        if path:
            check_folder(parser, path)
    with redirect_stdout(sys.stderr) if given.json == "-" else nullcontext():
        status, found = _measured(given, device, world, ops, largest)
    if given.json == "-":
        print(json.dumps({"device": device, "ranks": world, **found}, indent=1))
    elif given.json:
        try:
            Path(given.json).write_text(json.dumps({"device": device, "ranks": world, **found}, indent=1) + "\n")
            say(f"written to {given.json}")
        except OSError as error:
            print(f"failed: {error}", file=sys.stderr, flush=True)
            status = 1
    if given.plot and "origin" in found:
        from .check import Compared

        compared = [Compared(**point) for point in found["points"]]
        # Standard output already has the object.
        status |= _drawn(compared, found["origin"], given.plot, as_json=False)
    return status


def _measured(
    given: argparse.Namespace, device: str, world: int, ops: tuple[str, ...], largest: int
) -> tuple[int, dict[str, Any]]:
    """Returns the exit status, and the measurements or the error."""
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

    from torch_symm import SymmConfigError

    try:
        if given.redistribution is not None:
            return 0, _plans(given, device, world)
        return 0, (_check if given.check else _calibrate)(given, device, world, ops, largest)
    except Unmeasured as error:
        text, status = str(error), 1
        print(text, file=sys.stderr, flush=True)
    except (ProcessRaisedException, ProcessExitedException, SymmConfigError, RuntimeError, OSError) as error:
        text, status = str(error).strip(), 1
        print(f"failed: {text}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        text, status = "interrupted; nothing was written", 130
        print(text, file=sys.stderr, flush=True)
    return status, {"error": text}


def _inter_node(parser: Parser, given: argparse.Namespace) -> int:
    device = given.device or "cpu"
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            parser.error("--inter-node --device cuda: torch finds no GPU here")
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        parser.error("--inter-node: start it on every node: torchrun --nnodes 2 ... -m torch_symm tune --inter-node")
    if given.json:
        parser.error("--inter-node: prints no JSON; the profile has the measurements (--output names its file)")
    if given.output:
        check_folder(parser, given.output)
    from .inter_node import run as measured

    return measured(given.seconds, given.output, device)


def _check_plot(parser: Parser, path: Path) -> None:
    """Ends the command before it measures data that it cannot draw."""
    from .plot import ENDINGS

    check_plot(parser, path, ENDINGS)


def _measure(title: str, device: str, world: int, points: list[Point], seconds: float, path: Path | None) -> Launches:
    from .launch import measure

    distinct = list(dict.fromkeys(points))
    with progress(title, LAUNCHES * VISITS * len(distinct)) as on_visit:
        return [measure(world, device, distinct, seconds / LAUNCHES, VISITS, on_visit, path) for _ in range(LAUNCHES)]


def _calibrate(
    given: argparse.Namespace, device: str, world: int, ops: tuple[str, ...], largest: int
) -> dict[str, Any]:
    from . import profile, thresholds_cpu, thresholds_cuda
    from .launch import all_times, state

    here, load = profile.key(device, world), [round(value, 2) for value in os.getloadavg()]
    if not given.output and (error := profile.output_error(here)):
        raise Unmeasured(error)
    path = given.output or profile.own_path(here)
    assert path is not None, "output_error would have said so"
    say(f"{here.says}; load {load[0]}")
    started = time.monotonic()
    settings, left = _in_force(device, world), given.seconds
    if not settings:
        thresholds = thresholds_cuda if device == "cuda" else thresholds_cpu
        with progress("comparing", thresholds.count(world, ops, largest)) as on_visit:
            settings = thresholds.search(here, ops, largest, SEARCH * given.seconds, on_visit)
        left -= SEARCH * given.seconds
    old = profile.known(path)
    # The profile will have the thresholds of the collectives that it keeps, so measure under these too.
    settings = profile.settings_of(profile.with_others(profile.bare(here, settings), old, ops))
    with profile.draft(here, settings) as draft:
        known = {ranks: profile.prices(device, ranks, world, "measured", draft) for ranks in sizes.group_sizes(world)}
        todo = []
        for ranks in sizes.group_sizes(world):
            for op in ops:
                grid = sizes.points([ranks], [op], sizes.calibrated(largest))
                todo += grid + [new for pair in pairwise(grid) for new in sizes.switches(*pair, known[ranks])]
        if len(ops) == len(OPS):
            todo += sizes.local(device, world)
        launches = _measure("calibrating", device, world, todo, left, draft)
    reference_us = state(launches)
    found, share = all_times(launches, reference_us)
    command = "python -m torch_symm " + shlex.join(["tune", *_shown(given)])
    measured = profile.measured(command, load, reference_us)
    made = profile.assemble(profile.bare(here, settings), found, measured, known)
    profile.write(path, {**profile.with_others(made, old, ops), **profile.inter_node(path)})
    for ranks, setting in settings.items():
        say(f"groups of {ranks}: " + ", ".join(f"{name} = {value}" for name, value in setting.items()))
    _say_state(reference_us, share)
    seconds = time.monotonic() - started
    say(f"{len(found)} points in {seconds:.0f} s, written to {path}")
    return {"written": str(path), "seconds": round(seconds, 1), "points": len(found), "share": share, "profile": made}


def _say_state(reference_us: float, share: float) -> None:
    if reference_us:
        say(f"{share:.0%} of the visits count: those in which the machine's reference took about {reference_us:.0f} µs")


def _in_force(device: str, world: int) -> dict[int, dict[str, Any]]:
    """Returns the thresholds under which the measurement ran, by ranks of a group, for the profile to set."""
    tuning = os.environ.get("SYMM_CUDA_TUNING", "").strip()
    return {ranks: {"cuda_tuning": tuning} for ranks in sizes.group_sizes(world)} if device == "cuda" and tuning else {}


def _shown(given: argparse.Namespace) -> list[str]:
    """Returns the options that determine the measurement."""
    values = {
        "--device": given.device,
        "--ranks": given.ranks,
        "--seconds": given.seconds,
        "--largest": given.largest,
        "--ops": given.ops,
    }
    usual = {"--seconds": SECONDS, "--largest": str(LARGEST), "--ops": ",".join(OPS)}
    return [
        word
        for name, value in values.items()
        if value is not None and usual.get(name) != value
        for word in (name, f"{value:g}" if isinstance(value, float) else str(value))
    ]


def _check(given: argparse.Namespace, device: str, world: int, ops: tuple[str, ...], largest: int) -> dict[str, Any]:
    from . import profile
    from .check import GOAL_MEDIAN, GOAL_WORST, HEADINGS, compare, summary
    from .launch import all_times, state, times

    here, load = profile.key(device, world), os.getloadavg()[0]
    known = profile.prices(device, world, world, "measured", given.profile)
    if known is None:
        raise Unmeasured(f"there is no profile of {here.says}: run `python -m torch_symm tune` first")
    say(f"{here.says}; load {load:.2f}; {known.origin}")
    todo = sizes.points(sizes.group_sizes(world), ops, sizes.checked(largest))
    launches = _measure("checking", device, world, todo, given.seconds, given.profile)
    # A profile without a state counts as measured in the current state.
    reference_us = known.reference_us or state(launches)
    found, share = times(launches, reference_us)
    if not found:
        found, _ = all_times(launches, reference_us)
    compared = compare(device, world, found, given.profile)
    table(f"relative errors at {len(compared)} points that calibration did not measure", HEADINGS, summary(compared))
    errors = [one.error for one in compared]
    median, worst = statistics.median(errors), max(errors)
    met = median <= GOAL_MEDIAN and worst <= GOAL_WORST
    verdict = "met" if met else "NOT met"
    if share == 0.0:
        say(f"the machine was never in the profile's state (reference {reference_us:.0f} µs): all visits count")
    else:
        _say_state(reference_us, share)
    if len(found) < len(launches[0]):
        say(f"{len(launches[0]) - len(found)} points were never visited in that state")
    say(f"wanted: median ≤ {GOAL_MEDIAN:.0%}, worst ≤ {GOAL_WORST:.0%}: {verdict} ({median:.1%}, {worst:.0%})")
    for one in sorted(compared, key=lambda one: -one.error)[:5]:
        where = f"{one.op} of {one.bytes:,} bytes, {one.ranks} ranks ({one.algorithm})"
        say(f"  {one.error:.0%}: {where}: measured {one.measured:.1f} µs, predicted {one.predicted:.1f} µs")
    return {
        "origin": f"{here.says}; load {load:.2f}",
        "load": load,
        "median": median,
        "worst": worst,
        "met": met,
        "points": list(map(dataclasses.asdict, compared)),
    }


def _draw(parser: Parser, given: argparse.Namespace) -> int:
    from .check import Compared

    if not given.plot:
        parser.error("--draw: say where with --plot")
    try:
        read = json.loads(given.draw.read_text())
        compared = [Compared(**point) for point in read["points"]]
        check_figures(value for one in compared for name, value in vars(one).items() if name not in ("op", "algorithm"))
        title = str(read["origin"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        parser.error(f"--draw: {given.draw} holds no check: {error}")
    _check_plot(parser, given.plot)
    return _drawn(compared, title, given.plot, given.json == "-")


def _drawn(compared: Sequence[Compared], title: str, path: Path, as_json: bool) -> int:
    """Draws a check; returns 1 if that failed."""
    from .plot import draw

    try:
        draw(compared, title, path)
    except (OSError, ValueError) as error:
        report(f"failed: {error}", as_json)
        return 1
    return 0


def _plans(given: argparse.Namespace, device: str, world: int) -> dict[str, Any]:
    from .redistribution import HEADINGS, measure, summary

    with progress("timing plans", given.redistribution) as on_visit:
        cases = measure(world, device, given.redistribution, given.profile, on_visit)
    table("what the cheapest plan of each model is worth", HEADINGS, summary(cases))
    return {"cases": [dataclasses.asdict(case) for case in cases]}

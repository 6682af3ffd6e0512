"""``torch-symm check``."""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_symm._repr import counted
from torch_symm.tools.command import Parser, named, positive

if TYPE_CHECKING:
    from .cases import Covered
    from .faults import Seen
    from .invariance import Row
    from .rank import CheckDone

#: Seconds for all cases together; the remaining cases are reported as skipped.
SECONDS = 45.0
WORLDS = "2,3"
#: Sizes of groups with --invariance; 2 alone would not suffice, because every order of 2 ranks gives the same sum.
SUMMED = "2,4"
#: Exit status of a run that found no error, but did not make all calls.
UNFINISHED = 3


def parser() -> Parser:
    """Returns the parser of the command."""
    made = Parser(
        "check",
        "Compares the results of every collective, type and reduction, at many lengths, with a reference, bit for bit. "
        "Use it on a new machine or driver, and when you report a bug. Exit status 1 if a result is wrong, 3 "
        "if time ran out before all calls were made.",
        [
            ("", "check all collectives on CPU tensors, in less than a minute"),
            ("--faults", "also check the errors on the other ranks if one dies, is late or makes another call"),
            ("--invariance", "check whether sums depend on the length of the call, for symm and for torch's backend"),
            ("--ops all_reduce,broadcast --ranks 4", "check two collectives on 4 ranks"),
            ("--device cuda --ranks 2 --json", "check GPUs and print JSON"),
        ],
    )
    made.add_argument("--ranks", help=f"comma-separated group sizes (default: {WORLDS}; --invariance: {SUMMED})")
    made.add_argument("--ops", help="comma-separated collectives (default: all)")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device of the tensors (default: cpu)")
    made.add_argument("--faults", action="store_true", help="also let a rank fail, and check the other ranks' errors")
    made.add_argument(
        "--invariance", action="store_true", help="only compare sums of the same values in different calls, bit for bit"
    )
    made.add_argument("--quick", action="store_true", help="check fewer lengths")
    made.add_argument(
        "--seconds",
        type=positive,
        default=SECONDS,
        help=f"time after which no further type starts (default: {SECONDS:.0f})",
    )
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def run(parser: Parser, given: argparse.Namespace) -> int:
    """Checks and prints a summary; returns 1 if something was wrong."""
    worlds, ops = _wanted(parser, given)
    for option in ("faults", "ops", "quick"):
        if given.invariance and getattr(given, option):
            parser.error(f"--invariance: makes its own calls, so --{option} has no effect")
    if given.invariance:
        return _invariance(given, worlds)
    started = time.monotonic()
    if not given.json:
        where = f"groups of {' and '.join(map(str, worlds))} ranks, {given.device} tensors"
        print(f"checking {counted(len(ops), 'collective')}, {where} …", flush=True)
    done, failure = _check(given, worlds, ops)
    calls = sum((one.calls for one in done if one.rank == 0), Counter[tuple[str, int]]())
    findings = [finding for one in done for finding in one.findings] + ([failure] if failure else [])
    left = max((one.left for one in done), default=0)
    covered = next((one.covered for one in done if one.rank == 0), {})
    if not given.json:
        _say(calls, covered, worlds, findings, left)
        for op in ops:
            if op not in covered:
                print(f"  {op:<18} NOT CHECKED")
    seen = _faults(given) if given.faults else []
    wrong = len(findings) + sum(not one.right for one in seen)
    # A run without a call has checked nothing, whatever the reason.
    unfinished = left > 0 or not calls
    found = {
        "ok": wrong == 0 and not unfinished,
        "machine": _machine(),
        "device": given.device,
        "quick": given.quick,
        "calls": [{"op": op, "ranks": world, "calls": number} for (op, world), number in calls.items()],
        "covered": {op: {name: sorted(part) for name, part in asdict(one).items()} for op, one in covered.items()},
        "left": left,
        "findings": findings,
        "faults": [{**asdict(one.fault), "right": one.right, "seen": one.text} for one in seen],
        "seconds": round(time.monotonic() - started, 1),
    }
    print(json.dumps(found, indent=1) if given.json else _verdict(found, calls, wrong, len(ops)))
    return 1 if wrong else UNFINISHED if unfinished else 0


def _wanted(parser: Parser, given: argparse.Namespace) -> tuple[tuple[int, ...], tuple[str, ...]]:
    import torch

    from .cases import OPS

    if given.ranks is None:
        given.ranks = SUMMED if given.invariance else WORLDS
    usual = given.ranks in (SUMMED, WORLDS)
    try:
        worlds = tuple(sorted({int(word) for word in given.ranks.split(",")}))
    except ValueError:
        parser.error(f"--ranks: {given.ranks!r} are no numbers of ranks")
    if min(worlds) < 2 or max(worlds) > 8:
        parser.error(f"--ranks {given.ranks}: groups of 2 to 8 ranks are checked")
    gpus = torch.cuda.device_count() if given.device == "cuda" else 0
    if given.device == "cuda":
        if usual:
            worlds = tuple(world for world in worlds if world <= gpus)
        if not worlds or max(worlds) > gpus:
            parser.error(f"--device cuda: each rank needs a GPU, at least 2, and torch finds {gpus} here")
    try:
        ops = OPS if given.ops is None else tuple(named("collective", word, OPS) for word in given.ops.split(","))
    except ValueError as error:
        parser.error(f"--ops: {error}")
    return worlds, ops


def _invariance(given: argparse.Namespace, worlds: tuple[int, ...]) -> int:
    """Compares sums of the same values in different calls; returns 1 if a promise was broken, 3 if a rank failed."""
    from . import invariance

    started = time.monotonic()
    if not given.json:
        print(
            f"comparing sums in groups of {' and '.join(map(str, worlds))} ranks, {given.device} tensors …", flush=True
        )
    every, failure = _ran(given, worlds, (), invariance.main)
    rows = invariance.merged([one.rows for one in every])
    missing = {name: why for one in every for name, why in one.missing.items()}
    errors = [one.error for one in every if one.error] + ([failure] if failure else [])
    broken = [f"{row.side}, {row.dtype} on {row.ranks} ranks: {', '.join(row.broken)}" for row in rows if row.broken]
    found = {
        "ok": not broken and not errors and bool(rows),
        "machine": _machine(),
        "device": given.device,
        "rows": [asdict(row) for row in rows],
        "missing": missing,
        "broken": broken,
        "errors": errors,
        "seconds": round(time.monotonic() - started, 1),
    }
    print(json.dumps(found, indent=1) if given.json else _shares(rows, found))
    return 1 if broken else UNFINISHED if errors or not rows else 0


def _shares(rows: list[Row], found: dict[str, Any]) -> str:
    """Returns the table of shares, and the verdict."""
    from .invariance import COLUMNS

    def shown(share: float | None) -> str:
        return "-" if share is None else "0" if share == 0 else f"{share:.2%}"

    table: list[tuple[str, ...]] = [("side", "ranks", "type", *COLUMNS)]
    table += [(row.side, str(row.ranks), row.dtype, *(shown(row.differ[name]) for name in COLUMNS)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    lines.insert(0, "share of elements whose bits differ between:")
    lines += [f"{name}: not compared: {why}" for name, why in found["missing"].items()]
    lines += [f"FAILED: {error}" for error in found["errors"]] + [f"WRONG: {broken}" for broken in found["broken"]]
    if found["ok"]:
        lines.append(f"symm: all promised bits are equal, in {found['seconds']} s")
    return "\n".join(lines)


def _check(given: argparse.Namespace, worlds: tuple[int, ...], ops: tuple[str, ...]) -> tuple[list[CheckDone], str]:
    """Returns the findings of each rank, and why the run ended early."""
    from . import rank

    return _ran(given, worlds, ops, rank.main)


def _ran(
    given: argparse.Namespace, worlds: tuple[int, ...], ops: tuple[str, ...], main: Callable[..., None]
) -> tuple[list[Any], str]:
    """Runs ``main`` on the ranks; returns what each of them reports, and why the run ended early."""
    import torch
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

    from torch_symm.launch import ranks
    from torch_symm.launch.messages import reported_in_time

    from . import rank

    world = max(worlds)
    # Ranks that get an error report it within this time of each other.
    still_s = rank.GROUP_TIMEOUT.total_seconds() + rank.MEETING_S
    first_s = max(given.seconds, SECONDS) + still_s
    stop = torch.zeros(1, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
    barrier, results, done = ranks.barrier(world), ranks.queue(), []
    with tempfile.TemporaryDirectory(prefix="torch-symm-check-") as folder:
        rendezvous = "symm+" + (Path(folder) / "rendezvous").as_uri()
        task = rank.CheckTask(worlds, given.device, ops, given.quick, given.seconds, rendezvous)
        try:
            with ranks.started(main, (task, barrier, stop, results), world, warm=True) as started:
                for message in reported_in_time(started, results, world, first_s, still_s):
                    done.append(message)
        except (ProcessRaisedException, ProcessExitedException, RuntimeError) as error:
            return done, str(error).strip().splitlines()[-1]
    return done, ""


def _faults(given: argparse.Namespace) -> list[Seen]:
    import torch

    from . import faults

    seen = []
    world = min(faults.RANKS, torch.cuda.device_count()) if given.device == "cuda" else faults.RANKS
    for one in faults.play(given.device, world):
        seen.append(one)
        if not given.json:
            print(f"  a rank {one.fault.does}: {'' if one.right else 'WRONG: '}{one.text}", flush=True)
    return seen


def _say(
    calls: Counter[tuple[str, int]],
    covered: dict[str, Covered],
    worlds: tuple[int, ...],
    findings: list[str],
    left: int,
) -> None:
    for op, what in covered.items():
        each = ", ".join(f"{calls[op, world]} of {world} ranks" for world in worlds if calls[op, world])
        print(f"  {op:<18} calls: {each}: {what}")
    if left:
        print(f"  {left} calls were left out, since the time was over (--seconds)")
    for finding in findings:
        print(f"WRONG: {finding}")


def _machine() -> dict[str, Any]:
    from torch_symm.tools.bench import machine

    return {**asdict(machine.describe()), "system": platform.platform(), "torch_symm": _version()}


def _version() -> str:
    from torch_symm._version import __version__

    return str(__version__)


def _verdict(found: dict[str, Any], calls: Counter[tuple[str, int]], wrong: int, asked: int) -> str:
    from .cases import Covered

    here = found["machine"]
    everything = Covered()
    for one in found["covered"].values():
        for name, part in one.items():
            getattr(everything, name).update(part)
    lines = [
        f"what I checked: {len(found['covered'])} of {asked} collectives, {everything}, bit for bit"
        if calls
        else "what I checked: nothing",
        f"where: {here['date']}, {here['cpu']}, {here['cores']} cores, {here['system']}, torch {here['torch']}, "
        f"torch-symm {here['torch_symm']}",
    ]
    total = sum(calls.values())
    if wrong:
        lines.append(
            f"{wrong} of {total} calls and faults WRONG: report this, with the output of torch-symm doctor --json"
        )
    elif found["left"] or not total:
        lines.append(
            f"NOT FINISHED: {total} calls right, {found['left']} not made for want of time: --seconds sets the limit"
        )
    else:
        faults = f" and {len(found['faults'])} faults" if found["faults"] else ""
        lines.append(f"all {total} calls{faults} right, in {found['seconds']} s")
    return "\n".join(lines)

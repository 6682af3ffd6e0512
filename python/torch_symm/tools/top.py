"""``torch-symm top``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from torch_symm._live import files, table
from torch_symm._trace.dump import Dump, NotADump, read
from torch_symm._trace.report import merge
from torch_symm.tools.command import PROGRAM, Parser, positive, report

HOW = "start the job with SYMM_STATS_INTERVAL=2, and give this command its SYMM_TRACE_DIR, if it has one"


def parser() -> Parser:
    """Returns the parser of the command."""
    made = Parser(
        "top",
        "Shows the last calls of a running job by collective and size: how long they took, the share of that time that "
        "ranks waited for the slowest rank, and which rank that was. The job needs SYMM_STATS_INTERVAL=seconds in its "
        "environment.",
        [
            ("", "show the job that wrote statistics last, until Ctrl-C"),
            ("4711 --once", "show the job of process 4711 once"),
            ("4711 --json", "print the same table as JSON"),
        ],
    )
    made.add_argument(
        "pid", nargs="?", type=int, metavar="PID", help="a process of the job (default: the last to write)"
    )
    made.add_argument("--once", action="store_true", help="print the table once")
    made.add_argument(
        "--interval", type=positive, default=2.0, metavar="SECONDS", help="time between tables (default: 2)"
    )
    made.add_argument(
        "--dir", type=Path, default=None, help="the job's trace directory (default: SYMM_TRACE_DIR, or its default)"
    )
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def run(parser: Parser, given: argparse.Namespace) -> int:
    """Prints tables until the job ends; returns 2 if no job was found."""
    place = given.dir or files.folder()
    pid = given.pid if given.pid is not None else files.newest(place)
    if pid is None:
        parser.error(f"no running process leaves statistics in {place}: {HOW}")
    if not files.running(pid):
        parser.error(f"there is no process {pid}; for a job that has failed: {PROGRAM} trace {place}")
    if not (place / files.name(pid)).exists():
        parser.error(f"process {pid} leaves no statistics in {place}: {HOW}")
    while True:
        try:
            dumps = files.job(read(place / files.name(pid), private=True), place)
        except NotADump as error:
            if not files.running(pid):
                report(f"process {pid} has ended", given.json)
                return 0
            report(error, given.json)
            return 2
        if given.json:
            print(json.dumps(_as_json(dumps), indent=1))
            return 0
        clear = "\033[H\033[2J" if sys.stdout.isatty() and not given.once else ""
        print(clear + table.render(dumps), flush=True)
        if given.once:
            return 0
        time.sleep(given.interval)
        if not files.running(pid):
            print(f"process {pid} has ended", file=sys.stderr)
            return 0


def _as_json(dumps: list[Dump]) -> dict[str, object]:
    groups = merge(dumps)
    return {
        "host": dumps[0].host,
        "pids": [dump.pid for dump in dumps],
        "written_ns": max(dump.written_ns for dump in dumps),
        "lines": [line.as_json() for line in table.lines(groups)],
    }

"""``torch-symm trace``."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import sys
from pathlib import Path

from torch_symm._trace.annotate import annotate_profiler_trace
from torch_symm._trace.dump import Dump, NotADump, read
from torch_symm._trace.report import as_json, render
from torch_symm._trace.torchfrtrace import convert
from torch_symm.tools.command import Parser


def parser() -> Parser:
    """Returns the parser of the command."""
    made = Parser(
        "trace",
        "Reads the dumps that the ranks of a failed run wrote. Reports the last call of each rank, the collectives "
        "that a rank never started, and the calls on which ranks disagree.",
        [
            ("/tmp/torch-symm-1000", "read all dumps in a directory"),
            ("--torch out trace-*.json", "convert the dumps for torchfrtrace"),
            ("--annotate profile.json trace-*.json", "add algorithm, bandwidth and waiting time to a profile"),
        ],
    )
    made.add_argument("dumps", nargs="+", type=Path, metavar="DUMP", help="a dump, or a directory of dumps")
    made.add_argument("--torch", type=Path, metavar="FOLDER", help="convert the dumps for torchfrtrace; no report")
    made.add_argument(
        "--annotate", type=Path, metavar="TRACE", help="add the calls' data to this trace of torch.profiler; no report"
    )
    made.add_argument("--json", action="store_true", help="print the report of each group as one JSON object")
    return made


def run(_parser: Parser, given: argparse.Namespace) -> int:
    """Prints one report of all dumps; returns 2 if a dump cannot be used."""
    dumps, files, status = [], list[Path](), 0
    try:
        for path in _files(given.dumps):
            try:
                dumps.append(read(path))
                files.append(path)
            except NotADump as error:
                print(error, file=sys.stderr)
                status = 2
        if dumps and given.annotate:
            print(f"{given.annotate}: {annotate_profiler_trace(given.annotate, files)} events have got arguments")
        elif dumps and given.torch:
            _convert(dumps, given.torch)
        elif dumps:
            print(json.dumps({"groups": as_json(dumps)}, indent=1) if given.json else render(dumps))
    except (NotADump, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return status


def _files(paths: list[Path]) -> list[Path]:
    files = []
    for path in paths:
        found = sorted(path.glob("trace-*.json")) if path.is_dir() else [path]
        if not found:
            raise NotADump(f"{path}: no dump is in this folder; their names are trace-<pid>-rank<rank>.json")
        files += found
    return files


def _convert(dumps: list[Dump], folder: Path) -> None:
    ranks = convert(dumps)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for rank, content in sorted(ranks.items()):
        target = folder / f"torch_rank_{rank}"
        part = folder / f".torch_rank_{rank}.{os.getpid()}.tmp"
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                pickle.dump(content, file)
            part.replace(target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        print(target)
    members = {member.global_rank for dump in dumps for view in dump.views for member in view.members}
    if missing := sorted(members - ranks.keys()):
        print(f"no dump of ranks {missing}: torchfrtrace needs --allow-incomplete-ranks", file=sys.stderr)

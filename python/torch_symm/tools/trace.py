"""``torch-symm trace``."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

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
    made.add_argument("--json", action="store_true", help="print one JSON object, with the report of each group")
    return made


def run(_parser: Parser, given: argparse.Namespace) -> int:
    """Prints one report of all dumps; returns 2 if a dump cannot be used."""
    dumps, files, errors = [], list[Path](), list[str]()
    found: dict[str, Any] = {}
    text = ""
    try:
        for path in _files(given.dumps):
            try:
                dumps.append(read(path))
                files.append(path)
            except NotADump as error:
                errors.append(str(error))
        if dumps and given.annotate:
            found["events"] = annotate_profiler_trace(given.annotate, files)
            text = f"{given.annotate}: {found['events']} events have got arguments"
        elif dumps and given.torch:
            found["written"], missing = _convert(dumps, given.torch)
            text = "\n".join(found["written"])
            if missing:
                print(f"no dump of ranks {missing}: torchfrtrace needs --allow-incomplete-ranks", file=sys.stderr)
        elif dumps:
            found["groups"] = as_json(dumps)
            text = render(dumps)
    except (NotADump, OSError, ValueError) as error:
        errors.append(str(error))
    for line in errors:
        print(line, file=sys.stderr)
    if given.json:
        print(json.dumps(found | ({"error": "; ".join(errors)} if errors else {}), indent=1))
    elif text:
        print(text)
    return 2 if errors else 0


def _files(paths: list[Path]) -> list[Path]:
    files = []
    for path in paths:
        found = sorted(path.glob("trace-*.json")) if path.is_dir() else [path]
        if not found:
            raise NotADump(f"{path}: no dump is in this folder; their names are trace-<pid>-rank<rank>.json")
        files += found
    return files


def _convert(dumps: list[Dump], folder: Path) -> tuple[list[str], list[int]]:
    """Writes a file for each rank; returns the files, and the ranks without a dump."""
    ranks, written = convert(dumps), []
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
        written.append(str(target))
    members = {rank for dump in dumps for view in dump.views for rank in view.global_ranks}
    return written, sorted(members - ranks.keys())

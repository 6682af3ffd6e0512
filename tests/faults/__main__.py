"""Runs the fault matrix, and prints and writes the observations of each backend's ranks."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from faults import cases, processes, table
from faults.case import Case, broken
from faults.nodes import over_nodes
from faults.runner import guarded


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/faults", description=__doc__)
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="run only cases whose name or row contains TEXT"
    )
    parser.add_argument("--sides", default="gloo,symm", help="comma-separated backends (default: gloo,symm)")
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds for a case on a backend (default: 90)")
    parser.add_argument("--patience", type=float, default=1.0, help="factor for all promised times (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all observations to FILE as JSON")
    parser.add_argument("--write", type=Path, metavar="FILE", help="replace the table between the markers in FILE")
    parser.add_argument("--nodes", action="store_true", help="place symm's ranks on two nodes, both on this machine")
    parser.add_argument("--list", action="store_true", help="print the names of the cases, run none")
    options = parser.parse_args()
    chosen = [
        case
        for case in (over_nodes(list(cases.every_case().values())) if options.nodes else cases.all_cases())
        if not options.only or any(text in case.name or text in case.row for text in options.only)
    ]
    if options.list:
        print("\n".join(f"{case.name}: {case.row}" for case in chosen))
        return 0
    sides = options.sides.split(",")
    if not chosen or not set(sides) <= {"gloo", "symm"}:
        parser.error("no such case or side")
    torch.set_num_threads(1)
    processes.NODES = 2 if options.nodes else 1
    with tempfile.TemporaryDirectory(prefix="symm-traces-") as dumps:
        # Dumps of the flight recorder are meant to stay, so they do not count as leaks.
        os.environ["SYMM_TRACE_DIR"] = dumps
        return play(chosen, sides, options)


def play(chosen: list[Case], sides: list[str], options: argparse.Namespace) -> int:
    """Runs the cases, prints and writes the results; returns 1 if a promise was broken."""
    begun = time.monotonic()
    results: list[table.Result] = []
    for number, case in enumerate(chosen):
        # The sides alternate, so that neither one always has the colder caches.
        for side in sides if number % 2 == 0 else sides[::-1]:
            if side not in case.sides:
                continue
            started = time.monotonic()
            outcome = guarded(case, side, options.timeout)
            faults = broken(case.promise, outcome, options.patience) if side == "symm" else []
            results.append(table.Result(case, side, outcome, faults, time.monotonic() - started))
            print(table.line(results[-1]), flush=True)
    facts = table.facts(time.monotonic() - begun, sides)
    text = table.markdown(results, facts, options.nodes)
    print(f"\n{text}")
    if options.json:
        options.json.write_text(json.dumps(table.as_json(results, facts), indent=1) + "\n")
    if options.write:
        table.write_into(options.write, text, options.nodes)
    return 1 if any(result.broken for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())

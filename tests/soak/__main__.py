"""Random collectives and faults on real processes, each result and each failure checked: ``python tests/soak``.

A round is drawn from ``--seed`` and its number. The first broken promise prints the seed, the round, its program and
the stacks of all processes, and ends the run with 1; ``--seed S --round R`` repeats only that round. Timing within a
round is not reproducible, so a race may need ``--times``.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

import draw
import faults
from report import Report
from supervisor import Supervisor, Violation
from torch_symm.tools.command import count, positive


def main() -> int:
    options = arguments()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    # Set before ranks are forked, which inherit it.
    faults.LIMIT = options.limit
    report = Report(options.device)
    start = time.monotonic()
    verdict = 0
    # Not a TemporaryDirectory, because its finalizer would run in ranks that exit in order.
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    supervisor = Supervisor(options.ranks, folder, options.device)
    number = options.round or 0
    try:
        while options.round is None or report.rounds < options.times:
            report.seconds = time.monotonic() - start
            if options.round is None and report.seconds > 60 * options.minutes:
                break
            report.add(*supervisor.play(seed, number, options.only))
            number += options.round is None
    except Violation as violation:
        program = draw.program(seed, number, options.ranks, options.only)
        sys.stdout.write(f"--seed {seed} --round {number} --ranks {options.ranks}\n{program}\n{violation}\n")
        verdict = 1
    finally:
        supervisor.close()
        shutil.rmtree(folder)
    report.seconds = time.monotonic() - start
    verdict = verdict or bool(report.leaks())
    sys.stdout.write(f"soak --seed {seed} --ranks {options.ranks} --device {options.device}\n{report.text()}\n")
    sys.stdout.write(f"soak: {'FAILED' if verdict else 'passed'}\n")
    if options.report:
        record = {"seed": seed, "ranks": options.ranks, "device": options.device, "passed": not verdict}
        Path(options.report).write_text(json.dumps({**record, **report.record()}, indent=1) + "\n")
    return verdict


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--minutes", type=positive, default=5, help="length of the run (default: 5)")
    parser.add_argument("--seed", type=int, help="seed of all rounds (default: random, printed at the end)")
    parser.add_argument("--round", type=int, help="run only the round of this number")
    parser.add_argument("--times", type=count, default=1, help="number of runs of --round (default: 1)")
    parser.add_argument("--ranks", type=count, default=4, help="number of ranks (default: 4)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device of the tensors (default: cpu)")
    parser.add_argument("--only", default="", choices=list(draw.FAULTS), help="inject this fault in every round")
    parser.add_argument(
        "--limit",
        type=positive,
        default=faults.LIMIT,
        help=f"seconds within which a failure must be reported (default: {faults.LIMIT:g})",
    )
    parser.add_argument("--report", metavar="FILE", help="write the figures to FILE as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

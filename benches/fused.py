"""``python benches/fused.py``: matrix products fused with an all-gather or a reduce-scatter.

Each side is a way to get the same result: our operators, torch's, torch's with its native asynchronous products, and
the collective and the product one after the other, with NCCL and with symm; ``mm`` is the product alone. torch has
one engine of symmetric memory per process, and reads its switches once: so every engine has processes of its own, one
per GPU, and all engines' processes live at the same time. In each step one side of one engine runs, while the others
wait on the host. Sides alternate in turns, every second turn in the opposite order, in graphs of 10 calls and in loops
of 10 eager calls. A turn took as long as its slowest rank; a figure is the median over turns, per call.
Before and after, every side is compared with the unfused call.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import fused_rank
from fused_rank import Finished, Task
from fused_sides import MM, OURS, SMALL, engines, shapes
from gpu_shared import FAILURES, begin, collect, ranks, write_json, write_table
from torch_symm.launch import ranks as launched
from torch_symm.tools.bench.gpu.launch import PATIENT_SETTINGS, START_S
from torch_symm.tools.bench.gpu.rank_sync import Meeting
from torch_symm.tools.command import count, whole

TURNS, QUICK_TURNS = 7, 3


def measure(task: Task, still_s: float = START_S) -> Iterator[Finished]:
    """Yields every shape when it is finished.

    Raises:
        torch.multiprocessing.ProcessRaisedException, ProcessExitedException: a process failed.
        StalledError: no shape was finished for ``still_s`` seconds.
    """
    processes = task.world * len(task.engines)
    meeting = Meeting(processes, len(task.sides()), launched.barrier(processes))
    results, known = launched.queue(), engines(task.device)
    with ExitStack() as stack:
        started = []
        for number, name in enumerate(task.engines):
            with launched.environment(known[name].environment):
                given = (number, task, meeting, results)
                started.append(stack.enter_context(launched.started(fused_rank.main, given, task.world)))
        yield from collect(results, len(task.shapes), started, still_s, "shapes")


def medians(finished: Finished, mode: str) -> dict[str, float]:
    """µs of every side."""
    return {side: statistics.median(modes[mode]) for side, modes in finished.turns.items() if mode in modes}


def row(finished: Finished, modes: Sequence[str]) -> list[str]:
    """A line of the table."""
    fields = [finished.shape.name]
    for mode in modes:
        us = medians(finished, mode)
        own, alone = us.get(OURS), us.get(MM)
        peers = [(time, side) for side, time in us.items() if side not in (OURS, MM)]
        best = min(peers) if peers else None
        fields += [f"{alone:.1f}" if alone else "-", f"{own:.1f}" if own else "-"]
        fields += [f"{best[0]:.1f}", best[1]] if best else ["-", ""]
        fields.append(f"{best[0] / own:.2f}" if best and own else "")
    return fields


def main(arguments: Sequence[str]) -> int:
    """Measures; returns 0 if every side gave every result, otherwise 1, with the results so far."""
    parser = argparse.ArgumentParser(prog="python benches/fused.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=count, help="number of GPUs (default: all, at most 8)")
    parser.add_argument("--engines", help="comma-separated, of: " + ", ".join(engines("cuda")))
    parser.add_argument("--shapes", help="comma-separated indices of the table's rows, from 0 (default: all)")
    parser.add_argument("--quick", action="store_true", help=f"measure {QUICK_TURNS} turns instead of {TURNS}")
    parser.add_argument("--json", type=Path, default=Path("out/bench-fused.json"), help="file for all figures")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: test the program without GPUs")
    given = parser.parse_args(arguments)
    world = ranks(parser, given.ranks, given.device)
    known = engines(given.device)
    names = given.engines.split(",") if given.engines else list(known)
    everything = shapes(world) if given.device == "cuda" else list(SMALL)
    try:
        numbers = map(whole, given.shapes.split(",")) if given.shapes else range(len(everything))
        chosen = [everything[number] for number in numbers]
    except (argparse.ArgumentTypeError, IndexError):
        parser.error(f"--shapes {given.shapes}: there are 0 to {len(everything) - 1}")
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"no {unknown[0]!r}; there are {', '.join(known)}")
    here, gpus = begin(world, given.device, PATIENT_SETTINGS)
    found: list[Finished] = []
    failure: str | None = None
    modes = ("graph", "eager") if given.device == "cuda" else ("eager",)
    with tempfile.TemporaryDirectory(prefix="torch-symm-bench-") as folder:
        places = tuple((Path(folder) / f"rendezvous-{number}").as_uri() for number in range(len(names)))
        task = Task(world, given.device, tuple(chosen), tuple(names), places, QUICK_TURNS if given.quick else TURNS)
        try:
            for finished in measure(task):
                found.append(finished)
                for mode in modes:
                    parts = [f"{side} {us:.1f}" for side, us in medians(finished, mode).items()]
                    print(f"[{len(found)}/{len(chosen)}] {finished.shape.name} {mode}: {', '.join(parts)}", flush=True)
                for side, note in finished.notes.items():
                    print(f"  {side}: {note}", flush=True)
        except FAILURES as error:
            failure = str(error).strip()
        except KeyboardInterrupt:
            failure = "interrupted"
    headings = ["shape"]
    for mode in modes:
        headings += [f"mm {mode}", f"symm {mode}", "best peer", "which", "ratio"]
    write_table(f"fused products, {world} ranks, µs", headings, [row(each, modes) for each in found], sys.stdout)
    cells = [asdict(each) | {"us": {mode: medians(each, mode) for mode in modes}} for each in found]
    written = {"machine": asdict(here), "gpus": asdict(gpus), "arguments": list(arguments), "world": world}
    write_json(given.json, {**written, "shapes": cells, "failure": failure})
    print(f"written to {given.json}", flush=True)
    if failure is not None:
        print(f"failed: {failure}", file=sys.stderr, flush=True)
    return 1 if failure or any(each.notes for each in found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

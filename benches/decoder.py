"""``python benches/decoder.py``: the cost of a decoder's all-reduces in one CUDA graph per token.

A layer is the part of a tensor-parallel Llama 70B layer around its all-reduces: the product that ends attention (8192 /
n x 8192), the one that ends the MLP (28672 / n x 8192), and after each an all-reduce, the addition of the residual and
RMSNorm. The number of rows is the batch size; all is bfloat16. The sides:

* ``without``: the products, and what Inductor makes of addition and norm; no communication. The other sides are
  compared with this side;
* ``symm``, ``nccl``: the same with ``dist.all_reduce`` before the norm;
* ``fused``: ``torch.ops.symm.all_reduce_add_rms_norm_`` in place of all-reduce, addition and norm.

The first product takes this rank's columns of the normed rows; the second takes a fixed tensor, because no MLP runs.
Layers share weights, but enough layers (at least two) have different ones to exceed four times the GPU's L2 cache, so
that every product reads its weight from memory, as in a whole model.

Sides take turns, every second turn in the opposite order. In a turn the ranks start together; an untimed replay absorbs
the skew, a second one is timed between two events. A turn took as long as its slowest rank, and µs a token is
the median over turns. µs an all-reduce is the difference to ``without``, divided by the all-reduces of a token. Before
and after, the final rows of every side are compared with the rows after all-reduces by NCCL and norms by eager torch.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import decoder_rank
from decoder_rank import FUSED, PEER, POINTS, WITHOUT, Finished, Task
from gpu_shared import FAILURES, begin, collect, ranks, write_json, write_table
from torch_symm.launch import ranks as launched
from torch_symm.tools.bench.gpu.launch import PATIENT_SETTINGS, START_S
from torch_symm.tools.bench.gpu.rank_sync import MAX_TURNS, Meeting
from torch_symm.tools.bench.units import format_size
from torch_symm.tools.command import count, counts

BATCHES, LAYERS, TURNS, QUICK_TURNS = "1,8,32,64", 80, 15, 5
#: A pool of compiler processes in every rank would take longer to start than the one kernel takes to compile.
COMPILE_SETTINGS = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}


def measure(task: Task, still_s: float = START_S) -> Iterator[Finished]:
    """Yields every batch when it is finished.

    Raises:
        torch.multiprocessing.ProcessRaisedException, ProcessExitedException: a rank failed.
        StalledError: no batch was finished for ``still_s`` seconds.
    """
    meeting = Meeting(task.world, len(task.sides), launched.barrier(task.world))
    results = launched.queue()
    with launched.started(decoder_rank.enter, (task, meeting, results), task.world) as started:
        yield from collect(results, len(task.batches), [started], still_s, "batches")


def row(finished: Finished, sides: Sequence[str], layers: int) -> list[str]:
    """A line of the table: µs per token of every side, then the µs that an all-reduce adds to ``without``."""
    fields = [str(finished.batch), format_size(finished.bytes)]
    for side in sides:
        us = finished.us(side)
        fields.append("-" if us is None else f"{us:.1f}")
    for side in sides:
        more = finished.more_us(side, POINTS * layers)
        if side != WITHOUT:
            fields.append("-" if more is None else f"{more:.2f}")
    return fields


def task_from(arguments: Sequence[str]) -> tuple[Task, Path]:
    """Returns the task that the command line requests, still without a rendezvous, and the path of the JSON file."""
    parser = argparse.ArgumentParser(
        prog="python benches/decoder.py",
        description=(__doc__ or "").split("\n")[0].partition(": ")[2],
    )
    parser.add_argument("--ranks", type=count, help="number of GPUs (default: all, at most 8)")
    parser.add_argument(
        "--batches", type=counts, default=BATCHES, help=f"comma-separated numbers of rows per step (default: {BATCHES})"
    )
    parser.add_argument("--layers", type=count, default=LAYERS, help=f"number of layers (default: {LAYERS})")
    parser.add_argument("--sides", help=f"comma-separated, of: {WITHOUT}, symm, nccl, {FUSED} (default: all)")
    parser.add_argument("--turns", type=count, default=TURNS, help=f"turns, at most {MAX_TURNS} (default: {TURNS})")
    parser.add_argument("--quick", action="store_true", help=f"measure {QUICK_TURNS} turns")
    parser.add_argument("--json", type=Path, default=Path("out/bench-decoder.json"), help="file for all figures")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: test the program without GPUs, against Gloo"
    )
    given = parser.parse_args(arguments)
    world = ranks(parser, given.ranks, given.device)
    if world not in (2, 4, 8):
        parser.error(f"{world} ranks: 2, 4 or 8 share a row and the MLP evenly")
    known = [WITHOUT, "symm", PEER[given.device], FUSED]
    sides = given.sides.split(",") if given.sides else known
    unknown = [side for side in sides if side not in known]
    if unknown:
        parser.error(f"--sides: no {unknown[0]!r}; there are {', '.join(known)}")
    turns = QUICK_TURNS if given.quick else given.turns
    if turns > MAX_TURNS:
        parser.error(f"--turns is at most {MAX_TURNS}")
    return Task(world, given.device, given.batches, given.layers, tuple(sides), turns, ""), given.json


def main(arguments: Sequence[str]) -> int:
    """Measures; returns 0 if every side gave correct rows, otherwise 1, with the results so far."""
    asked, path = task_from(arguments)
    here, gpus = begin(asked.world, asked.device, PATIENT_SETTINGS | COMPILE_SETTINGS)
    found: list[Finished] = []
    failure: str | None = None
    with tempfile.TemporaryDirectory(prefix="torch-symm-bench-") as folder:
        task = replace(asked, rendezvous="symm+" + (Path(folder) / "rendezvous").as_uri())
        try:
            for finished in measure(task):
                found.append(finished)
                parts = [f"{side} {finished.us(side):.1f}" for side in finished.turns]
                print(f"[{len(found)}/{len(task.batches)}] batch {finished.batch}: {', '.join(parts)}", flush=True)
                for name, note in finished.notes.items():
                    print(f"  {name}: {note}", flush=True)
        except FAILURES as error:
            failure = str(error).strip()
        except KeyboardInterrupt:
            failure = "interrupted"
    headings = ["batch", "bytes", *task.sides, *(f"{side} more" for side in task.sides if side != WITHOUT)]
    title = f"decoder of {task.layers} layers, {task.world} ranks, µs a token; more: µs an all-reduce above {WITHOUT}"
    write_table(title, headings, [row(each, task.sides, task.layers) for each in found], sys.stdout)
    more = {side: [each.more_us(side, POINTS * task.layers) for each in found] for side in task.sides}
    written = {"machine": asdict(here), "gpus": asdict(gpus), "arguments": list(arguments), "task": asdict(asked)}
    write_json(path, {**written, "batches": [asdict(each) for each in found], "more_us": more, "failure": failure})
    print(f"written to {path}", flush=True)
    if failure is not None:
        print(f"failed: {failure}", file=sys.stderr, flush=True)
    return 1 if failure or any(set(each.notes) - {"norm"} for each in found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

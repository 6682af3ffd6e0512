"""Starts the rank processes of one number of ranks after the other and yields what they report."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_symm.launch import ranks
from torch_symm.launch.messages import reported

from . import rank as rank_process
from .beside import Beside, running
from .ops import DTYPES, OPS
from .record import Cell, Row
from .timing import SharedTensors


@dataclass(frozen=True)
class Options:
    """What to measure, and beside what. ``peer`` None measures the tested backend alone. Times in seconds."""

    backend: str
    peer: str | None
    ops: tuple[tuple[str, str], ...]
    sizes: tuple[int, ...]
    worlds: tuple[int, ...]
    seconds: float
    side_seconds: float
    least: int
    rounds: int
    beside: Beside


@dataclass(frozen=True)
class CopyRate:
    """The memory bandwidth found with ``world`` ranks copying at once, in bytes touched per second."""

    world: int
    bytes_per_s: float


def cells(options: Options, world: int) -> list[Cell]:
    """The cells of ``world`` ranks, operation by operation, from small to large."""
    found = []
    for op, dtype in options.ops:
        for size in options.sizes if op != "barrier" else (0,):
            unit = DTYPES[dtype].itemsize * (world if OPS[op].divided else 1)
            found.append(Cell(op, dtype, world, size, -(-size // unit) * unit))
    return found


def measure(options: Options) -> Iterator[CopyRate | Row]:
    """Runs everything, yielding each figure when it is there.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank failed; its text holds the rank's traceback.
        torch.multiprocessing.ProcessExitedException: a rank was killed or ended the process.
    """
    started = time.monotonic()
    todo = [(world, cells(options, world)) for world in options.worlds]
    total = sum(len(part) for _, part in todo)
    done = 0
    for world, part in todo:
        done += len(part)
        # Each world gets its share of the whole; time that an earlier one left over goes to the next.
        with running(options.beside):
            yield from _one_world(options, world, part, started + options.seconds * done / max(1, total))


def _one_world(options: Options, world: int, part: Sequence[Cell], deadline: float) -> Iterator[CopyRate | Row]:
    shared = SharedTensors(world, ranks.barrier(world))
    results = ranks.queue()
    with tempfile.TemporaryDirectory(prefix="torch-symm-bench-") as folder:
        task = rank_process.Task(
            world=world,
            backends=(options.backend,) if options.peer is None else (options.backend, options.peer),
            cells=tuple(part),
            rendezvous="symm+" + (Path(folder) / "rendezvous").as_uri(),
            deadline=deadline,
            side_seconds=options.side_seconds,
            least=options.least,
            rounds=options.rounds,
        )
        with ranks.started(rank_process.main, (task, shared, results), world) as started:
            for message in reported(started, results, len(part) + 1):
                yield CopyRate(world, message) if isinstance(message, float) else message

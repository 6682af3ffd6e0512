"""Starts one process per GPU and yields what they report."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch.multiprocessing as mp
from torch.multiprocessing.spawn import spawn

from ..launch import reported
from ..ops import DTYPES
from ..record import Cell
from . import rank as rank_process
from .calls import OPS
from .meeting import Meeting
from .rank import Message
from .record import Measured


@dataclass(frozen=True)
class Options:
    """What to measure. ``seconds``: the time that it may take, about."""

    world: int
    device: str
    sides: tuple[str, ...]
    ops: tuple[str, ...]
    dtypes: tuple[str, ...]
    sizes: tuple[int, ...]
    seconds: float
    turns: int


def cells(options: Options) -> list[Cell]:
    """The cells, operation by operation and dtype by dtype, from small to large."""
    found = []
    for op in options.ops:
        for dtype in options.dtypes if op != "barrier" else options.dtypes[:1]:
            for size in options.sizes if op != "barrier" else (0,):
                unit = DTYPES[dtype].itemsize * (options.world if OPS[op].divided else 1)
                found.append(Cell(op, dtype, options.world, size, -(-size // unit) * unit))
    return found


def measure(options: Options) -> Iterator[Message]:
    """Runs everything, yielding each finding when it is there.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank failed; its text holds the rank's traceback.
        torch.multiprocessing.ProcessExitedException: a rank was killed or ended the process.
    """
    context = mp.get_context("spawn")
    meeting = Meeting(options.world, context.Barrier(options.world))
    results = context.Queue()
    todo = cells(options)
    with tempfile.TemporaryDirectory(prefix="torch-symm-bench-") as folder:
        task = rank_process.Task(
            world=options.world,
            device=options.device,
            sides=options.sides,
            cells=tuple(todo),
            rendezvous="symm+" + (Path(folder) / "rendezvous").as_uri(),
            seconds=options.seconds,
            turns=options.turns,
        )
        processes = spawn(rank_process.main, (task, meeting, results), nprocs=options.world, join=False)  # type: ignore[no-untyped-call]
        yield from reported(processes, results, len(todo), Measured)

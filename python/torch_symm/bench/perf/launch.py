"""Starts the ranks on CPU tensors and yields the rows as they are found."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch.multiprocessing as mp
from torch.multiprocessing.spawn import spawn

from ..launch import reported
from ..timing import FIXED_ROUNDS, MAX_BURST, SharedTensors
from . import rank as rank_process
from .record import Found
from .request import Wanted


def measure(
    world: int, sides: Sequence[str], rows: Sequence[Wanted], calls: int, warmup: int, checks: int, limit: bool
) -> Iterator[Found]:
    """All ``rows`` on all ``sides``, in the same processes; ``limit``: with the bandwidth of plain copies.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank failed; its text holds the rank's traceback.
        torch.multiprocessing.ProcessExitedException: a rank was killed or ended the process.
    """
    context = mp.get_context("spawn")
    # What is rounded up to whole rounds and bursts has room.
    samples = calls + FIXED_ROUNDS * (calls // MAX_BURST + 16)
    shared = SharedTensors(world, context.Barrier(world), len(sides), samples)
    results = context.Queue()
    with tempfile.TemporaryDirectory(prefix="torch-symm-bench-") as folder:
        rendezvous = "symm+" + (Path(folder) / "rendezvous").as_uri()
        task = rank_process.Task(world, tuple(sides), tuple(rows), rendezvous, calls, warmup, checks, limit)
        processes = spawn(rank_process.main, (task, shared, results), nprocs=world, join=False)  # type: ignore[no-untyped-call]
        yield from reported(processes, results, len(rows))

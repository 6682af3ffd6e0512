"""Starts the rank processes and gathers what they report."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.multiprocessing as mp
from torch.multiprocessing.spawn import spawn

from torch_symm.bench.launch import reported

from . import rank as rank_process
from .points import Point


def measure(
    world: int,
    device: str,
    points: Sequence[Point],
    seconds: float,
    visits: int,
    heard: Callable[[Point, float], None],
) -> dict[Point, float]:
    """µs of each point, the least of its visits; ``heard`` is told of each visit.

    ``world`` processes visit every point ``visits`` times, once at least, within about ``seconds``.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank failed; its text holds the rank's traceback.
        torch.multiprocessing.ProcessExitedException: a rank was killed or ended the process.
    """
    results = mp.get_context("spawn").Queue()
    found: dict[Point, list[float]] = {point: [] for point in points}
    distinct = tuple(found)
    with tempfile.TemporaryDirectory(prefix="torch-symm-tune-") as folder:
        rendezvous = "symm+" + (Path(folder) / "rendezvous").as_uri()
        task = rank_process.Task(world, device, distinct, visits, seconds, rendezvous)
        processes = spawn(rank_process.main, (task, results), nprocs=world, join=False)  # type: ignore[no-untyped-call]
        for message in reported(processes, results, 1, rank_process.Done):
            if isinstance(message, rank_process.Visit):
                found[distinct[message.index]].append(message.us)
                heard(distinct[message.index], message.us)
    # What else the machine does only adds time, and seldom during all visits.
    return {point: min(us) for point, us in found.items()}

"""One rank process: makes the sides and runs the cells; rank 0 reports to the launcher."""

from __future__ import annotations

import gc
import time
from contextlib import suppress
from multiprocessing.queues import Queue

import torch
import torch.distributed as dist

from . import overlap
from .cell import measure
from .contenders import GROUP_TIMEOUT
from .process import GpuTask, Message, Process
from .rank_sync import Meeting

FEW_TURNS = 3


def turns_for(wanted: int, elapsed: float, budget: float, done: int, total: int) -> int:
    """Returns the turns of the next cell: few if the run is behind its budget, whose first tenth is for the start.

    0 once the budget is spent: the cell is not measured.
    """
    if elapsed >= budget:
        return 0
    behind = elapsed > budget * (0.1 + 0.9 * done / max(1, total))
    return min(wanted, FEW_TURNS) if behind else wanted


def main(rank: int, task: GpuTask, meeting: Meeting, results: Queue[Message]) -> None:
    """Entry point of a rank process."""
    started = time.monotonic()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    if task.device == "cuda":
        torch.cuda.set_device(rank)
    device = torch.device(f"cuda:{rank}" if task.device == "cuda" else "cpu")
    dist.init_process_group(
        "symm" if "symm" in task.sides else "gloo",
        init_method=task.rendezvous,
        rank=rank,
        world_size=task.world,
        timeout=GROUP_TIMEOUT,
    )

    def report(message: Message) -> None:
        if rank == 0:
            results.put(message)

    process = Process(rank, device, task, meeting, report)
    process.make_sides()
    for number, cell in enumerate(task.cells):
        turns = turns_for(task.turns, time.monotonic() - started, task.seconds, number, len(task.cells))
        turns = meeting.decide(rank, turns)
        if turns == 0 or not process.sides:
            break
        process.cell = number
        report((overlap.measure if task.products else measure)(process, cell, turns, number))
        gc.collect()
    process.cell = None
    process.sides.clear()
    gc.collect()
    # Rank 0 must not remove the store while other ranks use it. If a group has failed, the figures must not be lost.
    with suppress(RuntimeError):
        dist.destroy_process_group()

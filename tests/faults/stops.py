"""A rank's process is stopped for a while: late is not dead."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import torch
import torch.distributed as dist

from .case import RIGHT, Case, Promise, Saw, add
from .stage import Stage, play

STOP_S = 5.0


def _stopped(stage: Stage, rank: int, seconds: float) -> Saw:
    """Rank 1 is stopped between collectives by a child of rank 0, and goes on later."""
    dist.barrier()
    if rank == 1:
        stage.now_it_happens()
        child = os.fork()
        if child == 0:
            time.sleep(seconds)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        stage.spare(child)
        os.kill(os.getpid(), signal.SIGSTOP)
    dist_sum = torch.full((1 << 18,), float(rank))

    def calls() -> bool:
        dist.all_reduce(dist_sum)
        return bool((dist_sum == sum(range(stage.world))).all())

    saw = stage.observe(calls)
    if rank == 1:
        os.waitpid(child, 0)
    return saw


ROW = f"SIGSTOP of rank 1 for {STOP_S:g} s, group timeout 30 s"
add(
    Case(
        "stopped, long timeout",
        ROW,
        partial(play, partial(_stopped, seconds=STOP_S), timeout=30, limit=40),
        Promise(sees=(RIGHT,), not_before=STOP_S - 1, within=STOP_S + 1),
        "right",
    )
)
ROW = f"SIGSTOP of rank 1 for {STOP_S - 2:g} s, group timeout 2 s"
add(
    Case(
        "stopped, short timeout",
        ROW,
        partial(play, partial(_stopped, seconds=STOP_S - 2), timeout=2, limit=20, victims=(1,)),
        Promise(sees=("SymmTimeout",), names=(1,), says=("stopped",), not_before=1.9, within=2.1),
        'named, "stopped", 2.0 to 2.1 s',
    )
)

"""A rank process: all cases, in groups of each size; every rank reports its findings."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier

import torch
import torch.distributed as dist

from torch_symm._torch_compat import new_group
from torch_symm.launch.messages import in_a_line

from .cases import Case, Covered, blocks
from .exercise import Exercise

GROUP_TIMEOUT = timedelta(seconds=20)
#: Seconds within which all ranks must arrive at the next block.
MEETING_S = 60.0
#: Number of findings after which a rank reports no more.
MOST = 20


@dataclass(frozen=True)
class CheckTask:
    """The task of all ranks. ``seconds``: the time after which no further block starts."""

    worlds: tuple[int, ...]
    device: str
    ops: tuple[str, ...]
    quick: bool
    seconds: float
    rendezvous: str


@dataclass
class CheckDone:
    """The findings of a rank. ``calls`` by operation and size of the group; ``left``: cases not made in time."""

    rank: int
    calls: Counter[tuple[str, int]] = field(default_factory=Counter)
    #: The dtypes, sizes and other properties that these calls covered, by operation.
    covered: dict[str, Covered] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    left: int = 0
    failed: bool = False


def main(rank: int, task: CheckTask, barrier: Barrier, stop: torch.Tensor, results: Queue[CheckDone]) -> None:
    """Entry point of a rank process; rank 0 watches the time and sets ``stop``, which all ranks share."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    deadline, done = time.monotonic() + task.seconds, CheckDone(rank)
    device = torch.device(task.device, rank) if task.device == "cuda" else torch.device("cpu")
    if task.device == "cuda":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            "symm",
            init_method=task.rendezvous,
            rank=rank,
            world_size=max(task.worlds),
            timeout=GROUP_TIMEOUT,
            device_id=device if task.device == "cuda" else None,
        )
        for world in task.worlds:
            group = dist.group.WORLD if world == max(task.worlds) else new_group(list(range(world)), backend="symm")
            for block in blocks(task.ops, task.quick):
                barrier.wait(MEETING_S)
                if rank == 0 and time.monotonic() > deadline:
                    stop[0] = 1
                barrier.wait(MEETING_S)
                if bool(stop[0]):
                    done.left += len(block)
                elif rank < world and group is not None:
                    _make(done, block, world, group, device)
        dist.destroy_process_group()
    except Exception as error:
        done.failed = True
        if not done.findings:
            done.findings.append(f"rank {rank}: {in_a_line(error)}")
        barrier.abort()
    results.put(done)


def _make(done: CheckDone, block: list[Case], world: int, group: dist.ProcessGroup, device: torch.device) -> None:
    for case in block:
        try:
            finding = Exercise(case, done.rank, world, group, device).finding()
        except dist.DistBackendError as error:
            done.findings.append(f"{case}, rank {done.rank} of {world}: {in_a_line(error)}")
            raise
        except Exception as error:
            finding = in_a_line(error)
        done.calls[case.op, world] += 1
        done.covered.setdefault(case.op, Covered()).add(case)
        if finding and len(done.findings) < MOST:
            done.findings.append(f"{case}, rank {done.rank} of {world}: {finding}")

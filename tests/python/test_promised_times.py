"""Deaths, at the promised 100 ms: the median of several. Deadlines and refusals: ``tests/deadlines/calls.rs``."""

from __future__ import annotations

import os
import signal
import statistics
import time

import pytest
import ranks
import torch
import torch.distributed as dist
import torch_symm
from ranks import init, run_ranks

RUNS = 10


def outlived(rank: int, world: int, kind: str) -> list[float]:
    """Rank 0 is in a group with one after the other, who dies in it."""
    received = []
    for turn in range(1, world):
        killed = ranks.scratch / f"killed-{turn}"
        if rank == turn:
            init(1, 2, name=f"turn-{turn}")
            dist.barrier()
            time.sleep(0.02)
            killed.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        elif rank == 0:
            init(0, 2, name=f"turn-{turn}")
            dist.barrier()
            with pytest.raises(torch_symm.SymmPeerError, match=r"rank 1 \(pid"):
                if kind == "collective":
                    dist.all_reduce(torch.ones(1000))
                else:
                    dist.recv(torch.ones(1000), 1)
            received.append(time.time() - float(killed.read_text()))
            dist.destroy_process_group()
    return received


@pytest.mark.timed
@pytest.mark.parametrize("kind", ("collective", "message"))
def test_p2_a_death_is_heard_within_100_ms(kind: str) -> None:
    received = run_ranks(outlived, RUNS + 1, kind, backend=None, expect_killed=range(1, RUNS + 1))[0]
    print(", ".join(f"{seconds * 1000:.1f} ms" for seconds in received))
    assert statistics.median(received) < 0.1, received

"""Helper threads: bits and failures are the same as without them, and no thread is left."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
import torch_symm
from cases import Case
from collectives import run
from faults.resource_leaks import threads
from ranks import run_ranks

#: More threads than small machines have cores, so that helpers start late there, and ranks wait for them.
THREADS = 3
HELPED = {"SYMM_CPU_THREADS": str(THREADS)}
#: Numbers of elements of a rank's part: an odd number, and whole chunks.
COUNTS = (300_001, 1 << 19)


def helpers() -> int:
    """Number of helper threads in this process."""
    return sum(name == "symm-helper" for name in threads())


def come(count: int) -> None:
    """Makes a long call, and waits for this many helpers, which set their names once they have started."""
    dist.all_reduce(torch.ones(1 << 20))
    deadline = time.monotonic() + 30
    while helpers() != count:
        assert time.monotonic() < deadline, f"{helpers()} of {count} helpers"
        time.sleep(0.001)


@pytest.mark.ranks([2, 3], timeout=120, env=HELPED)
def test_bits_do_not_depend_on_helpers(rank: int, world_size: int) -> None:
    """The bits are those of the definition, as without helpers in ``test_collectives.py``."""
    whole = ("all_reduce", "reduce", "broadcast")
    parts = ("reduce_scatter_tensor", "all_gather_into_tensor", "all_to_all_single", "gather", "scatter")
    run(
        (form, Case(rank, world_size, dtype, count * (world_size if form in whole else 1)))
        for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.complex128)
        for count in COUNTS
        for form in (*whole, *parts)
    )
    come(THREADS - 1)


@pytest.mark.ranks(2, env=HELPED)
def test_helpers_end_when_there_is_nothing_to_do() -> None:
    dist.all_reduce(torch.ones(1000))
    assert helpers() == 0
    come(THREADS - 1)
    dist.destroy_process_group()
    deadline = time.monotonic() + 30
    while helpers() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert helpers() == 0


def killed(rank: int, world: int) -> str:
    tensor = torch.ones(4 << 20)
    dist.all_reduce(tensor)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(torch_symm.SymmPeerError) as raised:
        for _ in range(1000):
            dist.all_reduce(tensor)
    return str(raised.value)


def test_a_dead_rank_is_named() -> None:
    outcome = run_ranks(killed, 3, expect_killed=(1,), env=HELPED)
    assert all("rank 1 (pid" in outcome[rank] for rank in (0, 2))

"""What one rank knows while a group forms is told to the others, and nothing is said where all is well."""

from __future__ import annotations

import os
import resource
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
import torch_symm
from ranks import meet, run_ranks
from test_groups import free_port


def cramped(rank: int, world: int) -> str:
    unlimited = resource.getrlimit(resource.RLIMIT_AS)
    dist.barrier()
    if rank == 1:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + (1 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, unlimited[1]))
    begun = time.monotonic()
    try:
        dist.new_group(timeout=timedelta(seconds=30))
    except torch_symm.SymmConfigError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, unlimited)
        assert time.monotonic() - begun < 10
        meet("failed", rank, world)
    raise AssertionError("joined")


def test_p16_a_rank_without_addresses_for_the_memory_tells_all() -> None:
    first, second = run_ranks(cramped, 2)
    assert "out of address space: rank 1 (pid " in first, first
    assert " bytes, " in first and "are free of RLIMIT_AS" in first, first
    assert first.partition("out of")[2] in second, (first, second)


def after_a_death(rank: int, world: int) -> None:
    meet("all", rank, world)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    for members in (None, [0, 2]):
        begun = time.monotonic()
        if members and rank not in members:  # torch itself lets it wait for the others' coming back from theirs
            continue
        with pytest.raises(torch_symm.SymmPeerError, match=r"rank 2 .*has ended \(killed by signal 9"):
            dist.new_group(members, timeout=timedelta(seconds=40))
        assert time.monotonic() - begun < 10


def test_a_new_group_with_a_rank_that_is_known_to_be_dead_fails_at_once() -> None:
    run_ranks(after_a_death, 3, expect_killed=(2,))


def late(rank: int, world: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, None, rank == 0, wait_for_workers=False)
    meet("stores", rank, world)
    time.sleep(0.8 * rank)
    dist.init_process_group("symm", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=30))
    dist.barrier()


@pytest.mark.timed
def test_a_rank_that_comes_a_little_later_is_nothing_to_warn_of() -> None:
    assert run_ranks(late, 2, free_port(), backend=None).logs == ["", ""]

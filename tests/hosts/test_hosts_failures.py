"""Failures on several hosts: every rank of every host ends its call, and says whose fault it is."""

from __future__ import annotations

import os
import re
import signal
import time
from datetime import timedelta

import pytest
import ranks
import torch
import torch.distributed as dist
import torch_symm
from machines import NAMES, hosts_of, run_hosts


def begin(rank: int, world_size: int) -> None:
    """A call that all have finished: a failure may overtake the end of one on another host."""
    dist.barrier()
    ranks.meet("begun", rank, world_size)


def disagree(rank: int, world_size: int) -> str:
    begin(rank, world_size)
    tensor = torch.ones(4 if rank else 100_000)
    with pytest.raises(torch_symm.SymmMismatch) as caught:
        dist.all_reduce(tensor)
    assert bool((tensor == 1).all()), "nothing was written"
    return str(caught.value)


@pytest.mark.parametrize("layout", [(2, 2), (1, 2), (1, 1)], ids=str)
def test_lengths_that_differ_are_a_mismatch_on_all_hosts(layout: tuple[int, ...]) -> None:
    for text in run_hosts(disagree, layout):
        assert 'rank 0 (host "a", pid' in text and "100000 × float32" in text and "(4 × float32, 16 bytes, SUM)" in text


def other_calls(rank: int, world_size: int) -> str:
    begin(rank, world_size)
    with pytest.raises(torch_symm.SymmMismatch) as caught:
        if rank < 2:
            dist.broadcast(torch.ones(50_000), 0)
        else:
            dist.all_gather_into_tensor(torch.ones(200_000), torch.ones(50_000))
    return str(caught.value)


def test_hosts_that_run_other_collectives_are_a_mismatch() -> None:
    for text in run_hosts(other_calls, (2, 2)):
        # Each rail compares; which is first may differ from run to run, on all ranks alike.
        assert re.search(r'rank [01] \(host "a", pid \d+\) called broadcast\(50000 ', text), text
        assert re.search(r'rank [23] \(host "b", pid \d+\) called all_gather\(200000 ', text), text


def die(rank: int, world_size: int, long: bool) -> tuple[str, float] | None:
    tensor = torch.ones(3_000_000 if long else 4)
    dist.all_reduce(tensor)
    ranks.meet("before", rank, world_size)
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(torch_symm.SymmPeerError) as caught:
        while time.monotonic() < begun + 20:
            dist.all_reduce(tensor)
    return str(caught.value), time.monotonic() - begun


@pytest.mark.timed
@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("layout", [(2, 2), (3, 1)], ids=str)
def test_a_death_ends_the_call_on_all_hosts(layout: tuple[int, ...], long: bool) -> None:
    results = run_hosts(die, layout, long, expect_killed=[3])
    for text, seconds in results[:3]:
        assert seconds < 5, text
        # Who shares the host with the dead knows how it ended, and tells; nobody shares one in the second layout.
        how = "killed by signal 9" if layout == (2, 2) else "is gone"
        assert 'rank 3 (host "b", pid' in text and how in text, text


def late(rank: int, world_size: int) -> tuple[str, float] | None:
    dist.barrier()
    if rank == 3:
        ranks.meet("over", rank, world_size)
        return None
    begun = time.monotonic()
    with pytest.raises(torch_symm.SymmTimeout) as caught:
        dist.all_reduce(torch.ones(4))
    took = time.monotonic() - begun
    ranks.meet("over", rank, world_size)
    return str(caught.value), took


@pytest.mark.timed
def test_a_late_rank_is_a_timeout_on_all_hosts() -> None:
    for text, seconds in run_hosts(late, (2, 2), timeout=2)[:3]:
        assert 1.8 < seconds < 15 and ("for rank 3 (rank 3: pid" in text or 'host "b" (ranks 2 and 3)' in text), text
        assert "in all_reduce(4 × float32, 16 bytes, SUM) #" in text, text


def stay_away(rank: int, world_size: int, absent: int, early: int) -> str | None:
    """What ranks say of a group that one never makes, whose time ends sooner on ``early`` than on the others."""
    begin(rank, world_size)
    text = None
    if rank != absent:
        with pytest.raises(torch_symm.SymmTimeout) as caught:
            dist.new_group(list(range(world_size)), timeout=timedelta(seconds=1 if rank == early else 2))
        text = str(caught.value)
    ranks.meet("over", rank, world_size)
    return text


@pytest.mark.timed
@pytest.mark.parametrize(
    ("layout", "absent", "early"),
    [
        ((2, 2), 3, -1),
        ((1, 1, 2), 2, 3),
        pytest.param((2, 2), 0, 3, marks=pytest.mark.slow),
        pytest.param((2, 2), 1, 0, marks=pytest.mark.slow),
        pytest.param((1, 3), 3, 0, marks=pytest.mark.slow),
        pytest.param((3, 2), 4, -1, marks=pytest.mark.slow),
        pytest.param((2, 2, 1), 3, 4, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_all_name_the_rank_that_never_makes_a_group(layout: tuple[int, ...], absent: int, early: int) -> None:
    host = NAMES[hosts_of(layout)[absent]]
    missing = rf'rank {absent} \(host "{host}", pid \d+\)'
    wanted = rf'rank \d \(host "[abc]", pid \d+\) waited [12]\.\d s for {missing} to join group ".+"'
    results = run_hosts(stay_away, layout, absent, early)
    for rank, text in enumerate(results):
        assert rank == absent or re.fullmatch(wanted, text), text

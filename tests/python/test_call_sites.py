"""P7 with ``SYMM_DEBUG=call_site``: calls that look the same but are on different lines of the program are
distinguished."""

from __future__ import annotations

import os
import re
import sys

import pytest
import torch
import torch.distributed as dist
import torch_symm
from ranks import init, meet, run_ranks
from torch.distributed.distributed_c10d import _coalescing_manager

SITE = {"SYMM_DEBUG": "call_site"}
#: The nodes of the ranks: one node, two nodes with a rank each, and two nodes of which one has two ranks.
LAYOUTS = ("aa", "ab", "aab")


def init_on(nodes: str, rank: int, world: int) -> None:
    """``init``, where rank ``r`` is on node ``nodes[r]``."""
    os.environ.update(SYMM_TEST_NODE=nodes[rank], SYMM_INTER_NODE_BACKEND="gloo", GLOO_SOCKET_IFNAME="lo")
    init(rank, world)


def first(tensor: torch.Tensor, asynchronous: bool) -> None:
    work = dist.all_reduce(tensor, async_op=asynchronous)
    if asynchronous:
        work.wait()


def second(tensor: torch.Tensor, asynchronous: bool) -> None:
    work = dist.all_reduce(tensor, async_op=asynchronous)
    if asynchronous:
        work.wait()


def line(function: object) -> str:
    code = function.__code__  # type: ignore[attr-defined]
    return f"test_call_sites.py:{code.co_firstlineno + 1}"


def swapped(rank: int, tensors: list[torch.Tensor], asynchronous: bool) -> None:
    order = (second, first) if rank else (first, second)
    for call, tensor in zip(order, tensors, strict=True):
        call(tensor, asynchronous)


def swapped_and_told(rank: int, world: int, nodes: str, asynchronous: bool) -> str:
    init_on(nodes, rank, world)
    tensors = [torch.ones(4), torch.ones(4)]
    dist.barrier()
    # Until all ranks have left the barrier, because a rank that is still in it would get the error there.
    meet("ready", rank, world)
    with pytest.raises(torch_symm.SymmMismatchError) as error:
        swapped(rank, tensors, asynchronous)
    assert all(bool((tensor == 1).all()) for tensor in tensors), "a call that disagrees has written"
    return str(error.value)


# proves P7
@pytest.mark.parametrize("asynchronous", (False, True))
@pytest.mark.parametrize("nodes", LAYOUTS)
def test_swapped_equal_calls_name_both_lines(nodes: str, asynchronous: bool) -> None:
    texts = run_ranks(swapped_and_told, len(nodes), nodes, asynchronous, env=SITE, backend=None)
    assert len(set(texts)) == 1, texts
    for rank, function in enumerate((first, second)):
        called = rf"rank {rank} \([^)]*pid \d+\) called all_reduce\(4 [^)]*, SUM\)(?: as #\d+)?"
        expected = rf"{called} at \S*{re.escape(line(function))}"
        assert re.search(expected, texts[0]), (expected, texts[0])


@pytest.mark.ranks(2, env=SITE)
def test_a_monitored_barrier_has_a_site_of_its_own(rank: int) -> None:
    """Calls from one line on all ranks pass; a plain barrier on one rank and a monitored one on the other do not."""
    dist.group.WORLD.monitored_barrier()
    here = sys._getframe().f_lineno
    with pytest.raises(torch_symm.SymmMismatchError) as error:
        if rank:
            dist.barrier()
        else:
            dist.group.WORLD.monitored_barrier()
    for number, below in enumerate((5, 3)):
        place = re.escape(f"test_call_sites.py:{here + below}")
        assert re.search(rf"rank {number} \(pid \d+\) called barrier.* at \S*{place}\b", str(error.value)), error.value


@pytest.mark.ranks(2)
def test_without_it_swapped_equal_calls_are_not_told_apart(rank: int) -> None:
    swapped(rank, tensors := [torch.ones(4), torch.ones(4)], False)
    assert all(bool((tensor == 2).all()) for tensor in tensors)


def on_some(rank: int, world: int, nodes: str) -> str:
    if rank == 0:
        os.environ.update(SITE)
    init_on(nodes, rank, world)
    # As in swapped_and_told; `init` also calls collectives.
    meet("ready", rank, world)
    with pytest.raises(torch_symm.SymmMismatchError) as error:
        dist.all_reduce(torch.ones(4))
    return str(error.value)


@pytest.mark.parametrize("nodes", LAYOUTS)
def test_ranks_with_and_without_it_hear_of_that(nodes: str) -> None:
    texts = run_ranks(on_some, len(nodes), nodes, backend=None)
    assert len(set(texts)) == 1, texts
    assert "some were started with SYMM_DEBUG=call_site, others were not" in texts[0], texts
    assert len(re.findall(r" at \S*test_call_sites.py:\d+", texts[0])) == 1, "only rank 0 has a call site"


def ordinary(rank: int, world: int) -> float:
    """Loops, subgroups, coalesced calls, hooks on autograd's threads, training."""
    for _ in range(50):
        dist.all_reduce(torch.ones(10))
    group = dist.new_group()
    dist.barrier(group=group)
    group.monitored_barrier()
    dist.all_gather_object([None] * world, rank)
    with _coalescing_manager(async_ops=True) as manager:
        for _ in range(3):
            dist.all_reduce(torch.ones(5))
    manager.wait()
    from torch.distributed import nn

    value = torch.ones(3, requires_grad=True)
    nn.functional.all_reduce(value).sum().backward()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 8), float(rank + step))).sum().backward()
        optimizer.step()
    return float(sum(parameter.sum() for parameter in model.parameters()))


def test_programs_that_agree_run_as_ever() -> None:
    assert len(set(run_ranks(ordinary, 2, env=SITE))) == 1

"""Ordinary collectives on CPU tensors in symmetric memory: zero-copy where possible, correct in any case.

tests/ranks/collectives.rs has every dtype, reduce op, size and location.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch_symm
from cases import Case
from collectives import ON_CPU
from ranks import init, run_ranks
from test_symm_mem_backend import cpu, handle_of
from torch_symm.testing import barrier

COUNT = 30_001
#: Collectives that read symmetric tensors in place.
DIRECT = (
    "all_reduce", "all_gather_into_tensor", "all_gather", "reduce_scatter_tensor", "all_to_all_single", "broadcast",
    "gather",
)  # fmt: skip


def served(call: Callable[[], object]) -> str:
    """Name of the algorithm of the last call that ``call`` makes."""
    call()
    return str(torch_symm.trace()["calls"][-1]["algorithm"])


def symmetric(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return cpu(count, dtype=dtype)


def numbers(rank: int, count: int = COUNT) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


def total(world: int, count: int = COUNT) -> torch.Tensor:
    """The sum over ranks, in their order."""
    result = numbers(0, count)
    for rank in range(1, world):
        result += numbers(rank, count)
    return result


@pytest.mark.ranks([2, 4])
def test_every_collective_on_symmetric_tensors_is_direct(rank: int, world_size: int) -> None:
    handle_of(cpu(4))
    # A reduce is always staged. Results need not be symmetric.
    for collective, algorithm in (*((each, "direct") for each in DIRECT), ("reduce", "staged")):
        for layout, result in (("contiguous", None), ("offset", None), ("contiguous", torch.empty)):
            case = Case(rank, world_size, torch.float32, COUNT, layout, empty=symmetric, empty_result=result)
            assert served(lambda case=case, call=ON_CPU[collective]: call(case)) == algorithm, collective
    # Lists whose tensors are parts of one tensor.
    whole, part = (
        cpu(COUNT * world_size + rank + 1)[rank + 1 :].copy_(numbers(rank, COUNT * world_size)),
        torch.empty(COUNT),
    )
    assert served(lambda: dist.reduce_scatter(part, list(whole.chunk(world_size)))) == "direct"
    assert torch.equal(part, total(world_size, COUNT * world_size).chunk(world_size)[rank])
    assert served(lambda: dist.scatter(part, list(whole.chunk(world_size)) if rank == 1 else None, 1)) == "direct"
    assert torch.equal(part, numbers(1, COUNT * world_size).chunk(world_size)[rank])
    # Only the root's tensor must be symmetric.
    mine = cpu(COUNT).copy_(numbers(1)) if rank == 1 else torch.empty(COUNT)
    assert served(lambda: dist.broadcast(mine, 1)) == "direct"
    assert torch.equal(mine, numbers(1))
    assert served(lambda: dist.all_reduce(cpu(8))) == "inline"


@pytest.mark.ranks(3)
def test_ranks_without_symmetric_tensors_are_served_as_ever(rank: int, world_size: int) -> None:
    tensor = cpu(COUNT)
    # Without a rendezvous in this group the ranks have no links, so symmetric memory makes no difference.
    assert served(lambda: dist.all_reduce(tensor)) == "staged"
    handle_of(cpu(4))
    assert served(lambda: dist.all_reduce(tensor)) == "direct"
    for lacking in ({0}, {1}, {0, 2}):
        mixed = numbers(rank) if rank in lacking else tensor.copy_(numbers(rank))
        assert served(lambda given=mixed: dist.all_reduce(given)) == "staged"
        assert torch.equal(mixed, total(world_size))
    assert served(lambda: dist.all_reduce(torch.ones(COUNT))) == "staged"
    # Strided tensors are copied, and the copies are not symmetric.
    pairs = cpu(2 * COUNT)
    pairs[::2] = numbers(rank)
    assert served(lambda: dist.all_reduce(pairs[::2])) == "staged"
    assert torch.equal(pairs[::2], total(world_size))
    assert not pairs[1::2].any()


@pytest.mark.ranks(3)
def test_groups_of_a_process_share_tensors_once_each_has_met(rank: int, world_size: int) -> None:
    tensor = cpu(COUNT)
    handle_of(tensor)
    pair = dist.new_group([0, 2])
    if rank != 1:
        tensor.copy_(numbers(rank))
        assert served(lambda: dist.all_reduce(tensor, group=pair)) == "staged"
        handle_of(tensor, pair)
        tensor.copy_(numbers(rank))
        assert served(lambda: dist.all_reduce(tensor, group=pair)) == "direct"
        assert torch.equal(tensor, numbers(0) + numbers(2))
    dist.barrier()
    tensor.copy_(numbers(rank))
    assert served(lambda: dist.all_reduce(tensor)) == "direct"
    assert torch.equal(tensor, total(world_size))


@pytest.mark.ranks(3)
def test_memory_that_comes_and_goes(rank: int, world_size: int) -> None:
    """Memory that is freed and reallocated, on some ranks or all, in various orders, while old windows stay."""

    def sum_up(tensor: torch.Tensor) -> None:
        tensor.copy_(numbers(rank))
        assert served(lambda: dist.all_reduce(tensor)) == "direct"
        assert torch.equal(tensor, total(world_size))

    handles = [handle_of(cpu(4))]
    for turn in range(12):
        spare = [cpu(1000 * rank + 10) for _ in range(rank)]
        tensor, other = cpu(COUNT + turn), cpu(2 * COUNT)
        if turn % 3 == 0:
            handles.append(handle_of(tensor))
        del spare
        sum_up(other[turn : COUNT + turn])
        sum_up(tensor[turn:])
        if rank == turn % world_size:
            # Only this rank frees its tensor and allocates another one.
            del tensor
            tensor = cpu(COUNT + turn)
        sum_up(tensor[turn:])
        del tensor, other


@pytest.mark.ranks(3)
def test_asynchronous_and_coalesced_calls(rank: int, world_size: int) -> None:
    tensors = [cpu(COUNT) for _ in range(4)]
    handle_of(tensors[0])
    for tensor in tensors:
        tensor.copy_(numbers(rank))
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    # Memory of a call in progress stays, even after the program has dropped its tensor.
    kept = tensors.pop()
    copies = list(tensors)
    for work in works:
        assert work is not None
        work.wait()
    assert all(torch.equal(tensor, total(world_size)) for tensor in [*copies, kept])
    for _ in range(5):
        work = dist.all_gather_into_tensor(torch.empty(COUNT * world_size), cpu(COUNT).fill_(rank), async_op=True)
        assert work is not None
        work.wait()
        assert torch.equal(torch.stack(work.result())[:, 0], torch.arange(float(world_size)))
    for tensor in tensors:
        tensor.copy_(numbers(rank))

    def together() -> None:
        with dist._coalescing_manager():  # type: ignore[no-untyped-call]
            for tensor in tensors:
                dist.all_reduce(tensor)

    assert served(together) == "direct"
    assert all(torch.equal(tensor, total(world_size)) for tensor in tensors)


@pytest.mark.ranks(2)
def test_ranks_that_disagree_are_named_and_no_byte_is_written(rank: int) -> None:
    tensor = cpu(COUNT).copy_(numbers(rank))
    handle_of(tensor)
    facts = rf"(?s)(?=.*rank 0)(?=.*{COUNT - 1} × float32).*{COUNT} × float32"
    with pytest.raises(torch_symm.SymmMismatchError, match=facts):
        dist.all_reduce(tensor if rank else tensor[1:])
    assert torch.equal(tensor, numbers(rank))


@pytest.mark.timed
@pytest.mark.parametrize("op", ["all_reduce", "all_gather"])
def test_a_rank_that_is_killed_in_the_middle_is_named(op: str) -> None:
    """The others continue in a new group, with the memory that they have."""

    def body(rank: int, world: int) -> None:
        tensor = cpu(4 << 20).fill_(1)
        handle_of(tensor)
        out = torch.empty(world << 22) if op == "all_gather" else tensor
        dist.barrier()
        if rank == 1:
            # Calls follow each other without a pause: the rank exits inside one.
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        begun = time.monotonic()
        with pytest.raises(torch_symm.SymmPeerError, match=rf"rank 1 .*{op}"):
            while True:
                tensor.fill_(1)
                begun = time.monotonic()
                if op == "all_reduce":
                    dist.all_reduce(tensor)
                else:
                    dist.all_gather_into_tensor(out, tensor)
        assert time.monotonic() - begun < 10
        dist.destroy_process_group()
        init([0, -1, 1][rank], 2, name="after")
        tensor.fill_(rank)
        assert served(lambda: dist.all_reduce(tensor[:COUNT])) == "staged"
        handle_of(cpu(4))
        assert served(lambda: dist.all_reduce(tensor[:COUNT])) == "direct"
        assert bool((tensor[:COUNT] == 4).all())
        dist.destroy_process_group()

    run_ranks(body, 3, expect_killed=[1])


@pytest.mark.ranks(3, group_timeout=2)
def test_a_stopped_rank_is_named_and_writes_to_nobody_afterwards(rank: int, world_size: int) -> None:
    """A rank that was stopped past the others' timeout does not write to their tensors when it continues."""
    tensor = cpu(8 << 20).fill_(1)
    handle_of(tensor)
    pids = [0] * world_size
    dist.all_gather_object(pids, os.getpid())
    if rank == 0:
        threading.Timer(0.3, os.kill, (pids[1], signal.SIGSTOP)).start()
    with pytest.raises(torch_symm.SymmTimeoutError, match=r"(?s)(?=.*rank 1).*stopped"):
        while True:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
    tensor.fill_(-1)
    if rank == 0:
        os.kill(pids[1], signal.SIGCONT)
    barrier("over")
    assert bool((tensor == -1).all()), "nobody writes to it any more"

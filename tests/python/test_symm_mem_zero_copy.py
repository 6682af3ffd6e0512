"""Ordinary collectives on CPU tensors in symmetric memory: zero-copy where possible, correct in any case.

tests/ranks/collectives.rs has every dtype, reduce op, size and location.
"""

from __future__ import annotations

import os
import re
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
from ranks import init, meet, run_ranks
from test_symm_mem_backend import cpu, handle_of

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


@pytest.mark.parametrize("world", [2, 4])
def test_every_collective_on_symmetric_tensors_is_direct(world: int) -> None:
    def body(rank: int, world: int) -> None:
        handle_of(cpu(4))
        # A reduce is always staged. Results need not be symmetric.
        for collective, algorithm in (*((each, "direct") for each in DIRECT), ("reduce", "staged")):
            for layout, result in (("contiguous", None), ("offset", None), ("contiguous", torch.empty)):
                case = Case(rank, world, torch.float32, COUNT, layout, empty=symmetric, empty_result=result)
                assert served(lambda case=case, call=ON_CPU[collective]: call(case)) == algorithm, collective
        # Lists whose tensors are parts of one tensor.
        whole, part = cpu(COUNT * world + rank + 1)[rank + 1 :].copy_(numbers(rank, COUNT * world)), torch.empty(COUNT)
        assert served(lambda: dist.reduce_scatter(part, list(whole.chunk(world)))) == "direct"
        assert torch.equal(part, total(world, COUNT * world).chunk(world)[rank])
        assert served(lambda: dist.scatter(part, list(whole.chunk(world)) if rank == 1 else None, 1)) == "direct"
        assert torch.equal(part, numbers(1, COUNT * world).chunk(world)[rank])
        # Only the root's tensor counts.
        mine = cpu(COUNT).copy_(numbers(1)) if rank == 1 else torch.empty(COUNT)
        assert served(lambda: dist.broadcast(mine, 1)) == "direct"
        assert torch.equal(mine, numbers(1))
        assert served(lambda: dist.all_reduce(cpu(8))) == "inline"

    run_ranks(body, world)


def test_ranks_without_symmetric_tensors_are_served_as_ever() -> None:
    def body(rank: int, world: int) -> None:
        tensor = cpu(COUNT)
        # Without a rendezvous in this group the ranks have no links, so symmetric memory makes no difference.
        assert served(lambda: dist.all_reduce(tensor)) == "staged"
        handle_of(cpu(4))
        assert served(lambda: dist.all_reduce(tensor)) == "direct"
        for lacking in ({0}, {1}, {0, 2}):
            mixed = numbers(rank) if rank in lacking else tensor.copy_(numbers(rank))
            assert served(lambda given=mixed: dist.all_reduce(given)) == "staged"
            assert torch.equal(mixed, total(world))
        assert served(lambda: dist.all_reduce(torch.ones(COUNT))) == "staged"
        # Strided tensors are copied, and the copies are not symmetric.
        pairs = cpu(2 * COUNT)
        pairs[::2] = numbers(rank)
        assert served(lambda: dist.all_reduce(pairs[::2])) == "staged"
        assert torch.equal(pairs[::2], total(world))
        assert not pairs[1::2].any()

    run_ranks(body, 3)


def test_groups_of_a_process_share_tensors_once_each_has_met() -> None:
    def body(rank: int, world: int) -> None:
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
        assert torch.equal(tensor, total(world))

    run_ranks(body, 3)


def test_memory_that_comes_and_goes() -> None:
    """Memory that is freed and reallocated, on some ranks or all, in various orders, while old windows stay."""

    def summed(tensor: torch.Tensor, world: int) -> None:
        tensor.copy_(numbers(dist.get_rank()))
        assert served(lambda: dist.all_reduce(tensor)) == "direct"
        assert torch.equal(tensor, total(world))

    def body(rank: int, world: int) -> None:
        handles = [handle_of(cpu(4))]
        for turn in range(12):
            spare = [cpu(1000 * rank + 10) for _ in range(rank)]
            tensor, other = cpu(COUNT + turn), cpu(2 * COUNT)
            if turn % 3 == 0:
                handles.append(handle_of(tensor))
            del spare
            summed(other[turn : COUNT + turn], world)
            summed(tensor[turn:], world)
            if rank == turn % world:
                # Only this rank frees its tensor and allocates another one.
                del tensor
                tensor = cpu(COUNT + turn)
            summed(tensor[turn:], world)
            del tensor, other

    run_ranks(body, 3)


def test_asynchronous_and_coalesced_calls() -> None:
    def body(rank: int, world: int) -> None:
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
        assert all(torch.equal(tensor, total(world)) for tensor in [*copies, kept])
        for _ in range(5):
            work = dist.all_gather_into_tensor(torch.empty(COUNT * world), cpu(COUNT).fill_(rank), async_op=True)
            assert work is not None
            work.wait()
            assert torch.equal(torch.stack(work.result())[:, 0], torch.arange(float(world)))
        for tensor in tensors:
            tensor.copy_(numbers(rank))

        def together() -> None:
            with dist._coalescing_manager():  # type: ignore[no-untyped-call]
                for tensor in tensors:
                    dist.all_reduce(tensor)

        assert served(together) == "direct"
        assert all(torch.equal(tensor, total(world)) for tensor in tensors)

    run_ranks(body, 3)


def test_parameters_in_symmetric_memory_are_trained() -> None:
    """DDP's buckets are not symmetric; tensors that a program reduces itself are. Both give the same result."""

    def body(rank: int, world: int) -> None:
        handle_of(cpu(4))
        model = torch.nn.Linear(150, 100)
        for parameter in model.parameters():
            parameter.data = cpu(*parameter.shape).copy_(torch.full_like(parameter, 0.01))
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        ddp(torch.full((4, 150), float(rank + 1))).square().sum().backward()
        weight = next(iter(model.parameters()))
        assert weight.grad is not None
        own = cpu(*weight.shape).copy_(weight.grad)
        assert served(lambda: dist.all_reduce(own, dist.ReduceOp.AVG)) == "direct"
        assert torch.allclose(own, weight.grad)

    run_ranks(body, 2)


def test_a_single_rank() -> None:
    def body(rank: int, world: int) -> None:
        tensor = cpu(COUNT).copy_(numbers(0))
        handle_of(tensor)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, numbers(0))

    run_ranks(body, 1)


def test_ranks_that_disagree_are_named_and_no_byte_is_written() -> None:
    def body(rank: int, world: int) -> str:
        tensor = cpu(COUNT).copy_(numbers(rank))
        handle_of(tensor)
        with pytest.raises(torch_symm.SymmMismatchError) as caught:
            dist.all_reduce(tensor if rank else tensor[1:])
        assert torch.equal(tensor, numbers(rank))
        return str(caught.value)

    for message in run_ranks(body, 2):
        assert "rank 0" in message and f"{COUNT - 1} × float32" in message and f"{COUNT} × float32" in message


@pytest.mark.timed
@pytest.mark.parametrize("op", ["all_reduce", "all_gather"])
def test_a_rank_that_is_killed_in_the_middle_is_named(op: str) -> None:
    """The others continue in a new group, with the memory that they have."""

    def body(rank: int, world: int) -> tuple[str, float]:
        tensor = cpu(4 << 20).fill_(1)
        handle_of(tensor)
        out = torch.empty(world << 22) if op == "all_gather" else tensor
        dist.barrier()
        if rank == 1:
            # Calls follow each other without a pause: the rank exits inside one.
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        begun = time.monotonic()
        with pytest.raises(torch_symm.SymmPeerError) as caught:
            while True:
                tensor.fill_(1)
                begun = time.monotonic()
                if op == "all_reduce":
                    dist.all_reduce(tensor)
                else:
                    dist.all_gather_into_tensor(out, tensor)
        took = time.monotonic() - begun
        dist.destroy_process_group()
        init([0, -1, 1][rank], 2, name="after")
        tensor.fill_(rank)
        assert served(lambda: dist.all_reduce(tensor[:COUNT])) == "staged"
        handle_of(cpu(4))
        assert served(lambda: dist.all_reduce(tensor[:COUNT])) == "direct"
        assert bool((tensor[:COUNT] == 4).all())
        dist.destroy_process_group()
        return str(caught.value), took

    for rank, result in enumerate(run_ranks(body, 3, expect_killed=[1])):
        if rank != 1:
            message, took = result
            assert re.search(rf"rank 1 .*{op}", message), message
            assert took < 10


def test_a_stopped_rank_is_named_and_writes_to_nobody_afterwards() -> None:
    """A rank that was stopped past the others' timeout does not write to their tensors when it continues."""

    def body(rank: int, world: int) -> str:
        tensor = cpu(8 << 20).fill_(1)
        handle_of(tensor)
        pids = [0] * world
        dist.all_gather_object(pids, os.getpid())
        if rank == 0:
            threading.Timer(0.3, os.kill, (pids[1], signal.SIGSTOP)).start()
        with pytest.raises(torch_symm.SymmTimeoutError) as caught:
            while True:
                dist.all_reduce(tensor, dist.ReduceOp.MAX)
        tensor.fill_(-1)
        if rank == 0:
            os.kill(pids[1], signal.SIGCONT)
        meet("over", rank, world)
        assert bool((tensor == -1).all()), "nobody writes to it any more"
        return str(caught.value)

    messages = run_ranks(body, 3, group_timeout=2)
    assert all("rank 1" in message and "stopped" in message for message in messages), messages

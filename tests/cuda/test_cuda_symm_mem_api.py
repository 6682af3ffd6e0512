"""Lifetime of symmetric memory: temporary pools, several groups, large tensors, failures."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch_symm
from pool import WORLDS, Pool, device, init, meet, needs_gpus
from test_cuda_memory import free
from zero_copy import MB, direct, new_pool, rises, same_bytes, warm

pytestmark = needs_gpus

#: Number of bytes that may stay allocated, for kernels compiled for symmetric memory and for fragments.
KEPT = 32 * MB
#: Seconds until peers have unmapped a segment.
WITHDRAWN_S = 10.0


def is_free_again(before: int) -> None:
    """Waits until as much memory is free as before; peers unmap withdrawn segments a little later."""
    start = time.monotonic()
    while (missing := before - free()) > KEPT:
        assert time.monotonic() - start < WITHDRAWN_S, f"{missing / MB:.0f} MB are still taken"
        time.sleep(0.05)


def cycles(rank: int, world: int) -> list[int]:
    """A pool and all its tensors, made and dropped 20 times; every rank frees at a different time."""
    # The first calls load kernels, which stay loaded.
    for count in (100, 2 * MB):
        dist.all_reduce(torch.ones(count, device=device()))
    before, found = free(), []
    for turn in range(20):
        memory = new_pool()
        with torch.cuda.use_mem_pool(memory):
            tensors = [torch.full((size * MB // 4,), rank + 1.0, device=device()) for size in (256, 8, 64)]
        if turn % 4 == 0:
            warm(dist.all_reduce, tensors[1])
            tensors[1].fill_(rank + 1.0)
        for tensor in tensors:
            dist.all_reduce(tensor)
        if turn % 2:
            assert all(bool((tensor == world * (world + 1) / 2).all()) for tensor in tensors)
        # Dropped without a wait, while queued calls still use them.
        del memory, tensors, tensor
        is_free_again(before)
        found.append(free())
        meet(f"measured-{turn}", rank, world)
    dist.barrier()
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_pools_come_and_go(pool: Pool, world: int) -> None:
    for found in pool.run(cycles, world):
        assert max(found) - min(found) < KEPT, [round(each / MB) for each in found]


def reused(rank: int, world: int) -> None:
    """Tensors are dropped right after their call, and the next ones reuse their memory: stream order separates them."""
    memory = new_pool()
    with torch.cuda.use_mem_pool(memory):
        kept = torch.ones(64 * MB // 4, device=device())
        warm(dist.all_reduce, kept)
        del kept
        results = []
        for turn in range(100):
            tensor = torch.full((8 * MB // 4,), float(turn + rank), device=device())
            if turn % 3 == rank % 3:
                torch.cuda._sleep(1_000_000)
            if turn % 2:
                work = dist.all_reduce(tensor, async_op=True)
                work.wait()
            else:
                dist.all_reduce(tensor)
            results.append(tensor[:: MB // 4].sum())
            del tensor
    right = [8.0 * (world * turn + world * (world - 1) / 2) for turn in range(100)]
    assert [result.item() for result in results] == right


def groups(rank: int, world: int) -> None:
    """Two groups of all ranks and a subgroup use the same tensors, first in turn, then on separate streams."""
    memory = new_pool()
    with torch.cuda.use_mem_pool(memory):
        tensors = [torch.zeros(8 * MB // 4, device=device()) for _ in range(3)]
    again, pair = dist.new_group(list(range(world))), dist.new_group([0, 1])
    for group in (dist.group.WORLD, again):
        warm(lambda group=group: dist.all_reduce(tensors[0].zero_(), group=group))
    for turn in range(30):
        for tensor in tensors:
            tensor.fill_(rank + turn)
        dist.all_reduce(tensors[0])
        dist.all_reduce(tensors[1], group=again)
        if rank < 2:
            dist.all_reduce(tensors[2], group=pair)
        total = world * turn + world * (world - 1) / 2
        assert bool((tensors[0] == total).all()) and bool((tensors[1] == total).all())
        assert bool((tensors[2] == (2 * turn + 1 if rank < 2 else rank + turn)).all())
    if rank < 2:
        before = direct()
        dist.all_reduce(tensors[2], group=pair)
        assert direct() == before + 1, "the two ranks' own group stages"
    works = []
    for tensor, group in zip(tensors, (None, again), strict=False):
        tensor.fill_(rank + 1)
        works.append(dist.all_reduce(tensor, group=group, async_op=True))
    for work in works:
        work.wait()
    assert all(bool((tensor == world * (world + 1) / 2).all()) for tensor in tensors[:2])
    # The memory outlives a group that used it.
    dist.destroy_process_group(again)
    assert rises(dist.all_reduce, tensors[0]) == [1] * world
    late = dist.new_group(list(range(world)))
    dist.all_reduce(tensors[1].fill_(1), group=late)
    assert bool((tensors[1] == world).all())


@pytest.mark.parametrize("body", (reused, groups))
@pytest.mark.parametrize("world", WORLDS)
def test_one_pool(pool: Pool, world: int, body: Callable[..., None]) -> None:
    pool.run(body, world)


def large(rank: int, world: int) -> None:
    """64 MB and 300 MB: in a pool that was made for smaller tensors, and in one segment that torch grows."""
    memory = new_pool()
    for size in (5, 64, 300):
        count = size * MB // 4 // world * world
        with torch.cuda.use_mem_pool(memory):
            tensor = torch.empty(count, device=device())
        given = torch.arange(count, device=device(), dtype=torch.float32) % 1000 + rank
        part = tensor.view(world, -1)[rank]
        warm(dist.all_reduce, tensor)
        tensor.copy_(given)
        dist.all_reduce(tensor)
        dist.all_reduce(wanted := given.clone())
        assert same_bytes(tensor, wanted), size
        tensor.zero_()
        part.copy_(given[: part.numel()])
        dist.all_gather_into_tensor(tensor, part)
        pieces = torch.arange(part.numel(), device=device(), dtype=torch.float32) % 1000
        for other, piece in enumerate(tensor.view(world, -1)):
            assert bool((piece == pieces + other).all()), size


@pytest.mark.parametrize("world", (2, max(WORLDS)))
def test_large_tensors(pool: Pool, world: int) -> None:
    pool.run(large, world)


def too_much(rank: int, world: int) -> None:
    """A request for too much memory, on one rank or all, raises torch's own exception; then everything continues."""
    memory = new_pool()
    backend = dist.group.WORLD._get_backend(device())
    with torch.cuda.use_mem_pool(memory):
        tensor = torch.ones(8 * MB // 4, device=device())
        if rank == 0:
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(10 << 40, dtype=torch.uint8, device=device())
    with pytest.raises(torch.OutOfMemoryError):
        backend.allocate_tensor(10 << 40, dtype=torch.uint8, device=device())
    warm(dist.all_reduce, tensor)
    dist.all_reduce(tensor.fill_(1))
    assert bool((tensor == world).all())
    with torch.cuda.use_mem_pool(memory):
        assert float(torch.ones(64 * MB // 4, device=device()).sum()) == 64 * MB // 4


# proves P16
def test_out_of_memory(pool: Pool) -> None:
    pool.run(too_much, 2)


def allocated(rank: int, world: int) -> None:
    """``allocate_tensor`` works for any group; its memory lives as long as the tensor, a pool as long as the groups."""
    init(rank, world)
    dist.all_reduce(torch.ones(100, device=device()))
    before = free()
    backend = dist.group.WORLD._get_backend(device())
    assert backend.supports_tensor_alloc(device()) and backend.supports_tensor_alloc(torch.device("cuda"))
    assert not backend.supports_tensor_alloc(torch.device("cpu"))
    assert not backend.supports_tensor_alloc(torch.device("cuda", 64))
    assert backend.mem_allocator is torch_symm.mem_allocator()
    tensor = backend.allocate_tensor(256 * MB // 2, dtype=torch.bfloat16, device=device())
    assert (tensor.shape, tensor.dtype, tensor.device) == ((256 * MB // 2,), torch.bfloat16, device())
    elsewhere = backend.allocate_tensor(3, dtype=torch.int8, device=torch.device("cuda"))
    assert elsewhere.device == device()
    warm(dist.all_reduce, tensor)
    assert all(kernels > 0 for kernels in rises(dist.all_reduce, tensor))
    dist.destroy_process_group()
    tensor.fill_(rank)
    init(rank, world, name="second")
    dist.all_reduce(tensor)
    assert bool((tensor == world * (world - 1) / 2).all())
    del tensor, elsewhere, backend
    is_free_again(before)
    dist.barrier()


@pytest.mark.parametrize("world", WORLDS)
def test_allocate_tensor(pool: Pool, world: int) -> None:
    pool.run(allocated, world, backend=None)

"""Every collective, dtype, size and layout, synchronous and asynchronous, against its definition, bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from cases import Case
from collectives import COLLECTIVES, layouts_of, objects, run
from expected import DTYPES
from pool import DEVICE, WORLDS, Pool, device, init, needs_ranks, needs_unshared_gpus

pytestmark = needs_ranks

SMALL = (0, 1, 2, 3, 1_001, 4_095, 4_096, 4_097)
MB = 1 << 20
LARGE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
HUGE_DTYPES = (torch.float32, torch.bfloat16)


def small(rank: int, world: int, collective: str) -> int:
    return run(
        (collective, Case(rank, world, dtype, count, layout, (number + count) % 2 == 1, device=device()))
        for number, dtype in enumerate(DTYPES)
        for count in SMALL
        for layout in layouts_of(collective, count)
    )


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("world", WORLDS)
def test_small(pool: Pool, world: int, collective: str) -> None:
    assert pool.run(small, world, collective)[0] > 300


def large(rank: int, world: int, collective: str) -> int:
    """Sizes around a megabyte, and 20 MB over all ranks."""
    cases = [
        Case(rank, world, dtype, MB // dtype.itemsize + more, layout, more == 0, device=device())
        for dtype in LARGE_DTYPES
        for more in (-1, 0, 1)
        for layout in ("contiguous", "offset")
    ]
    cases += [
        Case(rank, world, dtype, 20 * MB // dtype.itemsize // world, layout, device=device())
        for dtype in HUGE_DTYPES
        for layout in ("contiguous", "offset", "strided")
        if layout in layouts_of(collective, 2)
    ]
    return run((collective, case) for case in cases)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("world", (2, max(WORLDS)))
def test_large(pool: Pool, world: int, collective: str) -> None:
    pool.run(large, world, collective, timeout=200)


def objects_of(rank: int, world: int) -> None:
    objects(rank, world, device())


@pytest.mark.parametrize("world", WORLDS)
def test_objects_and_barrier(pool: Pool, world: int) -> None:
    pool.run(objects_of, world)


GB = 1 << 30
#: A length that needs more than 32 bits even if it is counted in units of 16 bytes.
ENORMOUS = 65 * GB


def words(first: int, count: int) -> torch.Tensor:
    return torch.arange(first, first + count, device=device())


def enormous(rank: int, world: int) -> int | None:
    """One message of 65 GiB from rank 0 to rank 1, each word a different number; returns the number of wrong words."""
    room = torch.tensor([torch.cuda.mem_get_info()[0]])
    dist.all_reduce(room, dist.ReduceOp.MIN)
    if int(room) < ENORMOUS + 8 * GB:
        return None
    part = GB // 8
    tensor = torch.zeros(ENORMOUS if rank < 2 else 0, dtype=torch.uint8, device=device())
    if rank == 0:
        for first in range(0, ENORMOUS // 8, part):
            tensor.view(torch.int64)[first : first + part] = words(first, part)
    nothing = torch.empty(0, dtype=torch.uint8, device=device())
    sends = [ENORMOUS if (rank, to) == (0, 1) else 0 for to in range(world)]
    receives = [ENORMOUS if (source, rank) == (0, 1) else 0 for source in range(world)]
    given, got = (tensor if sum(sends) else nothing), (tensor if sum(receives) else nothing)
    dist.all_to_all_single(got, given, receives, sends)
    wrong = 0
    if rank == 1:
        for first in range(0, ENORMOUS // 8, part):
            wrong += int((tensor.view(torch.int64)[first : first + part] != words(first, part)).sum())
    del tensor, given, got
    torch.cuda.empty_cache()
    return wrong


@pytest.mark.skipif(DEVICE != "cuda", reason="needs two GPUs with 73 GiB free")
def test_one_message_above_64_gib(pool: Pool) -> None:
    found = pool.run(enormous, 2, timeout=200)
    if None in found:
        pytest.skip("needs 73 GiB free on each of two GPUs")
    assert found == [0, 0]


def beside_nccl(rank: int, world: int, default: str) -> None:
    init(rank, world, default, device_id=device())
    other = "nccl" if default == "symm" else "symm"
    # torch splits the default group's backend for a new group with the same backend, but not for one with another.
    groups = [None, dist.new_group([0], backend=other), dist.new_group(backend=other), dist.new_group(backend=default)]
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.all_reduce(tensor := torch.ones(1000, device=device()), group=group)
            assert bool((tensor == dist.get_world_size(group)).all())
    dist.destroy_process_group()


@needs_unshared_gpus
@pytest.mark.parametrize("default", ("symm", "nccl"))
def test_groups_of_nccl_and_symm_in_one_process(pool: Pool, default: str) -> None:
    pool.run(beside_nccl, 2, default, backend=None)

"""GPU memory is freed after groups have ended. ``test_cuda_faults.py`` has the memory of a killed rank."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from pool import WORLDS, Pool, device, init, meet, needs_gpus, needs_unshared_gpus

pytestmark = needs_gpus

MB = 1 << 20
#: Bytes that the driver may keep after a first group: kernels and their stack.
KEPT = 96 * MB
ELEMENTS = 64 * MB


def use(rank: int, world: int) -> None:
    """Every size and collective that may make the group allocate."""
    for count in (10, 100_000, 4_000_000, ELEMENTS):
        tensor = torch.ones(count, device=device())
        dist.all_reduce(tensor)
        assert bool((tensor == world).all())
    part = ELEMENTS // world
    output, wide = torch.ones(part * world, device=device()), torch.ones(part * world, device=device())
    dist.all_gather_into_tensor(output, wide[:part])
    dist.reduce_scatter_tensor(output[:part], wide)
    dist.all_to_all_single(output, wide)
    dist.broadcast(output, 0)
    dist.all_reduce(output, async_op=True).wait()
    torch.cuda.synchronize()


def free() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def cycles(rank: int, world: int) -> list[int]:
    """Free bytes before the first and after each of six groups. The first group may load kernels that stay."""
    # Loads torch's own kernels before the first measurement, because they do not belong to a group.
    assert bool((torch.ones(ELEMENTS, device=device()) == 1).all())
    found = [free()]
    for number in range(6):
        init(rank, world, name=f"cycle-{number}")
        use(rank, world)
        if number % 2:
            group = dist.new_group(list(range(world)))
            dist.all_reduce(torch.ones(1_000_000, device=device()), group=group)
        dist.destroy_process_group()
        meet(f"destroyed-{number}", rank, world)
        found.append(free())
        meet(f"measured-{number}", rank, world)
    return found


# proves P11
@needs_unshared_gpus
@pytest.mark.parametrize("world", WORLDS)
def test_it_is_free_after_each_group(pool: Pool, world: int) -> None:
    for before, first, *later in pool.run(cycles, world, backend=None):
        assert before - first < KEPT, f"{(before - first) / MB:.0f} MB gone after the first group"
        assert first - min(later) < 4 * MB, [round((first - each) / MB, 1) for each in later]


def subgroups(rank: int, world: int) -> tuple[int, int]:
    """Many groups one after another while the default group lives."""
    use(rank, world)
    before = 0
    for number in range(12):
        group = dist.new_group(list(range(world)))
        dist.all_reduce(torch.ones(1_000_000, device=device()), group=group)
        torch.cuda.synchronize()
        dist.destroy_process_group(group)
        if number == 1:
            meet("warm", rank, world)
            before = free()
            meet("warm and measured", rank, world)
    meet("done", rank, world)
    return before, free()


# proves P11
def test_subgroups_leave_nothing(pool: Pool) -> None:
    for before, after in pool.run(subgroups, max(WORLDS)):
        assert before - after < 4 * MB, f"{(before - after) / MB:.0f} MB gone after 10 groups"

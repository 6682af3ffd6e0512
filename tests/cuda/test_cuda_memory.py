"""GPU memory is freed: after groups have ended, and after a rank was killed."""

from __future__ import annotations

import gc
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from pool import WORLDS, Pool, device, init, meet, needs_gpus

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


def killed(rank: int, world: int) -> tuple[float, float] | None:
    """Rank 0 watches the GPU of rank 1, which exits with tensors that the others have mapped."""
    if rank == 0:
        torch.cuda.mem_get_info(1)
    meet("watching", rank, world)
    torch.ones(1, device=device())
    meet("contexts", rank, world)
    before = torch.cuda.mem_get_info(1)[0] if rank == 0 else 0
    meet("before", rank, world)
    init(rank, world)
    use(rank, world)
    large = torch.ones(512 * MB, device=device())
    dist.all_reduce(large)
    torch.cuda.synchronize()
    meet("used", rank, world)
    during = torch.cuda.mem_get_info(1)[0] if rank == 0 else 0
    meet("during", rank, world)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError):
        while True:
            dist.all_reduce(large)
            torch.cuda.synchronize()
    start = time.monotonic()
    after = 0
    while rank == 0 and time.monotonic() - start < 10 and after < before:
        after = torch.cuda.mem_get_info(1)[0]
        time.sleep(0.05)
    seconds = time.monotonic() - start
    meet("after", rank if rank == 0 else rank - 1, world - 1)
    dist.destroy_process_group()
    if rank != 0:
        return None
    assert before - during > 2048 * MB, "the tensors of rank 1 did not count"
    assert after >= before, f"{(before - after) / MB:.0f} MB of rank 1's GPU are still taken"
    return seconds, (after - before) / MB


# proves P12, P21
@pytest.mark.timed
@pytest.mark.parametrize("world", WORLDS)
def test_it_is_free_after_a_killed_rank(pool: Pool, world: int) -> None:
    seconds, _ = pool.run(killed, world, backend=None, killed={1})[0]
    assert seconds < 2, f"it took {seconds:.1f} s"

"""Long calls whose bytes copy engines move: the same bits in any order of the ranks, also in graphs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch_symm
from cases import Case, Findings
from collectives import COLLECTIVES
from pool import WORLDS, Pool, device, init, needs_gpus, settle
from zero_copy import MB, engines, new_pool, numbers, same_bytes, warm

pytestmark = needs_gpus

#: Collectives that copy engines serve in every group; with two ranks also broadcasts and all-to-alls.
SERVED = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
WHOLE = ("all_reduce", "broadcast")


def sweep(rank: int, world: int, collective: str) -> tuple[int, dict[str, int]]:
    """Compares ordinary and symmetric tensors, also of odd lengths, with the definition; the CTA policy is "zero"."""
    init(rank, world, options=torch_symm.Options(cta_policy="zero"))
    findings = Findings()
    before = engines()
    memory = new_pool()
    with torch.cuda.use_mem_pool(memory):
        torch.ones(8 * MB, dtype=torch.uint8, device=device())
    dist.barrier()
    parts = 1 if collective in WHOLE else world
    for dtype, (size, more), symmetric in itertools.product(
        (torch.float32, torch.bfloat16, torch.int64), ((9 * MB, 0), (40 * MB, 1), (5 * MB, -1)), (False, True)
    ):
        count = size // dtype.itemsize // parts + more
        case = Case(rank, world, dtype, count, "contiguous", more == 1, device=device())
        about = f"{case.about}, {'symmetric' if symmetric else 'ordinary'}"
        with findings.case(about), torch.cuda.use_mem_pool(memory) if symmetric else nullcontext():
            COLLECTIVES[collective](case)
    settle()
    found = {way: count - before[way] for way, count in engines().items()}
    dist.destroy_process_group()
    return findings.close(), found


@pytest.mark.parametrize(
    "collective", [each for each in COLLECTIVES if each in (*SERVED, "broadcast", "all_to_all_single")]
)
@pytest.mark.parametrize("world", WORLDS)
def test_as_defined(pool: Pool, world: int, collective: str) -> None:
    found = pool.run(sweep, world, collective, backend=None, timeout=200)
    assert [cases for cases, _ in found] == [18] * world
    served = collective in SERVED or world == 2
    assert all(bool(sum(used.values())) == served for _, used in found), found


def calls(rank: int, world: int, symmetric: bool, apart: bool, late: int) -> list[dict[str, int]]:
    """Runs calls by kernels; then compares asynchronous ones in a group of CTA policy "zero"; one rank is late.

    With ``apart``, tensors have different offsets on each rank, so that no rank finds a message where it expects it.
    """
    zero = dist.new_group(list(range(world)), pg_options=torch_symm.Options(cta_policy="zero"))
    count = 3 * MB // world * world
    with torch.cuda.use_mem_pool(new_pool()) if symmetric else nullcontext():
        before = torch.zeros(4 * MB * rank if apart else 0, device=device())
        whole, gathered = torch.zeros(count, device=device()), torch.zeros(count, device=device())
        part = torch.zeros(count // world, device=device())
    del before
    if symmetric:
        warm(dist.all_reduce, whole)
    part.copy_(numbers(count // world, seed=2))
    own = gathered.chunk(world)[rank]
    scattered = torch.zeros_like(part)

    def run(group: dist.ProcessGroup | None, async_op: bool) -> list[torch.Tensor]:
        results: list[torch.Tensor] = []
        whole.copy_(numbers(count, seed=1))
        gathered.zero_()
        scattered.zero_()
        steps: list[Callable[[], object]] = [
            lambda: dist.all_reduce(whole, group=group, async_op=async_op),
            lambda: dist.all_gather_into_tensor(gathered, part, group=group, async_op=async_op),
            lambda: dist.reduce_scatter_tensor(scattered, whole, group=group, async_op=async_op),
            lambda: dist.all_gather_into_tensor(gathered, own, group=group, async_op=async_op),
        ]
        for step in steps:
            if rank == late:
                time.sleep(0.02)
            work = step()
            if async_op:
                work.wait()  # type: ignore[attr-defined]
            results += [each.clone() for each in (whole, gathered, scattered)]
        return results

    kernels = run(None, False)
    before = engines()
    copies = run(zero, True)
    used = {way: engines()[way] - before[way] for way in before}
    assert all(same_bytes(got, wanted) for got, wanted in zip(copies, kernels, strict=True)), f"rank {rank}"
    return [used]


@pytest.mark.parametrize(("symmetric", "apart"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("world", WORLDS)
def test_same_bits_as_kernels(pool: Pool, world: int, symmetric: bool, apart: bool) -> None:
    for late in (0, world - 1):
        found = pool.run(calls, world, symmetric, apart, late)
        for (used,) in found:
            assert used["staged"] + used["direct"] == 4, used
            assert bool(used["direct"]) == symmetric, used
        assert not apart or any(used["repaired"] for (used,) in found), found


def overlapping(rank: int, world: int, symmetric: tuple[bool, ...]) -> list[int]:
    """Gathers and reduces in several ways, with the default CTA policy; returns how many calls of each are direct.

    ``symmetric``: which ranks take their tensors from symmetric memory.
    """
    size = 40 * MB // 4
    with torch.cuda.use_mem_pool(new_pool()) if symmetric[rank] else nullcontext():
        whole, gathered = torch.zeros(world * size, device=device()), torch.zeros(world * size, device=device())
        scattered = torch.zeros(size, device=device())
    if any(symmetric):
        for tensor in (whole, gathered, scattered):
            warm(dist.all_reduce, tensor)
    inputs = [torch.randn(world, size, generator=torch.Generator().manual_seed(each)) for each in range(world)]
    mine, own = inputs[rank].flatten().to(device()), gathered.chunk(world)[rank]
    summed = (inputs[0] + inputs[1])[rank].to(device())
    parts = torch.cat([each[0] for each in inputs]).to(device())

    def direct_calls(async_op: bool, in_place: bool = True) -> int:
        before = engines()["direct"]
        for _ in range(3):
            whole.copy_(mine)
            gathered.zero_()
            own.copy_(mine[:size])
            works = [
                dist.reduce_scatter_tensor(scattered, whole, async_op=async_op),
                dist.all_gather_into_tensor(gathered, own if in_place else own.clone(), async_op=async_op),
            ]
            for work in works:
                if work is not None:
                    work.wait()
            settle()
            assert same_bytes(scattered, summed) and same_bytes(gathered, parts)
        return engines()["direct"] - before

    found = [direct_calls(True)]
    staged = engines()["staged"]
    found.append(direct_calls(False))
    assert engines()["staged"] == staged
    found += [direct_calls(True, in_place=False), direct_calls(rank == 0)]
    with torch.cuda.stream(torch.cuda.Stream()):
        return [*found, direct_calls(False)]


@pytest.mark.parametrize("symmetric", [(True, True), (True, False), (False, True), (False, False)])
def test_calls_that_overlap_with_computation(pool: Pool, symmetric: tuple[bool, ...]) -> None:
    one, other = pool.run(overlapping, 2, symmetric)
    assert one == other
    if all(symmetric):
        # Synchronous calls are made by kernels, and so are gathers out of place. Kernels may also make a call that both
        # ranks launch at the same time.
        for count, most in zip([*one[:3], one[4]], [6, 0, 3, 6], strict=True):
            assert min(1, most) <= count <= most
    elif not any(symmetric):
        assert not any(one)


def ahead(rank: int, world: int) -> list[int]:
    """Makes asynchronous calls on ordinary tensors while the device is busy, eagerly and in a graph.

    Returns how many of each are staged.
    """
    size = 40 * MB // 4
    inputs = [torch.randn(world, size, generator=torch.Generator().manual_seed(each)) for each in range(world)]
    mine, summed = inputs[rank].to(device()), sum(inputs)[rank].to(device())
    parts = torch.cat([each[0] for each in inputs]).to(device())
    gathered, scattered = ([torch.zeros(count, device=device()) for _ in range(4)] for count in (world * size, size))

    def calls() -> None:
        works = []
        for number in range(4):
            works += [
                dist.reduce_scatter_tensor(scattered[number], mine.flatten(), async_op=True),
                dist.all_gather_into_tensor(gathered[number], mine[0], async_op=True),
            ]
        for work in works:
            work.wait()

    def right() -> bool:
        settle()
        wanted = [(each, summed) for each in scattered] + [(each, parts) for each in gathered]
        return all(same_bytes(each, value) for each, value in wanted)

    calls()
    assert right()
    before = engines()
    torch.cuda._sleep(1_000_000_000)  # half a second, in which the host makes all calls
    calls()
    assert right()
    eager = engines()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    for each in (*scattered, *gathered):
        each.zero_()
    graph.replay()
    assert right()
    assert eager["direct"] == before["direct"]
    return [eager["staged"] - before["staged"], engines()["staged"] - eager["staged"]]


def test_long_calls_are_staged_while_the_host_is_ahead(pool: Pool) -> None:
    (eager, recorded), other = pool.run(ahead, 2)
    assert other == [eager, recorded]
    # Kernels may make a call that both ranks launch at the same time.
    assert 0 < eager <= 8 and recorded == 0


def captured(rank: int, world: int, symmetric: bool) -> None:
    """A graph with each kind of call, replayed with new values between eager calls."""
    init(rank, world, options=torch_symm.Options(cta_policy="zero"))
    count = 2 * MB // world * world
    with torch.cuda.use_mem_pool(new_pool()) if symmetric else nullcontext():
        whole, gathered = torch.zeros(count, device=device()), torch.zeros(count, device=device())
    own = gathered.chunk(world)[rank]
    part, value = torch.zeros(count // world, device=device()), torch.zeros((), device=device())

    def run() -> None:
        whole.copy_((value + rank).expand(count))
        dist.reduce_scatter_tensor(part, whole)
        own.copy_(part)
        dist.all_gather_into_tensor(gathered, own)
        dist.all_reduce(whole)

    run()
    settle()
    time.sleep(0.5)  # peers map a new segment a little later
    run()
    settle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    other = numbers(count)
    for turn in range(200):
        value.fill_(turn)
        graph.replay()
        if turn % 7 == 0:
            dist.all_reduce(other, dist.ReduceOp.MAX)
        if turn % 10 == 0:
            total = world * turn + world * (world - 1) / 2
            assert bool((gathered == total).all() and (whole == total).all() and (part == total).all()), (
                f"replay {turn}"
            )
    settle()
    dist.destroy_process_group()


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("world", WORLDS)
def test_replays(pool: Pool, world: int, symmetric: bool) -> None:
    pool.run(captured, world, symmetric, backend=None)


def unlike(rank: int, world: int) -> None:
    policy = "zero" if rank == 0 else "default"
    init(rank, world, options=torch_symm.Options(cta_policy=policy))
    with pytest.raises(torch_symm.SymmConfigError, match="cta_policy and max_ctas"):
        dist.all_reduce(torch.ones(1, device=device()))
    dist.destroy_process_group()


def test_ranks_with_other_policies_are_told(pool: Pool) -> None:
    pool.run(unlike, 2, backend=None)

"""Results are right whatever stream made the inputs, waits are stream-ordered, and many calls may be in progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from pool import DEVICE, WORLDS, Pool, device, meet, needs_gpus, needs_ranks, settle

pytestmark = needs_ranks

#: Clock cycles by which a producer is delayed: some milliseconds.
DELAY = 5_000_000


def late(tensor: torch.Tensor, value: float) -> None:
    """Fills the tensor on the current stream after a delay."""
    if DEVICE == "cuda":
        torch.cuda._sleep(DELAY)
    tensor.fill_(value)


def on(stream: torch.cuda.Stream | None):
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def side_streams(rank: int, world: int) -> None:
    """The call sees pending writes on its stream, and later work on the stream sees the result."""
    total = world * (world + 1) / 2
    for count in (5, 50_000, 4_000_000):
        for asynchronous in (False, True):
            stream = torch.cuda.Stream()
            tensor = torch.zeros(count, device=device())
            gathered = torch.zeros(count * world, device=device())
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                late(tensor, rank + 1.0)
                work = dist.all_reduce(tensor, async_op=asynchronous)
                if asynchronous:
                    work.wait()
                doubled = tensor * 2
                dist.all_gather_into_tensor(gathered, doubled + rank)
                after = gathered.clone()
                gathered.zero_()
            torch.cuda.current_stream().wait_stream(stream)
            assert bool((doubled == 2 * total).all()), f"all_reduce of {count}"
            wanted = torch.arange(world, device=device()).repeat_interleave(count) + 2 * total
            assert torch.equal(after, wanted), f"all_gather of {count}"


def works_in_order(rank: int, world: int) -> None:
    """A call on the caller's stream returns no work, as with NCCL; a background call and a barrier return one."""
    group = dist.group.WORLD
    assert group is not None
    options = dist.AllreduceOptions()
    tensor = torch.empty(1000, device=device())
    for asynchronous in (False, True):
        options.asyncOp = asynchronous
        late(tensor, rank + 1.0)
        work = group.allreduce([tensor], options)
        assert (work is not None) == asynchronous
        if work is not None:
            work.wait()
        assert bool((tensor == world * (world + 1) / 2).all())
    alone = dist.BarrierOptions()
    alone.asyncOp, alone.device_ids = False, [device().index]
    assert group.barrier(alone) is not None


def wait_does_not_block(rank: int, world: int) -> None:
    """``wait`` orders the stream and does not block the host; a tensor freed early is not reused before the end."""
    dist.all_reduce(torch.ones(1 << 20, device=device()), async_op=True).wait()
    torch.cuda.synchronize()
    for _ in range(20):
        tensor = torch.empty(1 << 20, device=device())
        late(tensor, rank + 1.0)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        requested = torch.cuda.Event()
        requested.record()
        assert not requested.query(), "the host waited for the GPU"
        total = tensor.sum()
        del tensor, work
        torch.empty(1 << 20, device=device()).fill_(-1)
        assert float(total) == (1 << 20) * world * (world + 1) / 2


def future(rank: int, world: int) -> None:
    tensor = torch.full((1_000,), rank + 1.0, device=device())
    work = dist.all_reduce(tensor, async_op=True)
    then = work.get_future().then(lambda done: done.value()[0] * 2)
    result = then.wait()
    settle()
    assert bool((result == world * (world + 1)).all())
    assert work.is_completed()


def each_its_own_way(rank: int, world: int) -> None:
    """Some ranks call with async_op and others without, alternately, with a send between the calls."""
    total = world * (world - 1) / 2
    token, got = torch.full((4_000_000,), 5.0, device=device()), torch.zeros(4_000_000, device=device())
    for turn in range(60):
        count = (7, 30_000, 1_000_000)[turn % 3]
        asynchronous = (rank + turn) % 2 == 0
        tensor = torch.full((count,), float(rank + turn), device=device())
        work = dist.all_reduce(tensor, async_op=asynchronous)
        # Rank 0 sends before its next collective, and rank 1 receives after that collective, so no collective may wait
        # for the send. The turns before the first send load all kernels, because loading may wait for running kernels.
        sends = turn >= 6
        works = [dist.isend(token, 1)] if rank == 0 and sends else []
        gathered = torch.zeros(world * 1_000, device=device())
        second = dist.all_gather_into_tensor(
            gathered, torch.full((1_000,), float(rank), device=device()), async_op=not asynchronous
        )
        if rank == 1 and sends:
            works.append(dist.irecv(got.zero_(), 0))
        for each in (work, second, *works):
            if each is not None:
                each.wait()
        assert bool((tensor == total + world * turn).all()), f"all_reduce, turn {turn}"
        wanted = torch.arange(world, device=device()).repeat_interleave(1_000)
        assert torch.equal(gathered, wanted.to(gathered.dtype)), f"all_gather, turn {turn}"
        assert rank != 1 or not sends or bool((got == 5).all()), f"received, turn {turn}"


def several_groups(rank: int, world: int) -> None:
    """Groups on separate streams keep their data separate, in whatever order they run on the GPU."""
    groups = [dist.new_group(list(range(world))) for _ in range(4)]
    pair = dist.new_group([0, 1])
    streams = [torch.cuda.Stream() if DEVICE == "cuda" else None for _ in groups]
    tensors = [torch.zeros(1 + 70_001 * number, device=device()) for number in range(len(groups))]
    for turn in range(25):
        works = []
        for number in range(len(groups)):
            with on(streams[number]):
                tensors[number].fill_(rank + 10.0 * number + turn)
                works.append(dist.all_reduce(tensors[number], group=groups[number], async_op=number % 2 == 1))
        if rank < 2:
            dist.all_reduce(both := torch.full((333,), rank + 1.0, device=device()), group=pair)
            assert bool((both == 3).all())
        for number, work in enumerate(works):
            with on(streams[number]):
                if work is not None:
                    work.wait()
                wanted = world * (world - 1) / 2 + world * (10.0 * number + turn)
                assert bool((tensors[number] == wanted).all()), f"group {number}, turn {turn}"


def many(rank: int, world: int) -> None:
    """200 calls of all kinds and sizes, awaited only after all are made."""
    waiting = []
    for number in range(200):
        count = (7, 513, 40_000, 300_000)[number % 4]
        tensor = torch.full((count,), float(rank + number), device=device())
        total = world * (world - 1) / 2 + world * number
        if number % 3 == 0:
            waiting.append((dist.all_reduce(tensor, async_op=True), tensor, total))
        elif number % 3 == 1:
            waiting.append((dist.broadcast(tensor, number % world, async_op=True), tensor, number % world + number))
        else:
            output = torch.zeros(count * world, device=device())
            work = dist.all_gather_into_tensor(output, tensor, async_op=True)
            waiting.append((work, output[-count:], world - 1 + number))
    for number, (work, tensor, wanted) in enumerate(waiting):
        work.wait()
        assert bool((tensor == wanted).all()), f"call {number}"


def copied_in_turn(rank: int, world: int) -> None:
    """Calls whose tensors are copied see the results of earlier calls, without a wait between them."""
    total = world * (world + 1) / 2
    for count in (5, 300_000):
        whole = torch.zeros(2 * count, device=device())
        every_other = whole[::2]
        late(every_other, rank + 1.0)
        gathered = torch.empty(world * 2 * count, device=device())
        works = [dist.all_reduce(every_other, async_op=True) for _ in range(3)]
        works.append(dist.all_gather_into_tensor(gathered, whole, async_op=True))
        dist.all_reduce(every_other)
        for work in works:
            work.wait()
        thrice = total * world**2
        assert bool((gathered[::2] == thrice).all()) and bool((gathered[1::2] == 0).all()), f"all_gather of {count}"
        assert bool((every_other == thrice * world).all()), f"all_reduce of {count}"


def a_block_of_several_streams(rank: int, world: int) -> None:
    """A coalesced block waits for the streams on which its calls were made, not only for the one on which it ends."""
    tensors = [torch.zeros(100_000, device=device()) for _ in range(3)]
    settle()
    with dist._coalescing_manager(device=device(), async_ops=True) as manager:
        for number, tensor in enumerate(tensors):
            with torch.cuda.stream(torch.cuda.Stream()):
                late(tensor, rank + 10.0 * number)
                dist.broadcast(tensor, number % world)
    manager.wait()
    for number, tensor in enumerate(tensors):
        assert bool((tensor == number % world + 10.0 * number).all()), f"call {number}"


def late_ranks(rank: int, world: int) -> None:
    """Products run while an asynchronous call waits for ranks that make it only after the products have ended."""
    factor = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device())
    part, whole = (torch.ones(count, dtype=torch.bfloat16, device=device()) for count in (1 << 24, world << 24))
    calls = {
        "all_reduce": lambda: dist.all_reduce(part, async_op=True),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, async_op=True),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, async_op=True),
    }
    for name, call in calls.items():
        call().wait()
        factor @ factor
        settle()
        meet(f"{name} is loaded", rank, world)
        if rank == 0:
            work = call()
            factor @ factor
            multiplied = torch.cuda.Event()
            multiplied.record()
            deadline = time.monotonic() + 20
            while not multiplied.query():
                assert time.monotonic() < deadline, f"a product waits for the late ranks of {name}"
        meet(f"{name} is late", rank, world)
        if rank > 0:
            work = call()
        work.wait()
        settle()


ON_GPUS = [
    pytest.param(body, marks=needs_gpus)
    for body in (side_streams, works_in_order, a_block_of_several_streams, late_ranks)
]


@pytest.mark.parametrize("body", (*ON_GPUS, each_its_own_way, several_groups, many, copied_in_turn))
@pytest.mark.parametrize("world", WORLDS)
def test_streams(pool: Pool, world: int, body: Callable[..., None]) -> None:
    pool.run(body, world)


@pytest.mark.parametrize("body", (pytest.param(wait_does_not_block, marks=needs_gpus), future))
def test_works(pool: Pool, body: Callable[..., None]) -> None:
    pool.run(body, max(WORLDS))

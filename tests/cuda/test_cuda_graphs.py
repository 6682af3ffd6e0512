"""CUDA graphs: every collective is captured without registration and replays repeatedly between eager calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from pool import WORLDS, Pool, captured, device, needs_gpus

pytestmark = needs_gpus

REPLAYS = 1_000
SIZES = (64, 40_000, 1_000_000)
Step = Callable[[], None]


def step(collective: str, rank: int, world: int, count: int) -> tuple[Step, Callable[[float], None], torch.Tensor]:
    """Returns the captured call, a check for the current value, and the tensor that receives the value.

    Each rank's input is ``value + rank``, computed inside the graph so that each replay starts anew.
    """
    value = torch.zeros((), device=device())
    own = torch.zeros(count, device=device())
    wide = torch.zeros(world, count, device=device())
    ranks = torch.arange(world, device=device(), dtype=torch.float32)
    total = world * (world - 1) / 2

    def fill() -> None:
        own.copy_((value + rank).expand(count))
        wide.copy_((value + rank + ranks)[:, None].expand(world, count))

    output = torch.zeros(world, count, device=device())
    part = torch.zeros(count, device=device())
    bodies: dict[str, tuple[Step, Callable[[float], tuple[torch.Tensor, object]]]] = {
        "all_reduce": (lambda: dist.all_reduce(own), lambda v: (own, world * v + total)),
        "broadcast": (lambda: dist.broadcast(own, 1), lambda v: (own, v + 1)),
        "reduce": (lambda: dist.reduce(own, 0), lambda v: (own, world * v + total) if rank == 0 else (part, part)),
        "all_gather_into_tensor": (
            lambda: dist.all_gather_into_tensor(output, own),
            lambda v: (output, (v + ranks)[:, None].expand(world, count)),
        ),
        "all_gather": (
            lambda: dist.all_gather(list(output), own),
            lambda v: (output, (v + ranks)[:, None].expand(world, count)),
        ),
        "reduce_scatter_tensor": (
            lambda: dist.reduce_scatter_tensor(part, wide),
            lambda v: (part, world * (v + rank) + total),
        ),
        "all_to_all_single": (
            lambda: dist.all_to_all_single(output, wide),
            lambda v: (output, (v + ranks + rank)[:, None].expand(world, count)),
        ),
        "ring": (lambda: exchange(rank, world, own, part), lambda v: (part, v + (rank - 1) % world)),
    }
    call, wanted = bodies[collective]

    def run() -> None:
        fill()
        call()

    def check(v: float) -> None:
        got, right = wanted(v)
        assert bool((got == right).all()), f"{collective} of {count} with {v}: {got.flatten()[:4].tolist()}"

    return run, check, value


COLLECTIVES = (
    "all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "all_gather", "reduce_scatter_tensor",
    "all_to_all_single", "ring",
)  # fmt: skip


def exchange(rank: int, world: int, own: torch.Tensor, part: torch.Tensor) -> None:
    """Sends to the next rank, receives from the previous one."""
    sends = dist.P2POp(dist.isend, own, (rank + 1) % world)
    receives = dist.P2POp(dist.irecv, part, (rank - 1) % world)
    for work in dist.batch_isend_irecv([sends, receives]):
        work.wait()


def replay(rank: int, world: int, collective: str) -> None:
    """1000 replays at full speed with eager calls of another size in between; every tenth value is checked."""
    for count in SIZES:
        run, check, value = step(collective, rank, world, count)
        eager_run, eager_check, eager_value = step(collective, rank, world, count // 2 + 1)
        graph = captured(run)
        for turn in range(REPLAYS if count < SIZES[-1] else REPLAYS // 10):
            value.fill_(turn % 100)
            graph.replay()
            if turn % 10 == 0:
                check(turn % 100)
            if turn % 25 == 0:
                eager_value.fill_(turn % 50 + 1)
                eager_run()
                eager_check(turn % 50 + 1)
        check(turn % 100)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("world", (2, max(WORLDS)))
def test_replays(pool: Pool, world: int, collective: str) -> None:
    pool.run(replay, world, collective)


def interleaved(rank: int, world: int) -> None:
    """Two graphs, each with several collectives, replayed in changing order without checks in between."""
    first = [step(name, rank, world, 4_096) for name in COLLECTIVES[:4]]
    second = [step(name, rank, world, 250_000) for name in COLLECTIVES[4:7]]
    graphs = [captured(lambda steps=steps: [run() for run, _, _ in steps]) for steps in (first, second)]
    for turn in range(200):
        order = (0, 1, 1, 0) if turn % 3 else (1, 0, 0)
        for _, _, value in (*first, *second):
            value.fill_(turn)
        for number in order:
            graphs[number].replay()
        for _, check, _ in (*first, *second):
            check(turn)


def asynchronous(rank: int, world: int) -> None:
    """async_op inside a capture: the graph waits for the work while compute kernels run."""
    tensors = [torch.zeros(30_000, device=device()) for _ in range(3)]
    value = torch.zeros((), device=device())

    def run() -> None:
        for tensor in tensors:
            tensor.copy_((value + rank).expand(30_000))
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        value.clone().mul_(2)
        for work in works:
            work.wait()
        for tensor in tensors:
            tensor.mul_(2)

    graph = captured(run)
    for turn in range(100):
        value.fill_(turn)
        graph.replay()
    total = 2 * (world * 99 + world * (world - 1) / 2)
    assert all(bool((tensor == total).all()) for tensor in tensors)


def outlived(rank: int, world: int) -> None:
    """A graph may be destroyed after the group, and a new group captures anew."""
    run, check, value = step("all_reduce", rank, world, 1_000)
    graph = captured(run)
    group = dist.new_group(list(range(world)))
    tensor = torch.ones(1_000, device=device())
    other = captured(lambda: dist.all_reduce(tensor, group=group))
    torch.cuda.synchronize()
    dist.destroy_process_group(group)
    del other
    value.fill_(5)
    graph.replay()
    check(5)


@pytest.mark.parametrize("body", (interleaved, asynchronous, outlived))
@pytest.mark.parametrize("world", WORLDS)
def test_several_graphs(pool: Pool, world: int, body: Callable[..., None]) -> None:
    pool.run(body, world)

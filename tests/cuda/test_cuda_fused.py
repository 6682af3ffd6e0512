"""Fused matmuls on GPUs: eager and in CUDA graphs, with ranks that fall behind each other.

All numbers are -1, 0 and 1, and no sum exceeds 256: products are exact in bfloat16 in any order of addition, so that
results can be compared bit by bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import DEVICE, WORLDS, Pool, captured, device, needs_gpus, needs_ranks, settle

pytestmark = needs_ranks

REPLAYS = 20
#: Clock ticks by which a rank falls behind: about 2 ms.
LATE = 4_000_000
#: Rows of a rank, summed dimension, columns.
SHAPES = ((1, 1, 1), (3, 7, 5), (130, 64, 257), (512, 256, 1024), (1024, 256, 3584), (2048, 128, 264))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def numbers(seed: int, *size: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns the same numbers on all ranks."""
    generator = torch.Generator(device()).manual_seed(seed)
    return torch.randint(-1, 2, size, device=device(), generator=generator).to(dtype)


def fall_behind(source: random.Random) -> None:
    if DEVICE == "cuda" and source.random() < 0.3:
        torch.cuda._sleep(int(source.random() * LATE))


class GatherStep:
    """An all-gather and its products: ``fill`` and ``check`` make inputs and expected results from the same seed."""

    def __init__(self, rank: int, world: int, m: int, k: int, n: int, dtype: torch.dtype, group: Any = None) -> None:
        self.rank, self.world, self.m, self.k, self.dtype = rank, world, m, k, dtype
        self.name = (group or dist.group.WORLD).group_name
        self.shard = torch.zeros(m, k, dtype=dtype, device=device())
        # One contiguous factor, and one in the layout of a weight.
        self.factors = [numbers(1, k, n, dtype=dtype), numbers(2, n, k, dtype=dtype).t()]

    def _shards(self, seed: int) -> list[torch.Tensor]:
        return [numbers(100 * seed + rank, self.m, self.k, dtype=self.dtype) for rank in range(self.world)]

    def fill(self, seed: int) -> None:
        self.shard.copy_(self._shards(seed)[self.rank])

    def run(self) -> None:
        gather = torch.ops.symm._all_gather_matmul
        self.gathered, self.products = gather(self.shard, self.factors, self.name, True)
        _, self.again = gather(self.shard, self.factors[:1], self.name, False)

    def check(self, seed: int) -> None:
        full = torch.cat(self._shards(seed))
        about = (seed, self.m, self.k, self.dtype)
        assert torch.equal(self.gathered, full), about
        for product, factor in zip([*self.products, *self.again], [*self.factors, self.factors[0]], strict=True):
            assert torch.equal(product, (full.float() @ factor.float()).to(self.dtype)), about


class ScatterStep:
    """A product and its reduce-scatter, as sum and as mean; used like ``GatherStep``."""

    def __init__(self, rank: int, world: int, m: int, k: int, n: int, dtype: torch.dtype, group: Any = None) -> None:
        self.rank, self.world, self.m, self.k, self.dtype = rank, world, m, k, dtype
        self.name = (group or dist.group.WORLD).group_name
        self.left = torch.zeros(world * m, k, dtype=dtype, device=device())
        self.right = numbers(3, k, n, dtype=dtype)

    def _left(self, seed: int, rank: int) -> torch.Tensor:
        return numbers(100 * seed + 50 + rank, self.world * self.m, self.k, dtype=self.dtype)

    def fill(self, seed: int) -> None:
        self.left.copy_(self._left(seed, self.rank))

    def run(self) -> None:
        self.sum = torch.ops.symm._matmul_reduce_scatter(self.left, self.right, False, self.name)
        self.mean = torch.ops.symm._matmul_reduce_scatter(self.left, self.right, True, self.name)

    def check(self, seed: int) -> None:
        total = torch.zeros(self.sum.shape, device=device())
        for rank in range(self.world):
            rows = self._left(seed, rank)[self.rank * self.m : (self.rank + 1) * self.m]
            total += (rows.float() @ self.right.float()).to(self.dtype).float()
        about = (seed, self.m, self.k, self.dtype)
        assert torch.equal(self.sum, total.to(self.dtype)), about
        assert torch.equal(self.mean, (total / self.world).to(self.dtype)), about


Step = GatherStep | ScatterStep
STEPS: dict[str, Callable[..., Step]] = {"gather": GatherStep, "scatter": ScatterStep}


def eager(rank: int, world: int, kind: str) -> None:
    for dtype in DTYPES:
        for seed, (m, k, n) in enumerate(SHAPES):
            step = STEPS[kind](rank, world, m, k, n, dtype)
            step.fill(seed)
            step.run()
            step.check(seed)


def in_a_row(rank: int, world: int) -> None:
    """Eager calls in direct succession on ranks that fall behind: calls wait only for each other."""
    behind = random.Random(rank)
    for seed in range(30):
        m, k, n = SHAPES[2 + seed % 4]
        steps = [make(rank, world, m, k, n, torch.bfloat16) for make in STEPS.values()]
        for step in steps:
            step.fill(seed)
        for step in steps:
            fall_behind(behind)
            step.run()
        for step in steps:
            step.check(seed)


def replayed(rank: int, world: int, kind: str) -> None:
    """Replays between eager calls of another size: each finds the workspace as the other left it."""
    behind = random.Random(rank)
    for m, k, n in SHAPES[2:]:
        other = STEPS[kind](rank, world, m // 2, k, n, torch.bfloat16)
        step = STEPS[kind](rank, world, m, k, n, torch.bfloat16)
        graph = captured(step.run)
        for seed in range(REPLAYS):
            step.fill(seed)
            fall_behind(behind)
            graph.replay()
            # Every third time, a second replay follows directly, without a wait for the first.
            if seed % 3 == 0:
                graph.replay()
            step.check(seed)
            if seed % 4 == 0:
                other.fill(seed)
                fall_behind(behind)
                other.run()
                graph.replay()
                other.run()
                other.check(seed)
                step.check(seed)


def several_graphs(rank: int, world: int) -> None:
    """Graphs in changing order, one directly after itself, and a workspace that grows once graphs use it."""
    behind = random.Random(rank)
    first = [make(rank, world, 256, 128, 512, torch.bfloat16) for make in STEPS.values()]
    second = [make(rank, world, 64, 64, 96, torch.float32) for make in STEPS.values()]
    graphs = [captured(lambda steps=steps: [step.run() for step in steps]) for steps in (first, second)]
    large: list[Step] = []
    for seed in range(REPLAYS):
        for step in (*first, *second):
            step.fill(seed)
        for number in (0, 1, 1, 0, 0) if seed % 2 else (1, 0):
            fall_behind(behind)
            graphs[number].replay()
        if seed == REPLAYS // 2:
            large = [make(rank, world, 16384 // world, 64, 4096, torch.bfloat16) for make in STEPS.values()]
        for step in large:
            step.fill(seed)
            step.run()
        for step in (*first, *second, *large):
            step.check(seed)


def two_streams_of_a_capture(rank: int, world: int) -> None:
    """Calls on two streams of one capture use the workspace one after another, without waits between the streams."""
    behind = random.Random(rank)
    side = torch.cuda.Stream()
    steps = [make(rank, world, 512, 256, 1024, torch.bfloat16) for make in (*STEPS.values(), *STEPS.values())]

    def run() -> None:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        for number, step in enumerate(steps):
            with torch.cuda.stream(side if number % 2 else main):
                step.run()
        main.wait_stream(side)

    graph = captured(run)
    for turn in range(REPLAYS):
        for number, step in enumerate(steps):
            step.fill(10 * turn + number)
        fall_behind(behind)
        graph.replay()
        for number, step in enumerate(steps):
            step.check(10 * turn + number)


def streams(rank: int, world: int) -> None:
    """Calls from changing streams of one process follow each other."""
    steps = [make(rank, world, 256, 128, 512, torch.bfloat16) for make in STEPS.values()]
    others = [torch.cuda.Stream() for _ in range(2)]
    for seed in range(20):
        for step in steps:
            step.fill(seed)
        settle()
        for number, step in enumerate(steps):
            with torch.cuda.stream(others[(seed + number) % 2]):
                step.run()
        settle()
        for step in steps:
            step.check(seed)


def refused(rank: int, world: int) -> None:
    step = GatherStep(rank, world, 64, 64, 64, torch.bfloat16)
    step.fill(1)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="cannot be made while a graph is recorded"), torch.cuda.graph(graph):
        step.run()
    settle()
    # Another group may end in between.
    dist.destroy_process_group(dist.new_group(list(range(world))))
    step.run()
    step.check(1)
    with pytest.raises(ValueError, match="B is on cpu, A_shard on cuda"):
        torch.ops.symm._all_gather_matmul(step.shard, [step.factors[0].cpu()], step.name, False)


@needs_gpus
def test_a_capture_makes_no_workspace(pool: Pool) -> None:
    pool.run(refused, 2)


def two_groups(rank: int, world: int) -> None:
    twins = [dist.new_group(list(range(world))) for _ in range(2)]
    steps = [
        make(rank, world, 100 * (1 + number), 64, 80, torch.bfloat16, group)
        for number, group in enumerate(twins)
        for make in STEPS.values()
    ]
    for seed in range(20):
        for step in steps:
            step.fill(seed)
            step.run()
        for step in steps:
            step.check(seed)


@pytest.mark.parametrize("body", (eager, pytest.param(replayed, marks=needs_gpus)))
@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("world", WORLDS)
def test_each_kind(pool: Pool, world: int, kind: str, body: Callable[..., None]) -> None:
    pool.run(body, world, kind)


ON_GPUS = (several_graphs, two_streams_of_a_capture, streams)


@pytest.mark.parametrize("body", (in_a_row, two_groups, *(pytest.param(body, marks=needs_gpus) for body in ON_GPUS)))
@pytest.mark.parametrize("world", WORLDS)
def test_kinds_in_turn(pool: Pool, world: int, body: Callable[..., None]) -> None:
    pool.run(body, world)

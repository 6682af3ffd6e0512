"""torch.ops.symm.all_reduce_add_rms_norm on GPUs: bits, graphs, streams, mismatches."""

from __future__ import annotations

from typing import Any

import norm_reference
import pytest
import torch
import torch.distributed as dist
import torch_symm
from norm_reference import DTYPES, EPS, every_form, ops, same_bits
from pool import WORLDS, Pool, device, needs_gpus, needs_ranks, settle
from test_cuda_errors import failure_of

pytestmark = needs_ranks

#: Seconds within which a failure must appear.
LIMIT_S = 15
#: Shapes for every plan: a single kernel with one row, with several, and with several for each block; and an all-reduce
#: followed by a kernel for the rows.
SHAPES = ((1, 1024), (1, 8192), (3, 4104), (7, 16384), (64, 1024), (65, 4096), (200, 1032), (333, 8192))


def name() -> str:
    return dist.group.WORLD.group_name


def rows_of(
    rank: int, world: int, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> norm_reference.Rows:
    return norm_reference.Rows(rank, world, shape, dtype, seed, device())


def forms(rank: int, world: int, dtype: torch.dtype) -> None:
    for seed, shape in enumerate(SHAPES):
        rows = rows_of(rank, world, shape, dtype, seed)
        every_form(rows, name())
        # The separate steps give the same bits.
        summed = rows.own.clone()
        dist.all_reduce(summed)
        assert same_bits((summed + rows.residual).cpu(), rows.wanted()[1]), rows.about


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_bits_are_those_of_separate_steps(pool: Pool, world: int, dtype: torch.dtype) -> None:
    pool.run(forms, world, dtype)


def batches(rank: int, world: int) -> None:
    norm_reference.batches(rank, world, name(), 4096, torch.bfloat16, device())


def layouts(rank: int, world: int) -> None:
    rows = rows_of(rank, world, (6, 64))
    wide = torch.zeros(6, 128, dtype=torch.bfloat16, device=device())
    wide[:, ::2] = rows.own
    rows.check(ops.all_reduce_add_rms_norm(wide[:, ::2], rows.residual.t().contiguous().t(), rows.weight, EPS, name()))
    # Rows that start two bytes past a unit.
    room = torch.zeros(6 * 64 + 1, dtype=torch.bfloat16, device=device())
    shifted = room[1:].view(6, 64)
    shifted.copy_(rows.own)
    rows.check(ops.all_reduce_add_rms_norm(shifted, rows.residual, rows.weight, EPS, name()))
    ops.all_reduce_add_rms_norm_(shifted, rows.residual, rows.weight, EPS, name())
    rows.check((shifted, rows.residual))
    nothing = torch.zeros(0, 64, device=device())
    weight = torch.ones(64, device=device())
    assert ops.all_reduce_add_rms_norm(nothing, nothing, weight, EPS, name())[0].shape == (0, 64)


@pytest.mark.parametrize("body", (batches, layouts))
def test_batches_and_layouts(pool: Pool, body: Any) -> None:
    pool.run(body, 2)


def graphs(rank: int, world: int) -> None:
    """Several layers in a graph, replayed with other values and with eager calls of another size in between."""
    for dtype, shape in ((torch.bfloat16, (1, 8192)), (torch.bfloat16, (5, 4096)), (torch.float32, (300, 2048))):
        rows = rows_of(rank, world, shape, dtype)
        beside = rows_of(rank, world, (2, 1024), torch.float16)

        def run(rows: norm_reference.Rows = rows) -> list[tuple[torch.Tensor, ...]]:
            return [ops.all_reduce_add_rms_norm(*rows.tensors(), EPS, name()) for _ in range(5)]

        run()
        settle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = run()
        for seed in range(40):
            if seed % 10 == 0:
                new = rows_of(rank, world, shape, dtype, seed)
                for old, other in zip(rows.tensors(), new.tensors(), strict=True):
                    old.copy_(other)
            graph.replay()
            if seed % 3 == 0:
                beside.check(ops.all_reduce_add_rms_norm(*beside.tensors(), EPS, name()))
            if seed % 10 == 9:
                for got in results:
                    new.check(got)


def streams(rank: int, world: int) -> None:
    """Calls of every kind on two streams, without a wait in between, with one rank behind at times."""
    rows = [rows_of(rank, world, (1 + seed, 2048), torch.bfloat16, seed) for seed in range(6)]
    side = torch.cuda.Stream()
    settle()
    results = []
    for turn in range(30):
        with torch.cuda.stream(side if turn % 3 == 0 else torch.cuda.current_stream()):
            if (turn + rank) % 7 == 0:
                torch.cuda._sleep(2_000_000)
            results.append(ops.all_reduce_add_rms_norm(*rows[turn % 6].tensors(), EPS, name()))
            dist.all_reduce(torch.ones(1000 * (1 + turn), device=device()))
    settle()
    for turn, got in enumerate(results):
        rows[turn % 6].check(got)


@needs_gpus
@pytest.mark.parametrize("body", (graphs, streams))
def test_graphs_and_streams(pool: Pool, body: Any) -> None:
    pool.run(body, 2)


def differs(rank: int, world: int, what: str) -> None:
    ones, weight = torch.ones(4, 1024, device=device()), torch.ones(1024, device=device())
    ops.all_reduce_add_rms_norm(ones, ones, weight, EPS, name())
    settle()

    def call() -> None:
        if rank == 1 and what == "hidden":
            ops.all_reduce_add_rms_norm(ones.view(8, 512), ones.view(8, 512), weight[:512], EPS, name())
        elif rank == 1 and what == "call":
            dist.all_reduce(ones)
        else:
            ops.all_reduce_add_rms_norm(ones, ones, weight, EPS if rank == 0 or what != "eps" else 1e-6, name())

    error, _ = failure_of(call, LIMIT_S)
    assert isinstance(error, torch_symm.SymmMismatchError), repr(error)
    assert "all_reduce_add_rms_norm(4 × 1024 × float32, eps 1e-5)" in str(error), str(error)


@pytest.mark.parametrize("what", ("hidden", "eps", "call"))
def test_ranks_that_disagree_hear_of_it(pool: Pool, what: str) -> None:
    pool.run(differs, 2, what, group_timeout=10)

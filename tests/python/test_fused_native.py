"""Matmuls fused with an all-gather or a reduce-scatter, as one native call each, on CPU tensors."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

DTYPES = (torch.float32, torch.bfloat16)
WORLDS = (2, 4)

Gathered = tuple[torch.Tensor, list[torch.Tensor]]


def name_of(group: Any = None) -> str:
    return str((group or dist.group.WORLD).group_name)


def gather(
    shard: torch.Tensor, factors: list[torch.Tensor], return_gathered: bool = True, group: Any = None
) -> Gathered:
    found: Gathered = torch.ops.symm._all_gather_matmul(shard, factors, name_of(group), return_gathered)
    return found


def scatter(left: torch.Tensor, right: torch.Tensor, mean: bool = False, group: Any = None) -> torch.Tensor:
    found: torch.Tensor = torch.ops.symm._matmul_reduce_scatter(left, right, mean, name_of(group))
    return found


def matrices(seed: int, dtype: torch.dtype, *sizes: tuple[int, int], ranks: int = 1) -> list[list[torch.Tensor]]:
    """For every size a matrix of each rank; the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(size, generator=generator).to(dtype) for _ in range(ranks)] for size in sizes]


def sum_of_parts(lefts: list[torch.Tensor], rights: list[torch.Tensor], rank: int, mean: bool) -> torch.Tensor:
    """Products rounded to their dtype, added in 32 bits in rank order, rounded once."""
    rows = lefts[0].shape[0] // len(lefts)
    wide = torch.float64 if lefts[0].dtype == torch.float64 else torch.float32
    total = torch.zeros(rows, rights[0].shape[1], dtype=wide)
    for left, right in zip(lefts, rights, strict=True):
        total += (left[rank * rows : (rank + 1) * rows] @ right).to(wide)
    return (total / len(lefts) if mean else total).to(lefts[0].dtype)


def gather_once(rank: int, world: int, seed: int, dtype: torch.dtype, m: int, k: int, columns: tuple[int, ...]) -> None:
    (shards,) = matrices(seed, dtype, (m, k), ranks=world)
    factors = [factor for (factor,) in matrices(seed + 1000, dtype, *((k, n) for n in columns))]
    # In the layout of a weight: transposed.
    factors[-1] = factors[-1].t().contiguous().t()
    full, return_gathered = torch.cat(shards), seed % 2 == 0
    gathered, products = gather(shards[rank], factors, return_gathered)
    assert torch.equal(gathered, full) if return_gathered else gathered.shape == (0,), (seed, m, k)
    assert [product.shape for product in products] == [(world * m, n) for n in columns]
    for product, factor in zip(products, factors, strict=True):
        torch.testing.assert_close(product, full @ factor)


def scatter_once(rank: int, world: int, seed: int, dtype: torch.dtype, m: int, k: int, n: int, mean: bool) -> None:
    lefts, rights = matrices(seed, dtype, (world * m, k), (k, n), ranks=world)
    found = scatter(lefts[rank], rights[rank], mean)
    torch.testing.assert_close(found, sum_of_parts(lefts, rights, rank, mean), msg=lambda text: f"{seed}: {text}")


def odd_sizes(rank: int, world: int, dtype: torch.dtype) -> None:
    for seed, (m, k, n) in enumerate([(1, 1, 1), (3, 7, 5), (129, 64, 257), (16, 1, 300), (2, 1000, 1), (40, 33, 8)]):
        gather_once(rank, world, seed, dtype, m, k, (n,))
        gather_once(rank, world, seed + 1, dtype, m, k, (n, 2 * n + 1, 3))
        scatter_once(rank, world, seed, dtype, m, k, n, mean=False)
        scatter_once(rank, world, seed, dtype, m, k, n, mean=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", (1, *WORLDS))
def test_results_are_those_of_unfused_calls(world: int, dtype: torch.dtype) -> None:
    run_ranks(odd_sizes, world, dtype)


def test_wider_and_narrower_types() -> None:
    def body(rank: int, world: int) -> None:
        for dtype in (torch.float64, torch.float16):
            gather_once(rank, world, 2, dtype, 6, 20, (9,))
            scatter_once(rank, world, 3, dtype, 6, 20, 9, mean=True)

    run_ranks(body, 3)


def repeated(rank: int, world: int, calls: int) -> None:
    """Ranks are delayed at random, so that a write that is too early or a read that is too late is detected."""
    shared, own = random.Random(5), random.Random(rank)
    for seed in range(calls):
        dtype = shared.choice(DTYPES)
        m, k, n = shared.choice((1, 8, 64)), shared.choice((4, 64)), shared.choice((1, 32, 200))
        kind = shared.random()
        if own.random() < 0.2:
            time.sleep(own.random() * 0.004)
        if kind < 0.5:
            gather_once(rank, world, seed, dtype, m, k, (n,))
        else:
            scatter_once(rank, world, seed, dtype, m, k, n, mean=kind < 0.75)


@pytest.mark.parametrize("world", WORLDS)
def test_calls_in_a_row_with_other_data(world: int) -> None:
    run_ranks(repeated, world, 300)


def identical(rank: int, world: int) -> None:
    """The result of a reduction on each rank does not depend on when its peers arrived."""
    first = None
    for turn in range(20):
        (left,), (right,) = matrices(rank, torch.bfloat16, (8 * world, 16), (16, 24))
        if turn % world == rank:
            time.sleep(0.003)
        found = scatter(left, right)
        first = found if first is None else first
        assert torch.equal(found, first)


def test_the_same_bits_every_time() -> None:
    run_ranks(identical, 4)


def growing(rank: int, world: int) -> None:
    """The last products only fit into one piece of the workspace, and share it with small ones."""
    for seed, rows in enumerate((4, 400, 4, 2000, 3, 9000, 5, 9000, 9000, 7)):
        k = 2100 if rows == 9000 else 64
        shard = torch.full((rows, k), float(rank + seed))
        gathered, (product,) = gather(shard, [torch.ones(k, 1)], return_gathered=seed % 2 == 0)
        wanted = torch.arange(world).repeat_interleave(rows) + float(seed)
        assert torch.equal(product[:, 0], wanted * k), (seed, rows)
        assert gathered.shape[0] == 0 or torch.equal(gathered[:, -1], wanted)
        left = torch.full((world * rows, 1), float(rank + 1))
        columns = 1100 if rows == 9000 else 16
        found = scatter(left, torch.full((1, columns), float(seed)))
        assert bool((found == seed * world * (world + 1) / 2).all()) and found.shape == (rows, columns)


def test_the_workspace_grows() -> None:
    run_ranks(growing, 2)


def groups(rank: int, world: int) -> None:
    """Overlapping groups on the same device do not share data or signals."""
    everybody, pairs = dist.group.WORLD, [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[rank // 2]
    for turn in range(30):
        (shards,) = matrices(turn, torch.float32, (5, 6), ranks=world)
        factor = torch.eye(6)
        gathered, (product,) = gather(shards[rank], [factor], group=pair)
        wanted = torch.cat(shards[rank // 2 * 2 : rank // 2 * 2 + 2])
        assert torch.equal(gathered, wanted)
        torch.testing.assert_close(product, wanted)
        _, (product,) = gather(shards[rank], [factor], return_gathered=False, group=everybody)
        torch.testing.assert_close(product, torch.cat(shards))
        found = scatter(torch.cat(shards), factor, group=pair if turn % 2 else everybody)
        assert found.shape[0] == (10 if turn % 2 else 5)


def test_two_groups() -> None:
    run_ranks(groups, 4)


def reborn(rank: int, world: int) -> None:
    """A group with the same name as a destroyed one has a separate workspace."""
    from torch_symm._native import load

    for turn in range(3):
        group = dist.new_group(list(range(world)))
        _, (product,) = gather(torch.full((2, 2), float(turn)), [torch.eye(2)], group=group)
        assert bool((product == turn).all())
        if turn == 1:
            load()._drop_workspaces(name_of(group))
            _, (product,) = gather(torch.full((2, 2), 7.0), [torch.eye(2)], group=group)
            assert bool((product == 7).all())
        dist.destroy_process_group(group)


def test_groups_come_and_go() -> None:
    run_ranks(reborn, 2)


def left_early(rank: int, world: int) -> None:
    """A rank that has finished the last call leaves while others still read the results that it computed for them."""
    left, right = torch.ones(world * 1500, 8), torch.ones(8, 1500)
    for turn in range(4):
        group = dist.new_group(list(range(world)))
        found = scatter(left, right * (rank + 1), group=group)
        dist.destroy_process_group(group)
        assert bool((found == 8 * world * (world + 1) / 2).all()), turn


def test_a_rank_that_leaves_takes_nothing_away() -> None:
    run_ranks(left_early, 4)


def empty(rank: int, world: int) -> None:
    gathered, (product,) = gather(torch.empty(0, 4), [torch.ones(4, 3)])
    assert gathered.shape == (0, 4) and product.shape == (0, 3)
    gathered, (product,) = gather(torch.empty(2, 0), [torch.ones(0, 3)])
    assert gathered.shape == (2 * world, 0) and torch.equal(product, torch.zeros(2 * world, 3))
    assert scatter(torch.empty(0, 4), torch.ones(4, 3)).shape == (0, 3)
    assert scatter(torch.empty(2 * world, 4), torch.ones(4, 0)).shape == (2, 0)
    assert torch.equal(scatter(torch.empty(2 * world, 0), torch.ones(0, 3)), torch.zeros(2, 3))


def test_nothing_to_multiply() -> None:
    run_ranks(empty, 2)


def with_gradients(rank: int, world: int) -> None:
    """The operators run below autograd: weights may require gradients, but results have none."""
    weight = torch.ones(4, 4, requires_grad=True)
    with torch.no_grad():
        _, (product,) = gather(torch.ones(2, 4), [weight])
        found = scatter(torch.ones(2 * world, 4), weight)
    assert not product.requires_grad and not found.requires_grad
    assert bool((product == 4).all()) and bool((found == 4 * world).all())


def test_weights_of_a_model() -> None:
    run_ranks(with_gradients, 2)


def refuse(rank: int, world: int) -> None:
    square = torch.ones(4, 4)
    refused: list[tuple[str, Callable[[], object]]] = [
        ("A_shard must be a matrix, not a tensor of 3", lambda: gather(torch.ones(2, 2, 4), [square])),
        ("A_shard must be contiguous", lambda: gather(torch.ones(4, 3).t(), [square])),
        ("B must be a matrix, not a tensor of 1", lambda: gather(square, [square, torch.ones(4)])),
        ("A_shard has 4 columns, B has 3 rows", lambda: gather(square, [torch.ones(3, 4)])),
        ("A_shard is of .*, B of .*one dtype", lambda: gather(square, [square.bfloat16()])),
        ("Bs is empty", lambda: gather(square, [])),
        ("matrices of Long are not served", lambda: gather(square.long(), [square.long()])),
        ("A must be a matrix", lambda: scatter(torch.ones(4), square)),
        ("A must be contiguous", lambda: scatter(torch.ones(4, 8).t(), square)),
        ("the 5 rows of A cannot be divided among 2 ranks", lambda: scatter(torch.ones(5, 4), square)),
        ("A has 4 columns, B has 3 rows", lambda: scatter(square, torch.ones(3, 4))),
    ]
    for words, call in refused:
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(RuntimeError, match="no-such-group"):
        torch.ops.symm._matmul_reduce_scatter(square, square, False, "no-such-group")
    # None of these calls has harmed the group.
    assert bool((scatter(square, square) == 4 * world).all())


def test_what_cannot_be_done_is_refused_in_a_sentence() -> None:
    run_ranks(refuse, 2)


def whole_graph(rank: int, world: int) -> None:
    left, right = matrices(3, torch.float32, (8, 16), (16, 24))
    shard, factor = left[0], right[0]
    for call in (
        lambda a, b: gather(a, [b, b * 2])[1],
        lambda a, b: [gather(a, [b], return_gathered=False)[1][0]],
        lambda a, b: [scatter(a, b)],
    ):
        made = torch.compile(call, backend="aot_eager", fullgraph=True)
        for one, other in zip(made(shard, factor), call(shard, factor), strict=True):
            assert torch.equal(one, other)
    on_meta = shard.to("meta"), factor.to("meta")
    gathered, (product,) = gather(on_meta[0], [on_meta[1]])
    assert (gathered.shape, product.shape) == ((8 * world, 16), (8 * world, 24))
    assert scatter(*on_meta).shape == (8 // world, 24)
    for a, b in ((shard, on_meta[1]), (on_meta[0], factor)):
        with pytest.raises(ValueError, match=r"B is on (cpu|meta), A_shard on (cpu|meta)"):
            gather(a, [b])
        with pytest.raises(ValueError, match=r"B is on (cpu|meta), A on (cpu|meta)"):
            scatter(a, b)


def test_a_whole_graph_and_tensors_without_memory() -> None:
    run_ranks(whole_graph, 2)

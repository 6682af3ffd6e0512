"""The fused operators compared with collectives and matmuls: values, shapes, strides, arguments."""

from __future__ import annotations

import inspect
import itertools
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torchs
import torch_symm.symm_mem as symm_mem
from torch_symm.symm_mem import _all_gather_matmul, _matmul_reduce_scatter, _operators

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WORLDS = (2, 4)
#: The types for each number of ranks; with four ranks, one that is summed in a wider type and one that is not.
FLOATS_OF = {2: FLOATS, 4: (torch.bfloat16, torch.float64)}


def whole_numbers(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Integers so small that their products are exact in any order of summation."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, tuple(shape), generator=generator).to(dtype)


def layouts(t: torch.Tensor) -> list[torch.Tensor]:
    """The same values in every order of memory, and with gaps."""
    orders = itertools.permutations(range(t.dim()))
    found = [t.permute(order).contiguous().permute([order.index(dim) for dim in range(t.dim())]) for order in orders]
    return [*found, torch.stack([t, t], dim=-1)[..., 0]]


def assert_same(got: torch.Tensor, wanted: torch.Tensor, where: object) -> None:
    assert got.dtype == wanted.dtype and got.shape == wanted.shape, where
    assert got.stride() == wanted.stride(), (where, got.stride(), wanted.stride())
    assert torch.equal(got, wanted), (where, got, wanted)


def test_what_need_not_be_copied_has_the_dimension_outermost() -> None:
    t = whole_numbers((2, 3, 4, 5), torch.float32, 1)
    for restride, rows_of in (
        (symm_mem.restride_A_shard_for_fused_all_gather_matmul, _all_gather_matmul.rows_of),
        (symm_mem.restride_A_for_fused_matmul_reduce_scatter, _matmul_reduce_scatter.rows_of),
    ):
        for dim in range(3):
            for given in layouts(t):
                moved = restride(given, dim)
                assert torch.equal(moved, t) and moved.shape == t.shape
                assert moved.movedim(dim, 0).is_contiguous(), (dim, moved.stride())
                assert rows_of(moved, dim).data_ptr() == moved.data_ptr(), "it was copied"
                assert restride(moved, dim).data_ptr() == moved.data_ptr(), "again"


def test_strides_for_a_permutation_are_those_of_torch() -> None:
    given = torch.arange(120.0).view(2, 3, 4, 5)
    for perm in itertools.permutations(range(given.dim())):
        ours = symm_mem.make_contiguous_for_perm(given, list(perm))
        theirs = torchs.make_contiguous_for_perm(given, list(perm))
        assert torch.equal(ours, given) and ours.stride() == theirs.stride(), perm


def test_the_names_of_torchs_module_take_what_torchs_take() -> None:
    for operator in _operators.OPERATORS:
        ours, theirs = (
            inspect.signature(getattr(module, f"_{operator.name}_fallback")).parameters for module in (symm_mem, torchs)
        )
        assert list(ours) == list(theirs), operator.name
    given = torch.arange(120.0).view(2, 3, 4, 5)
    for dim in (*range(4), -1):
        moved = symm_mem.outermost(given, dim)
        assert torch.equal(moved, given) and moved.movedim(dim, 0).is_contiguous()


def test_tensors_of_several_devices_are_refused_by_name() -> None:
    """If one of them is on the meta device, PyTorch selects the kernel without memory."""
    one, rest = torch.ones(4, 4), ([None], [None], [torch.float32], [False])
    calls: dict[str, tuple[dict[str, object], tuple[object, ...]]] = {
        "fused_all_gather_matmul": ({"A": one, "Bs": [one, one]}, (0, "none")),
        "fused_all_gather_scaled_matmul": (
            {"A": one, "Bs": [one], "A_scale": one, "B_scales": [one]},
            (0, "none", *rest),
        ),
        "fused_matmul_reduce_scatter": ({"A": one, "B": one}, ("sum", 0, "none")),
        "fused_scaled_matmul_reduce_scatter": (
            {"A": one, "B": one, "A_scale": one, "B_scale": one},
            ("sum", 0, 0, "none", [4, 4]),
        ),
    }
    assert calls.keys() == {operator.name for operator in _operators.OPERATORS}
    for (name, (tensors, others)), odd in itertools.product(calls.items(), range(4)):
        if odd >= len(tensors):
            continue
        odd_name, value = list(tensors.items())[odd]
        moved = [each.to("meta") for each in value] if isinstance(value, list) else one.to("meta")
        call = getattr(torch.ops.symm, name)
        with pytest.raises(ValueError, match=rf"{name}: \w+ is on (cpu|meta), A on (cpu|meta); move") as error:
            call(*{**tensors, odd_name: moved}.values(), *others)
        assert odd == 0 or f": {odd_name} is on meta" in str(error.value)


@pytest.mark.ranks(WORLDS)
def test_all_gather_matmul_is_gathering_and_multiplying(rank: int, world_size: int) -> None:
    name = dist.group.WORLD.group_name
    for dtype, shape in itertools.product(FLOATS_OF[world_size], ((3, 5), (1, 2), (2, 3, 5), (2, 1, 3, 4))):
        mine = whole_numbers(shape, dtype, rank)
        wholes = [whole_numbers(shape, dtype, peer) for peer in range(world_size)]
        for gather_dim, widths in itertools.product(range(len(shape)), ((3,), (1, 8, 5))):
            depth = shape[-1] * (world_size if gather_dim == len(shape) - 1 else 1)
            Bs = [whole_numbers((depth, width), dtype, 100 + width) for width in widths]
            A = torch.cat(wholes, gather_dim)
            for given in layouts(mine):
                where = (dtype, shape, gather_dim, widths, given.stride())
                got_A, got = symm_mem.fused_all_gather_matmul(given, Bs, gather_dim, name)
                wanted_A, wanted = symm_mem._fused_all_gather_matmul_fallback(given, Bs, gather_dim, name)
                assert got_A is not None and wanted_A is not None
                assert torch.equal(got_A, A), where
                assert_same(got_A, wanted_A, where)
                for B, one, other in zip(Bs, got, wanted, strict=True):
                    assert torch.equal(one, torch.matmul(A, B)), where
                    assert_same(one, other, where)
                nothing, again = symm_mem.fused_all_gather_matmul(given, Bs, gather_dim, name, return_A=False)
                assert nothing is None
                for one, other in zip(again, wanted, strict=True):
                    assert_same(one, other, where)
        assert torch.equal(mine, wholes[rank])


@pytest.mark.ranks(WORLDS)
def test_matmul_reduce_scatter_is_multiplying_and_reducing(rank: int, world_size: int) -> None:
    name = dist.group.WORLD.group_name
    for dtype, shape in itertools.product(FLOATS_OF[world_size], ((4, 5), (8, 1), (4, 8, 3), (4, 1, 4, 2))):
        As = [whole_numbers(shape, dtype, peer) for peer in range(world_size)]
        for scatter_dim, width, op in itertools.product(range(len(shape)), (4, 12), ("sum", "avg")):
            if scatter_dim < len(shape) - 1 and shape[scatter_dim] % world_size:
                continue
            Bs = [whole_numbers((shape[-1], width), dtype, 100 + peer) for peer in range(world_size)]
            total = sum(A.double() @ B.double() for A, B in zip(As, Bs, strict=True))
            total = total / world_size if op == "avg" else total
            for given in layouts(As[rank]):
                where = (dtype, shape, scatter_dim, width, op, given.stride())
                got = symm_mem.fused_matmul_reduce_scatter(given, Bs[rank], op, scatter_dim, name)
                assert torch.equal(got.double(), total.chunk(world_size, scatter_dim)[rank]), where
                assert_same(
                    got, symm_mem._fused_matmul_reduce_scatter_fallback(given, Bs[rank], op, scatter_dim, name), where
                )
                assert got.is_contiguous()


@pytest.mark.ranks(WORLDS)
def test_products_are_summed_in_fp32_in_rank_order(rank: int, world_size: int) -> None:
    """The bits do not depend on when a rank arrives."""
    name = dist.group.WORLD.group_name
    torch.manual_seed(rank)
    A, B = torch.randn(4 * world_size, 33).bfloat16(), torch.randn(33, 7).bfloat16()
    blocks = torch.stack([block @ B for block in A.chunk(world_size)])
    everyones = [torch.empty_like(blocks) for _ in range(world_size)]
    dist.all_gather(everyones, blocks)
    total = torch.zeros(4, 7)
    for theirs in everyones:
        total += theirs[rank].float()
    for turn in range(20):
        if turn % world_size == rank:
            time.sleep(0.003)
        assert torch.equal(symm_mem.fused_matmul_reduce_scatter(A, B, "sum", 0, name), total.bfloat16()), turn


@pytest.mark.ranks([1, 2])
def test_no_rows_no_products_and_one_rank(world_size: int) -> None:
    name = dist.group.WORLD.group_name
    for rows, depth in ((0, 3), (2, 3), (2, 0)):
        A, (C,) = symm_mem.fused_all_gather_matmul(torch.ones(rows, depth), [torch.ones(depth, 5)], 0, name)
        assert A is not None and torch.equal(A, torch.ones(rows * world_size, depth))
        assert torch.equal(C, torch.full((rows * world_size, 5), float(depth)))
        A, B = torch.ones(rows * world_size, depth), torch.ones(depth, 5)
        piece = symm_mem.fused_matmul_reduce_scatter(A, B, "avg", 0, name)
        assert torch.equal(piece, torch.full((rows, 5), float(depth)))
    no_columns = symm_mem.fused_matmul_reduce_scatter(torch.ones(2 * world_size, 4), torch.ones(4, 0), "sum", 0, name)
    assert no_columns.shape == (2, 0)
    for rows, columns in ((0, 3), (2, 0), (2, 3)):
        depth = columns * world_size
        A, (C,) = symm_mem.fused_all_gather_matmul(torch.ones(rows, columns), [torch.ones(depth, 5)], 1, name)
        assert A is not None and torch.equal(A, torch.ones(rows, depth))
        assert torch.equal(C, torch.full((rows, 5), float(depth)))
    nothing, products = symm_mem.fused_all_gather_matmul(torch.ones(2, 3), [], 0, name, return_A=False)
    assert nothing is None and products == []


@pytest.mark.ranks(2)
def test_wrong_arguments_are_refused_in_torchs_words(rank: int) -> None:
    name = dist.group.WORLD.group_name
    matrix, row = torch.ones(4, 4), torch.ones(4)

    def refused(sentence: str, call: object, *args: object) -> None:
        with pytest.raises(ValueError, match=sentence):
            call(*args, name)  # type: ignore[operator]

    gather, scatter = symm_mem.fused_all_gather_matmul, symm_mem.fused_matmul_reduce_scatter
    refused("A_shard must be a matrix", gather, row, [matrix], 0)
    refused("B must be a matrix", gather, matrix, [matrix, row], 0)
    refused("Invalid gather_dim", gather, matrix, [matrix], 2)
    refused("Invalid gather_dim", gather, matrix, [matrix], -1)
    refused(r"A has 4 columns over 2 ranks, but B has shape \(3, 4\)", gather, matrix, [torch.ones(3, 4)], 0)
    refused("A is torch.float32, but B is torch.float64", gather, matrix, [matrix.double()], 0)
    refused("A_shard must be a matrix", scatter, row, matrix, "sum", 0)
    refused("Invalid gather_dim", scatter, matrix, matrix, "sum", 2)
    refused("B must be a matrix", scatter, matrix, row, "sum", 0)
    refused('reduce_op="max" is not one of "sum", "avg"', scatter, matrix, matrix, "max", 0)
    refused("2 ranks do not divide the 3 elements of dimension 0", scatter, torch.ones(3, 4), matrix, "sum", 0)
    refused("2 ranks do not divide the 3 elements of dimension 1", scatter, matrix, torch.ones(4, 3), "sum", 1)
    refused("cannot be multiplied", scatter, matrix, torch.ones(3, 4), "sum", 0)
    # No rank waits for another after a rejection.
    got, _ = gather(matrix, [matrix], 0, name)
    assert got is not None and got.shape == (8, 4)


#: The tests below call the native operators, one call each, on CPU tensors.
DTYPES = (torch.float32, torch.bfloat16)

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


@pytest.mark.ranks([1, 2, 3, 4])
def test_results_are_those_of_unfused_calls(rank: int, world_size: int) -> None:
    sizes = [(1, 1, 1), (3, 7, 5), (129, 64, 257), (16, 1, 300), (2, 1000, 1), (40, 33, 8)]
    for dtype, (seed, (m, k, n)) in itertools.product(DTYPES, enumerate(sizes)):
        gather_once(rank, world_size, seed, dtype, m, k, (n,))
        gather_once(rank, world_size, seed + 1, dtype, m, k, (n, 2 * n + 1, 3))
        scatter_once(rank, world_size, seed, dtype, m, k, n, mean=False)
        scatter_once(rank, world_size, seed, dtype, m, k, n, mean=True)
    for dtype in (torch.float64, torch.float16):
        gather_once(rank, world_size, 2, dtype, 6, 20, (9,))
        scatter_once(rank, world_size, 3, dtype, 6, 20, 9, mean=True)
    # Ranks are delayed at random, so that a write that is too early or a read that is too late is detected.
    shared, own = random.Random(5), random.Random(rank)
    for seed in range(300):
        dtype = shared.choice(DTYPES)
        m, k, n = shared.choice((1, 8, 64)), shared.choice((4, 64)), shared.choice((1, 32, 200))
        kind = shared.random()
        if own.random() < 0.2:
            time.sleep(own.random() * 0.004)
        if kind < 0.5:
            gather_once(rank, world_size, seed, dtype, m, k, (n,))
        else:
            scatter_once(rank, world_size, seed, dtype, m, k, n, mean=kind < 0.75)


@pytest.mark.ranks(2)
def test_the_workspace_grows(rank: int, world_size: int) -> None:
    """The last products only fit into one piece of the workspace, and share it with small ones."""
    for seed, rows in enumerate((4, 400, 4, 2000, 3, 9000, 5, 9000, 9000, 7)):
        k = 2100 if rows == 9000 else 64
        shard = torch.full((rows, k), float(rank + seed))
        gathered, (product,) = gather(shard, [torch.ones(k, 1)], return_gathered=seed % 2 == 0)
        wanted = torch.arange(world_size).repeat_interleave(rows) + float(seed)
        assert torch.equal(product[:, 0], wanted * k), (seed, rows)
        assert gathered.shape[0] == 0 or torch.equal(gathered[:, -1], wanted)
        left = torch.full((world_size * rows, 1), float(rank + 1))
        columns = 1100 if rows == 9000 else 16
        found = scatter(left, torch.full((1, columns), float(seed)))
        assert bool((found == seed * world_size * (world_size + 1) / 2).all()) and found.shape == (rows, columns)


@pytest.mark.ranks(4)
def test_two_groups(rank: int, world_size: int) -> None:
    """Overlapping groups on the same device do not share data or signals."""
    everybody, pairs = dist.group.WORLD, [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[rank // 2]
    for turn in range(30):
        (shards,) = matrices(turn, torch.float32, (5, 6), ranks=world_size)
        factor = torch.eye(6)
        gathered, (product,) = gather(shards[rank], [factor], group=pair)
        wanted = torch.cat(shards[rank // 2 * 2 : rank // 2 * 2 + 2])
        assert torch.equal(gathered, wanted)
        torch.testing.assert_close(product, wanted)
        _, (product,) = gather(shards[rank], [factor], return_gathered=False, group=everybody)
        torch.testing.assert_close(product, torch.cat(shards))
        found = scatter(torch.cat(shards), factor, group=pair if turn % 2 else everybody)
        assert found.shape[0] == (10 if turn % 2 else 5)


@pytest.mark.ranks(4)
def test_groups_come_and_go(rank: int, world_size: int) -> None:
    """A group with the same name as a destroyed one has a separate workspace.

    A rank that has finished the last call leaves while others still read the results that it computed for them.
    """
    from torch_symm._native import load

    left, right = torch.ones(world_size * 1500, 8), torch.ones(8, 1500)
    for turn in range(4):
        group = dist.new_group(list(range(world_size)))
        for value in (turn, 7):
            _, (product,) = gather(torch.full((2, 2), float(value)), [torch.eye(2)], group=group)
            assert bool((product == value).all())
            if value == 1:
                load()._drop_workspaces(name_of(group))
        found = scatter(left, right * (rank + 1), group=group)
        dist.destroy_process_group(group)
        assert bool((found == 8 * world_size * (world_size + 1) / 2).all()), turn


@pytest.mark.ranks(2)
def test_what_cannot_be_done_is_refused_in_a_sentence(world_size: int) -> None:
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
    shard, factor = torch.empty(8, 16, device="meta"), torch.empty(16, 24, device="meta")
    gathered, (product,) = gather(shard, [factor])
    assert (gathered.shape, product.shape) == ((8 * world_size, 16), (8 * world_size, 24))
    assert scatter(shard, factor).shape == (8 // world_size, 24)
    for a, b in ((torch.ones(8, 16), factor), (shard, torch.ones(16, 24))):
        with pytest.raises(ValueError, match=r"B is on (cpu|meta), A_shard on (cpu|meta)"):
            gather(a, [b])
        with pytest.raises(ValueError, match=r"B is on (cpu|meta), A on (cpu|meta)"):
            scatter(a, b)
    # None of these calls has harmed the group. Weights may require gradients; results of such calls have none.
    weight = torch.ones(4, 4, requires_grad=True)
    with torch.no_grad():
        _, (product,) = gather(square, [weight])
        found = scatter(square, weight)
    assert not product.requires_grad and not found.requires_grad
    assert bool((product == 4).all()) and bool((found == 4 * world_size).all())

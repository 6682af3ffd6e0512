"""The fused operators compared with collectives and matmuls: values, shapes, strides, arguments."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torchs
import torch_symm.symm_mem as symm_mem
from ranks import run_ranks
from torch_symm.symm_mem import _all_gather_matmul, _matmul_reduce_scatter, _operators

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WORLDS = (2, 4)


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


def gather_everything(rank: int, world: int) -> None:
    name = dist.group.WORLD.group_name
    for dtype, shape in itertools.product(FLOATS, ((3, 5), (1, 2), (2, 3, 5), (2, 1, 3, 4))):
        mine = whole_numbers(shape, dtype, rank)
        wholes = [whole_numbers(shape, dtype, peer) for peer in range(world)]
        for gather_dim, widths in itertools.product(range(len(shape)), ((3,), (1, 8, 5))):
            depth = shape[-1] * (world if gather_dim == len(shape) - 1 else 1)
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


@pytest.mark.parametrize("world", WORLDS)
def test_all_gather_matmul_is_gathering_and_multiplying(world: int) -> None:
    run_ranks(gather_everything, world)


def scatter_everything(rank: int, world: int) -> None:
    name = dist.group.WORLD.group_name
    for dtype, shape in itertools.product(FLOATS, ((4, 5), (8, 1), (4, 8, 3), (4, 1, 4, 2))):
        As = [whole_numbers(shape, dtype, peer) for peer in range(world)]
        for scatter_dim, width, op in itertools.product(range(len(shape)), (4, 12), ("sum", "avg")):
            if scatter_dim < len(shape) - 1 and shape[scatter_dim] % world:
                continue
            Bs = [whole_numbers((shape[-1], width), dtype, 100 + peer) for peer in range(world)]
            total = sum(A.double() @ B.double() for A, B in zip(As, Bs, strict=True))
            total = total / world if op == "avg" else total
            for given in layouts(As[rank]):
                where = (dtype, shape, scatter_dim, width, op, given.stride())
                got = symm_mem.fused_matmul_reduce_scatter(given, Bs[rank], op, scatter_dim, name)
                assert torch.equal(got.double(), total.chunk(world, scatter_dim)[rank]), where
                assert_same(
                    got, symm_mem._fused_matmul_reduce_scatter_fallback(given, Bs[rank], op, scatter_dim, name), where
                )
                assert got.is_contiguous()


@pytest.mark.parametrize("world", WORLDS)
def test_matmul_reduce_scatter_is_multiplying_and_reducing(world: int) -> None:
    run_ranks(scatter_everything, world)


def sums_in_order(rank: int, world: int) -> None:
    name = dist.group.WORLD.group_name
    torch.manual_seed(rank)
    A, B = torch.randn(4 * world, 33).bfloat16(), torch.randn(33, 7).bfloat16()
    blocks = torch.stack([block @ B for block in A.chunk(world)])
    everyones = [torch.empty_like(blocks) for _ in range(world)]
    dist.all_gather(everyones, blocks)
    total = torch.zeros(4, 7)
    for theirs in everyones:
        total += theirs[rank].float()
    got = symm_mem.fused_matmul_reduce_scatter(A, B, "sum", 0, name)
    assert torch.equal(got, total.bfloat16())


@pytest.mark.parametrize("world", WORLDS)
def test_products_are_summed_in_fp32_in_rank_order(world: int) -> None:
    run_ranks(sums_in_order, world)


def empty_and_alone(rank: int, world: int) -> None:
    name = dist.group.WORLD.group_name
    for rows in (0, 2):
        A, (C,) = symm_mem.fused_all_gather_matmul(torch.ones(rows, 3), [torch.ones(3, 5)], 0, name)
        assert A is not None and torch.equal(A, torch.ones(rows * world, 3))
        assert torch.equal(C, torch.full((rows * world, 5), 3.0))
        piece = symm_mem.fused_matmul_reduce_scatter(torch.ones(rows * world, 3), torch.ones(3, 5), "avg", 0, name)
        assert torch.equal(piece, torch.full((rows, 5), 3.0))
    nothing, products = symm_mem.fused_all_gather_matmul(torch.ones(2, 3), [], 0, name, return_A=False)
    assert nothing is None and products == []


@pytest.mark.parametrize("world", (1, 2))
def test_no_rows_no_products_and_one_rank(world: int) -> None:
    run_ranks(empty_and_alone, world)


def wrong_arguments(rank: int, world: int) -> None:
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
    refused("reduce_op must be sum or avg", scatter, matrix, matrix, "max", 0)
    refused("2 ranks do not divide the 3 elements of dimension 0", scatter, torch.ones(3, 4), matrix, "sum", 0)
    refused("2 ranks do not divide the 3 elements of dimension 1", scatter, matrix, torch.ones(4, 3), "sum", 1)
    refused("cannot be multiplied", scatter, matrix, torch.ones(3, 4), "sum", 0)
    # No rank waits for another after a rejection.
    got, _ = gather(matrix, [matrix], 0, name)
    assert got is not None and got.shape == (8, 4)


def test_wrong_arguments_are_refused_in_torchs_words() -> None:
    run_ranks(wrong_arguments, 2)

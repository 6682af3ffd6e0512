"""The fused operators on 8-bit floats. Torch multiplies them on the CPU with one scale per tensor, or on meta."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_symm.symm_mem as symm_mem
from torch_symm.symm_mem import _test_mode
from torch_symm.symm_mem._scales import ScaleMode, gather_mode

FP8 = torch.float8_e4m3fn
WORLDS = (2, 4)


def matrix(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(FP8)


def operand(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Column-major, as ``_scaled_mm`` requires."""
    return matrix((columns, rows), seed).t()


def both_ways(call: Callable[[], Any]) -> tuple[Any, Any]:
    with _test_mode():
        wanted = call()
    return call(), wanted


def same(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    layout = (got.shape, got.stride(), got.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
    return layout and torch.allclose(got.float(), wanted.float(), rtol=1e-2, atol=1e-2)


@pytest.mark.ranks(WORLDS)
def test_all_gather_scaled_matmul(rank: int, world_size: int) -> None:
    name = dist.group.WORLD.group_name
    for shape in ((16, 32), (2, 16, 32), (3, 2, 8, 16)):
        for gather_dim in range(len(shape) - 1):
            A = matrix(shape, rank)
            Bs = [operand(shape[-1], 16, 7), operand(shape[-1], 32, 8)]
            scale, scales = torch.tensor(0.5), [torch.tensor(0.25), torch.tensor(2.0)]
            dtypes = [torch.bfloat16, torch.float32]
            args = (A, Bs, scale, scales, gather_dim, name, [None, None], [None, None], dtypes, [False, False])
            got, wanted = both_ways(lambda args=args: symm_mem.fused_all_gather_scaled_matmul(*args))
            whole = torch.cat([matrix(shape, r).float() for r in range(world_size)], gather_dim)
            assert torch.equal(got[0].float(), whole)
            assert got[0].stride() == wanted[0].stride()
            assert all(same(one, other) for one, other in zip(got[1], wanted[1], strict=True))
            dequantized = [got[0].float() @ B.float() * 0.5 * one for B, one in zip(Bs, scales, strict=True)]
            for one, exact in zip(got[1], dequantized, strict=True):
                assert torch.allclose(one.float(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.ranks(WORLDS)
def test_scaled_matmul_reduce_scatter(rank: int, world_size: int) -> None:
    name = dist.group.WORLD.group_name
    B, scale_B = operand(32, 16, 50 + rank), torch.tensor(0.25)
    for shape, dim, op in (
        ((64, 32), 0, "sum"),
        ((4, 16, 32), 0, "sum"),
        ((3, 16, 32), 1, "avg"),
        ((2, 4, 8, 32), 2, "avg"),
    ):
        A, scale_A = matrix(shape, rank), torch.tensor(0.5)
        whole = [*shape[:-1], 16]
        given = [(A, dim)]
        if len(shape) > 2:
            given.append((A.flatten(0, -2), 0))  # as Inductor passes it
        for one, its_dim in given:
            args = (one, B, scale_A, scale_B, op, dim, its_dim, name, whole, None, None, torch.bfloat16)
            got, wanted = both_ways(lambda args=args: symm_mem.fused_scaled_matmul_reduce_scatter(*args))
            assert same(got, wanted), (shape, dim, op, got.stride(), wanted.stride())
            exact = (A.float() @ B.float()) * 0.125
            dist.all_reduce(exact)
            exact = exact / world_size if op == "avg" else exact
            assert torch.allclose(got.float(), exact.chunk(world_size, dim)[rank], rtol=3e-2, atol=1e-1)
        assert whole == [*shape[:-1], 16]
    args = (matrix((8, 32), rank), B, scale_B, scale_B, "sum", 0, 0, name, None, None, None, torch.float32)
    got, wanted = both_ways(lambda: symm_mem.fused_scaled_matmul_reduce_scatter(*args))
    assert same(got, wanted) and got.shape == (8 // world_size, 16)


@pytest.mark.ranks(2)
def test_scales_of_rows_on_meta(world_size: int) -> None:
    name = dist.group.WORLD.group_name
    A = torch.empty(3, 16, 32, dtype=FP8, device="meta")
    B = torch.empty(16, 32, dtype=FP8, device="meta").t()
    rows = torch.empty(1, 16, device="meta")
    for gather_dim, scale in (
        (0, (3, 16, 1)),
        (1, (3, 16, 1)),
        (0, (3 * world_size, 16, 1)),
        (1, (3, 16 * world_size, 1)),
    ):
        lists = ([None], [None], [torch.bfloat16], [True])
        args = (A, [B], torch.empty(scale, device="meta"), [rows], gather_dim, name, *lists)
        got, (product,) = symm_mem.fused_all_gather_scaled_matmul(*args)
        shape = [3, 16, 32]
        shape[gather_dim] *= world_size
        assert list(got.shape) == shape and list(product.shape) == [*shape[:-1], 16]
        assert product.dtype == torch.bfloat16 and product.movedim(gather_dim, 0).is_contiguous()
    scale = torch.empty(3, 16, 1, device="meta")
    piece = symm_mem.fused_scaled_matmul_reduce_scatter(
        A, B, scale, rows, "avg", 1, 1, name, [3, 16, 16], None, None, torch.bfloat16
    )
    assert piece.shape == (3, 16 // world_size, 16) and piece.dtype == torch.bfloat16 and piece.is_contiguous()


def test_what_a_scale_belongs_to() -> None:
    shard = torch.empty(4, 8, dtype=FP8)
    assert gather_mode(shard, torch.ones(()), 0, 2) is ScaleMode.TENSOR
    assert gather_mode(shard, torch.ones(1, 1), 0, 2) is ScaleMode.TENSOR
    assert gather_mode(shard, torch.ones(4, 1), 0, 2) is ScaleMode.SHARDED_ROWS
    assert gather_mode(shard, torch.ones(8, 1), 0, 2) is ScaleMode.ALL_ROWS
    # Either interpretation fits the shapes; torch chooses this one.
    assert gather_mode(shard[:1], torch.ones(1, 1), 0, 2) is ScaleMode.SHARDED_ROWS
    for shape in ((3, 1), (8, 2), (4, 8)):
        with pytest.raises(ValueError, match="Invalid scale shape for fp8 all-gather"):
            gather_mode(shard, torch.ones(shape), 0, 2)


@pytest.mark.ranks(2)
def test_wrong_arguments_are_refused() -> None:
    name = dist.group.WORLD.group_name
    A, B, one = matrix((16, 32), 1), operand(32, 16, 2), torch.ones(())
    lists: dict[str, list[Any]] = {key: [None] for key in ("biases", "result_scales", "out_dtypes")}
    lists["use_fast_accum"] = [False]

    def gather(scale: torch.Tensor = one, dim: int = 0, scales: int = 1, **changed: list[Any]) -> None:
        symm_mem.fused_all_gather_scaled_matmul(A, [B], scale, [one] * scales, dim, name, **{**lists, **changed})

    def scatter(
        scale: torch.Tensor = one, op: str = "sum", dim: int = 0, its_dim: int = 0, columns: torch.Tensor = B
    ) -> None:
        symm_mem.fused_scaled_matmul_reduce_scatter(A, columns, scale, one, op, dim, its_dim, name, [16, 16])

    calls: list[tuple[Callable[..., None], dict[str, Any], str]] = [
        *((gather, {key: []}, rf"len\({key}\) must be the same as len\(Bs\)") for key in lists),
        (gather, {"scales": 2}, r"len\(B_scales\) must be"),
        (gather, {"dim": 1}, "Invalid gather_dim"),
        (gather, {"scale": torch.ones(5, 1)}, "Invalid scale shape"),
        (gather, {"out_dtypes": [torch.int32]}, "scalar type 3"),
        (scatter, {"op": "max"}, 'reduce_op="max" is not one of "sum", "avg"'),
        (scatter, {"its_dim": 1}, "Invalid scatter dim for 2D tensor"),
        (scatter, {"dim": 2}, r"Invalid scatter dim for 3D\+ output"),
        (scatter, {"scale": torch.ones(3, 1)}, "leading dims of A_scale must match"),
        (scatter, {"columns": B[0]}, "B must be a matrix"),
    ]
    for call, changed, words in calls:
        with pytest.raises(ValueError, match=words):
            call(**changed)

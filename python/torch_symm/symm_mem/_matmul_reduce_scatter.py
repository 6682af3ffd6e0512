"""Matrix products summed over the ranks; each rank keeps a piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_symm.symm_mem import _fallbacks
from torch_symm.symm_mem._agreement import compare, described, rejecting
from torch_symm.symm_mem._all_gather_matmul import check_dtypes
from torch_symm.symm_mem._groups import resolve
from torch_symm.symm_mem._layout import from_rows, packed, rows_of
from torch_symm.symm_mem._native_operators import native
from torch_symm.symm_mem._pipeline import produce_and_exchange
from torch_symm.symm_mem._scales import ScaledMatmul, dtype_of

#: Types that are summed in their own precision. Other floats are summed in fp32 and rounded once.
_WIDE_DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def check(A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, ranks: int) -> None:
    """Raises ``ValueError`` unless the product exists and can be scattered."""
    if A.dim() < 2:
        raise ValueError("A_shard must be a matrix")
    if not 0 <= scatter_dim < A.dim():
        raise ValueError("Invalid gather_dim")  # worded as in torch
    if B.dim() != 2:
        raise ValueError("B must be a matrix")
    _check_op(reduce_op)
    if A.shape[-1] != B.shape[0]:
        raise ValueError(f"A of shape {tuple(A.shape)} cannot be multiplied by B of shape {tuple(B.shape)}")
    size = B.shape[1] if scatter_dim == A.dim() - 1 else A.shape[scatter_dim]
    if size % ranks:
        raise ValueError(f"{ranks} ranks do not divide the {size} elements of dimension {scatter_dim} of the product")


def _check_op(reduce_op: str) -> None:
    if reduce_op not in ("sum", "avg"):
        raise ValueError(f'reduce_op="{reduce_op}" is not one of "sum", "avg"')


def fallback(A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> torch.Tensor:
    """Implements ``fused_matmul_reduce_scatter`` with a collective."""
    check(A, B, reduce_op, scatter_dim, resolve(group_name).size())
    check_dtypes(A, [B])
    return _fallbacks.matmul_reduce_scatter(A, B, reduce_op, scatter_dim, group_name)


def fused(A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> torch.Tensor:
    """Implements ``fused_matmul_reduce_scatter`` through symmetric memory."""
    ranks = resolve(group_name).size()
    with rejecting(group_name, A.device):
        check(A, B, reduce_op, scatter_dim, ranks)
        check_dtypes(A, [B])
    product = described((*A.shape[:-1], B.shape[1]), A.dtype)
    call = f"fused_matmul_reduce_scatter(product {product}, {reduce_op}, dimension {scatter_dim})"
    compare(group_name, A.device, call)
    average = reduce_op == "avg"
    with torch.profiler.record_function("fused_matmul_reduce_scatter"):
        if scatter_dim == A.dim() - 1:
            return _last_dim(A, B, average, group_name, ranks)
        shape = _piece_shape(A.shape, B, scatter_dim, ranks)
        rows = rows_of(A, scatter_dim)
        multiply = native("_matmul_reduce_scatter", A)
        if multiply is not None:
            piece: torch.Tensor = multiply(rows, B, average, group_name)
            return packed(from_rows(piece, shape, scatter_dim))
        blocks = rows.chunk(ranks)
        parts = _exchanged(
            lambda rank, out: torch.mm(blocks[rank], B, out=out),
            rows.new_empty(rows.shape[0], B.shape[1]),
            group_name,
        )
        return _summed([from_rows(part, shape, scatter_dim) for part in parts], average)


def _last_dim(A: torch.Tensor, B: torch.Tensor, average: bool, group_name: str, ranks: int) -> torch.Tensor:
    rows, columns = rows_of(A, 0), B.chunk(ranks, dim=1)
    width = B.shape[1] // ranks
    parts = _exchanged(
        lambda rank, out: torch.mm(rows, columns[rank], out=out),
        rows.new_empty(rows.shape[0] * ranks, width),
        group_name,
    )
    return _summed([part.view(*A.shape[:-1], width) for part in parts], average)


def _piece_shape(shape: torch.Size | list[int], B: torch.Tensor, scatter_dim: int, ranks: int) -> list[int]:
    piece = [*shape[:-1], B.shape[1]]
    piece[scatter_dim] //= ranks
    return piece


def _exchanged(
    produce: Callable[[int, torch.Tensor], object], stacked: torch.Tensor, group_name: str
) -> tuple[torch.Tensor, ...]:
    """Returns the parts that all ranks produced for this one, in rank order, as views of ``stacked``."""
    produce_and_exchange(produce, stacked, group_name)
    return stacked.chunk(resolve(group_name).size())


def _summed(parts: list[torch.Tensor], average: bool) -> torch.Tensor:
    """Returns the sum or mean in the order given, at least in fp32, rounded once; contiguous."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype.is_floating_point and dtype not in _WIDE_DTYPES else dtype
    total = torch.empty(parts[0].shape, dtype=wide, device=parts[0].device)
    total.copy_(parts[0])
    for part in parts[1:]:
        total.add_(part if part.element_size() > 1 else part.to(wide))  # torch does not add 8-bit floats
    if average:
        total.div_(len(parts))
    return total.to(dtype)


def _scaled_arguments(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    ranks: int,
    output_shape: list[int] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``A`` and its scales in the dimensions of ``output_shape``, checked."""
    if A.dim() < 2:
        raise ValueError("A_shard must be a matrix")
    shape = [*A.shape[:-1], B.shape[-1]] if output_shape is None else list(output_shape)
    if not 0 <= scatter_dim_after_maybe_reshape < A.dim() - 1:
        raise ValueError("Invalid scatter dim for 2D tensor input to scaled_mm")
    if not 0 <= orig_scatter_dim < len(shape) - 1:
        raise ValueError("Invalid scatter dim for 3D+ output tensor")
    if B.dim() != 2:
        raise ValueError("B must be a matrix")
    _check_op(reduce_op)
    if A_scale.numel() != 1 and A_scale.shape != (*A.shape[:-1], 1):
        raise ValueError(
            "For row-wise scaling, the leading dims of A_scale must match the leading dims of A "
            f"(A shape: {A.shape}, A_scale shape: {A_scale.shape})"
        )
    # A gets the dimensions of the result back, so that a slice of the result corresponds to rows of A.
    A = A.reshape(*shape[:-1], A.shape[-1])
    check(A, B, reduce_op, orig_scatter_dim, ranks)
    return A, A_scale if A_scale.numel() == 1 else A_scale.reshape(*shape[:-1], 1)


def fallback_scaled(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: list[int] | None,
    bias: torch.Tensor | None = None,
    result_scale: torch.Tensor | None = None,
    out_dtype: Any = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Implements ``fused_scaled_matmul_reduce_scatter`` with a collective."""
    dims = (orig_scatter_dim, scatter_dim_after_maybe_reshape)
    ranks = resolve(group_name).size()
    A, A_scale = _scaled_arguments(A, B, A_scale, reduce_op, *dims, ranks, output_shape)
    matmul = ScaledMatmul(B, B_scale, bias, result_scale, dtype_of(out_dtype), use_fast_accum)
    return _fallbacks.scaled_matmul_reduce_scatter(A, A_scale, matmul, reduce_op, orig_scatter_dim, group_name)


def fused_scaled(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: list[int] | None,
    bias: torch.Tensor | None = None,
    result_scale: torch.Tensor | None = None,
    out_dtype: Any = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Implements ``fused_scaled_matmul_reduce_scatter`` through symmetric memory."""
    dims = (orig_scatter_dim, scatter_dim_after_maybe_reshape)
    ranks = resolve(group_name).size()
    with rejecting(group_name, A.device):
        A, A_scale = _scaled_arguments(A, B, A_scale, reduce_op, *dims, ranks, output_shape)
        matmul = ScaledMatmul(B, B_scale, bias, result_scale, dtype_of(out_dtype), use_fast_accum)
        matmul.check(A, A_scale)
    product = described((*A.shape[:-1], B.shape[1]), matmul.result_dtype(A))
    call = f"fused_scaled_matmul_reduce_scatter(product {product}, {reduce_op}, dimension {orig_scatter_dim})"
    compare(group_name, A.device, call)
    with torch.profiler.record_function("fused_scaled_matmul_reduce_scatter"):
        shape = _piece_shape(A.shape, B, orig_scatter_dim, ranks)
        rows = rows_of(A, orig_scatter_dim)
        blocks = rows.chunk(ranks)
        by_row = A_scale.numel() > 1
        scales = rows_of(A_scale, orig_scatter_dim).chunk(ranks) if by_row else [A_scale] * ranks
        parts = _exchanged(
            lambda rank, out: matmul.into(blocks[rank], scales[rank], out),
            rows.new_empty(rows.shape[0], B.shape[1], dtype=matmul.result_dtype(A)),
            group_name,
        )
        return _summed([from_rows(part, shape, orig_scatter_dim) for part in parts], reduce_op == "avg")

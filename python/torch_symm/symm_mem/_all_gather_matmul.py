"""All-gather of a matrix, and its products with other matrices."""

from __future__ import annotations

from typing import Any

import torch

from torch_symm.symm_mem import _fallbacks
from torch_symm.symm_mem._agreement import compare, described, rejecting
from torch_symm.symm_mem._groups import resolve
from torch_symm.symm_mem._layout import from_rows, rows_of
from torch_symm.symm_mem._native_operators import native
from torch_symm.symm_mem._pipeline import gather_and_consume
from torch_symm.symm_mem._scales import ScaledMatmul, ScaleMode, dtype_of, gather_mode


def check(A_shard: torch.Tensor, Bs: list[torch.Tensor], gather_dim: int, ranks: int) -> None:
    """Raises ``ValueError`` unless the product of the gathered ``A`` with each of ``Bs`` exists."""
    if A_shard.dim() < 2:
        raise ValueError("A_shard must be a matrix")
    if any(B.dim() != 2 for B in Bs):
        raise ValueError("B must be a matrix")
    if not 0 <= gather_dim < A_shard.dim():
        raise ValueError("Invalid gather_dim")
    depth = A_shard.shape[-1] * (ranks if gather_dim == A_shard.dim() - 1 else 1)
    for B in Bs:
        if B.shape[0] != depth:
            raise ValueError(f"A has {depth} columns over {ranks} ranks, but B has shape {tuple(B.shape)}")


def check_dtypes(A: torch.Tensor, Bs: list[torch.Tensor]) -> None:
    """Raises ``ValueError`` unless all have one dtype, before any rank waits for another."""
    for B in Bs:
        if A.dtype != B.dtype:
            raise ValueError(f"A is {A.dtype}, but B is {B.dtype}")


def fallback(
    A_shard: torch.Tensor, Bs: list[torch.Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Implements ``fused_all_gather_matmul`` with a collective."""
    check(A_shard, Bs, gather_dim, resolve(group_name).size())
    check_dtypes(A_shard, Bs)
    return _fallbacks.all_gather_matmul(A_shard, Bs, gather_dim, group_name, return_A)


def fused(
    A: torch.Tensor, Bs: list[torch.Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Implements ``fused_all_gather_matmul`` through symmetric memory."""
    ranks = resolve(group_name).size()
    with rejecting(group_name, A.device):
        check(A, Bs, gather_dim, ranks)
        check_dtypes(A, Bs)
    # Each rank has factors of its own. Without any, it uses another workspace.
    without = "" if Bs else ", no products"
    call = f"fused_all_gather_matmul({described(A.shape, A.dtype)}, dimension {gather_dim}{without})"
    compare(group_name, A.device, call)
    with torch.profiler.record_function("fused_all_gather_matmul"):
        if gather_dim == A.dim() - 1:
            return _last_dim(A, Bs, group_name, ranks, return_A)
        shape = list(A.shape)
        shape[gather_dim] *= ranks
        rows = rows_of(A, gather_dim)
        # The native operator needs a matrix to multiply.
        multiply = native("_all_gather_matmul", A) if Bs else None
        if multiply is not None:
            gathered, products = multiply(rows, Bs, group_name, return_A)
        else:
            gathered, products = _pipelined(rows, Bs, group_name, ranks, return_A)
        whole = from_rows(gathered, shape, gather_dim) if return_A else None
        return whole, [from_rows(product, shape, gather_dim) for product in products]


def _pipelined(
    rows: torch.Tensor, Bs: list[torch.Tensor], group_name: str, ranks: int, return_A: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    gathered = rows.new_empty(rows.shape[0] * ranks, rows.shape[1])
    products = [rows.new_empty(gathered.shape[0], B.shape[1]) for B in Bs]
    pieces = [product.chunk(ranks) for product in products]

    def multiply(parts: list[torch.Tensor], rank: int) -> None:
        for B, piece in zip(Bs, pieces, strict=True):
            torch.mm(parts[0], B, out=piece[rank])

    gather_and_consume([rows], multiply, [gathered], group_name, return_A)
    return gathered, products


def _last_dim(
    A_shard: torch.Tensor, Bs: list[torch.Tensor], group_name: str, ranks: int, return_A: bool
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Gathers columns, then multiplies once; the sum of the shards' products would be rounded once per rank."""
    rows = rows_of(A_shard, 0)
    whole = A_shard.new_empty(*A_shard.shape[:-1], A_shard.shape[-1] * ranks)
    columns = whole.view(rows.shape[0], rows.shape[1] * ranks).chunk(ranks, dim=1)
    landed = rows.new_empty(rows.shape[0] * ranks, rows.shape[1])

    def place(parts: list[torch.Tensor], rank: int) -> None:
        columns[rank].copy_(parts[0])

    gather_and_consume([rows], place, [landed], group_name, ag_out_needed=False)
    return whole if return_A else None, [torch.matmul(whole, B) for B in Bs]


def check_scaled(A_shard: torch.Tensor, matmuls: list[ScaledMatmul], gather_dim: int, ranks: int) -> None:
    """Checks like ``check``. Rejects the last dimension, because the shards of a row would need their own scales."""
    if A_shard.dim() > 1 and gather_dim == A_shard.dim() - 1:
        raise ValueError("Invalid gather_dim")
    check(A_shard, [matmul.B for matmul in matmuls], gather_dim, ranks)


def _scaled_matmuls(
    Bs: list[torch.Tensor],
    B_scales: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    result_scales: list[torch.Tensor | None],
    out_dtypes: list[Any],
    use_fast_accum: list[bool],
) -> list[ScaledMatmul]:
    lists: dict[str, list[Any]] = {
        "B_scales": B_scales,
        "biases": biases,
        "result_scales": result_scales,
        "out_dtypes": out_dtypes,
    }
    for name, values in {**lists, "use_fast_accum": use_fast_accum}.items():
        if len(values) != len(Bs):
            raise ValueError(f"len({name}) must be the same as len(Bs)")
    dtypes = [dtype_of(code) for code in out_dtypes]
    parts = zip(Bs, B_scales, biases, result_scales, dtypes, use_fast_accum, strict=True)
    return [ScaledMatmul(*part) for part in parts]


def fallback_scaled(
    A_shard: torch.Tensor,
    Bs: list[torch.Tensor],
    A_scale: torch.Tensor,
    B_scales: list[torch.Tensor],
    gather_dim: int,
    group_name: str,
    biases: list[torch.Tensor | None],
    result_scales: list[torch.Tensor | None],
    out_dtypes: list[Any],
    use_fast_accum: list[bool],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Implements ``fused_all_gather_scaled_matmul`` with collectives."""
    matmuls = _scaled_matmuls(Bs, B_scales, biases, result_scales, out_dtypes, use_fast_accum)
    ranks = resolve(group_name).size()
    check_scaled(A_shard, matmuls, gather_dim, ranks)
    mode = gather_mode(A_shard, A_scale, gather_dim, ranks)
    return _fallbacks.all_gather_scaled_matmul(A_shard, A_scale, matmuls, gather_dim, group_name, mode)


def fused_scaled(
    A: torch.Tensor,
    Bs: list[torch.Tensor],
    A_scale: torch.Tensor,
    B_scales: list[torch.Tensor],
    gather_dim: int,
    group_name: str,
    biases: list[torch.Tensor | None],
    result_scales: list[torch.Tensor | None],
    out_dtypes: list[Any],
    use_fast_accum: list[bool],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Implements ``fused_all_gather_scaled_matmul`` through symmetric memory."""
    ranks = resolve(group_name).size()
    with rejecting(group_name, A.device):
        matmuls = _scaled_matmuls(Bs, B_scales, biases, result_scales, out_dtypes, use_fast_accum)
        check_scaled(A, matmuls, gather_dim, ranks)
        mode = gather_mode(A, A_scale, gather_dim, ranks)
        for matmul in matmuls:
            matmul.check(A, A_scale)
    scaled_by = f"scales of {A_scale.dtype} for {mode.value}"
    call = f"fused_all_gather_scaled_matmul({described(A.shape, A.dtype)}, dimension {gather_dim}, {scaled_by})"
    compare(group_name, A.device, call)
    with torch.profiler.record_function("fused_all_gather_scaled_matmul"):
        shape = list(A.shape)
        shape[gather_dim] *= ranks
        rows = rows_of(A, gather_dim)
        scales = A_scale if mode is ScaleMode.TENSOR else rows_of(A_scale, gather_dim)
        gathered = rows.new_empty(rows.shape[0] * ranks, rows.shape[1])
        results = [
            rows.new_empty(gathered.shape[0], matmul.B.shape[1], dtype=matmul.result_dtype(A)) for matmul in matmuls
        ]
        pieces = [result.chunk(ranks) for result in results]

        def multiply(parts: list[torch.Tensor], rank: int) -> None:
            part, scale = parts
            for matmul, piece in zip(matmuls, pieces, strict=True):
                matmul.into(part, scale, piece[rank])

        if mode is ScaleMode.SHARDED_ROWS:
            all_scales = scales.new_empty(scales.shape[0] * ranks, 1)
            gather_and_consume([rows, scales], multiply, [gathered, all_scales], group_name)
        else:
            scale_of = [scales] * ranks if mode is ScaleMode.TENSOR else scales.chunk(ranks)
            gather_and_consume(
                [rows], lambda parts, rank: multiply([*parts, scale_of[rank]], rank), [gathered], group_name
            )
        whole = from_rows(gathered, shape, gather_dim)
        return whole, [from_rows(result, shape, gather_dim) for result in results]

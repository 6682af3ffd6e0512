"""Computes the fused operators with a collective and a separate matrix product.

Used under ``_test_mode``, and on meta tensors for the shapes and strides of the results.
"""

from __future__ import annotations

import torch

from torch_symm.symm_mem._groups import resolve
from torch_symm.symm_mem._layout import packed, rows_of
from torch_symm.symm_mem._scales import ScaledMatmul, ScaleMode

functional = torch.ops._c10d_functional


def all_gather_matmul(
    A_shard: torch.Tensor, Bs: list[torch.Tensor], gather_dim: int, group_name: str, return_A: bool
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Implements ``fused_all_gather_matmul`` for checked arguments."""
    A = _gathered(A_shard, gather_dim, group_name)
    if gather_dim == A.dim() - 1:
        A = packed(A)
        return A if return_A else None, [torch.matmul(A, B) for B in Bs]
    # `matmul` copies neither operand, because `_gathered` returns memory in which `gather_dim` is outermost.
    whole = A.movedim(gather_dim, 0)
    return A if return_A else None, [torch.matmul(whole, B).movedim(0, gather_dim) for B in Bs]


def all_gather_scaled_matmul(
    A_shard: torch.Tensor,
    A_scale: torch.Tensor,
    matmuls: list[ScaledMatmul],
    gather_dim: int,
    group_name: str,
    mode: ScaleMode,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Implements ``fused_all_gather_scaled_matmul`` for checked arguments."""
    A = _gathered(A_shard, gather_dim, group_name)
    if mode is ScaleMode.SHARDED_ROWS:
        A_scale = _gathered(A_scale, gather_dim, group_name)
    whole = A.movedim(gather_dim, 0)
    scales = A_scale if mode is ScaleMode.TENSOR else rows_of(A_scale, gather_dim)
    results = [matmul(whole.flatten(0, -2), scales) for matmul in matmuls]
    return A, [result.view(*whole.shape[:-1], result.shape[1]).movedim(0, gather_dim) for result in results]


def matmul_reduce_scatter(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> torch.Tensor:
    """Implements ``fused_matmul_reduce_scatter`` for checked arguments."""
    return _scattered(torch.matmul(A, B), reduce_op, scatter_dim, group_name)


def scaled_matmul_reduce_scatter(
    A: torch.Tensor, A_scale: torch.Tensor, matmul: ScaledMatmul, reduce_op: str, scatter_dim: int, group_name: str
) -> torch.Tensor:
    """Implements the scaled variant; ``A`` has the dimensions of the result before it is scattered."""
    scales = A_scale if A_scale.numel() == 1 else rows_of(A_scale, 0)
    product = matmul(A.flatten(0, -2).contiguous(), scales).view(*A.shape[:-1], matmul.B.shape[1])
    return _scattered(product, reduce_op, scatter_dim, group_name)


def _gathered(shard: torch.Tensor, dim: int, group_name: str) -> torch.Tensor:
    """Concatenates the shards along ``dim``, which is outermost in memory."""
    ranks = resolve(group_name).size()
    whole = functional.all_gather_into_tensor(shard.movedim(dim, 0).contiguous(), ranks, group_name)
    gathered: torch.Tensor = functional.wait_tensor(whole)
    return gathered.movedim(0, dim)


def _scattered(whole: torch.Tensor, reduce_op: str, dim: int, group_name: str) -> torch.Tensor:
    """Returns this rank's piece of ``dim`` of the sum or mean over ranks; contiguous."""
    ranks = resolve(group_name).size()
    piece = functional.reduce_scatter_tensor(whole.movedim(dim, 0).contiguous(), reduce_op, ranks, group_name)
    scattered: torch.Tensor = functional.wait_tensor(piece)
    return packed(scattered.movedim(0, dim))

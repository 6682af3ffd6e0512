"""Orders of a tensor's elements in memory."""

from __future__ import annotations

import torch


def restride_A_shard_for_fused_all_gather_matmul(t: torch.Tensor, gather_dim: int) -> torch.Tensor:
    """Returns ``t`` in the memory order that ``fused_all_gather_matmul`` need not copy: ``gather_dim`` outermost."""
    return outermost(t, gather_dim)


def restride_A_for_fused_matmul_reduce_scatter(t: torch.Tensor, scatter_dim: int) -> torch.Tensor:
    """Returns ``t`` in the order that ``fused_matmul_reduce_scatter`` need not copy: ``scatter_dim`` outermost."""
    return outermost(t, scatter_dim)


def make_contiguous_for_perm(t: torch.Tensor, perm: list[int]) -> torch.Tensor:
    """Returns ``t`` with strides such that ``t.permute(perm)`` is contiguous; copies only if necessary.

    Args:
        t: any tensor.
        perm: its dimensions in their order in memory, the outermost first.
    """
    inverse = sorted(range(len(perm)), key=perm.__getitem__)
    return t.permute(perm).contiguous().permute(inverse)


def outermost(t: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns ``t`` with strides such that ``t.movedim(dim, 0)`` is contiguous; copies only if necessary.

    Args:
        t: any tensor with a dimension ``dim``.
        dim: which dimension is to be the outermost in memory; negative ones count from the last.
    """
    return t.movedim(dim, 0).contiguous().movedim(0, dim)


def packed(t: torch.Tensor) -> torch.Tensor:
    """Returns ``t`` with the strides of a new tensor; ``contiguous`` keeps the strides of dimensions of size one."""
    return t.contiguous().view(-1).view(t.shape)


def rows_of(t: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns a contiguous matrix with the last dimension of ``t`` as columns and the rest as rows, ``dim`` first."""
    return t.movedim(dim, 0).flatten(0, -2).contiguous()


def from_rows(rows: torch.Tensor, shape: list[int], dim: int) -> torch.Tensor:
    """Inverts ``rows_of(…, dim)``: returns a view of ``rows`` with ``shape`` except for the last dimension."""
    outer = [shape[dim], *shape[:dim], *shape[dim + 1 : -1]]
    return rows.view(*outer, rows.shape[1]).movedim(0, dim)

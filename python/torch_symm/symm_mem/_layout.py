"""Orders of a tensor's elements in memory."""

from __future__ import annotations

import torch


def restride_A_shard_for_fused_all_gather_matmul(t: torch.Tensor, gather_dim: int) -> torch.Tensor:
    """Returns ``t`` in the order of memory that ``fused_all_gather_matmul`` need not copy: ``gather_dim`` outermost."""
    return outermost(t, gather_dim)


def restride_A_for_fused_matmul_reduce_scatter(t: torch.Tensor, scatter_dim: int) -> torch.Tensor:
    """Returns ``t`` as ``fused_matmul_reduce_scatter`` need not copy it: with ``scatter_dim`` outermost in memory."""
    return outermost(t, scatter_dim)


def make_contiguous_for_perm(t: torch.Tensor, perm: list[int]) -> torch.Tensor:
    """Returns ``t`` with strides such that ``t.permute(perm)`` is contiguous; a copy unless it is so already.

    Args:
        t: any tensor.
        perm: its dimensions in the order in which they are to lie in memory, the outermost first.
    """
    inverse = sorted(range(len(perm)), key=perm.__getitem__)
    return t.permute(perm).contiguous().permute(inverse)


def outermost(t: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns ``t`` with strides such that ``t.movedim(dim, 0)`` is contiguous; a copy unless it is so already.

    Args:
        t: any tensor with a dimension ``dim``.
        dim: which dimension is to be the outermost in memory; negative ones count from the last.
    """
    return t.movedim(dim, 0).contiguous().movedim(0, dim)


def packed(t: torch.Tensor) -> torch.Tensor:
    """``t`` with the strides of a new tensor; ``contiguous`` leaves those of dimensions of size one as they are."""
    return t.contiguous().view(-1).view(t.shape)


def rows_of(t: torch.Tensor, dim: int) -> torch.Tensor:
    """A matrix with the last dimension of ``t`` as columns and the rest as rows, ``dim`` outermost; contiguous."""
    return t.movedim(dim, 0).flatten(0, -2).contiguous()


def from_rows(rows: torch.Tensor, shape: list[int], dim: int) -> torch.Tensor:
    """What ``rows_of(…, dim)`` makes ``rows`` of: of ``shape`` but for the last dimension. A view."""
    outer = [shape[dim], *shape[:dim], *shape[dim + 1 : -1]]
    return rows.view(*outer, rows.shape[1]).movedim(0, dim)

"""Scatter and broadcast along one dimension of a mesh; by default the first rank of the dimension is the source."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import Work
    from torch.distributed.device_mesh import DeviceMesh


def mesh_scatter(
    output: torch.Tensor,
    scatter_list: list[torch.Tensor],
    mesh: DeviceMesh,
    mesh_dim: int = 0,
    async_op: bool = False,
    *,
    group_src: int = 0,
) -> Work | None:
    """Sends tensor ``i`` of the source's ``scatter_list`` to rank ``i`` of the mesh dimension, into ``output``.

    On the mesh ``[[0, 1], [2, 3]]`` and ``mesh_dim=1``, rank 0 serves ranks 0 and 1, rank 2 serves ranks 2 and 3.

    Args:
        output: of the shape of the received tensor, on any device of the mesh's type.
        scatter_list: one tensor per rank of the mesh dimension; ignored on the other ranks.
        mesh, mesh_dim: the mesh, and its dimension whose ranks form the group.
        async_op: returns at once, with a work.
        group_src: the source, counted within the mesh dimension.

    Returns:
        A work to wait for if ``async_op``. ``None`` for a tensor on the meta device: nothing moves.

    Raises:
        ValueError: the source's list is missing or of another length.
    """
    if output.is_meta:
        return None
    group = mesh.get_group(mesh_dim)
    mine = scatter_list if dist.get_rank(group) == group_src else None
    work: Work | None = dist.scatter(output, mine, group=group, async_op=async_op, group_src=group_src)
    return work


def mesh_broadcast(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    mesh_dim: int = 0,
    async_op: bool = False,
    *,
    group_src: int = 0,
) -> Work | None:
    """Copies the source's ``tensor`` into the ``tensor`` of every rank of the mesh dimension.

    On the mesh ``[[0, 1], [2, 3]]`` and ``mesh_dim=1``, rank 1 gets rank 0's tensor and rank 3 gets rank 2's.

    Args:
        tensor: of the same shape and dtype on all ranks.
        mesh, mesh_dim: the mesh, and its dimension whose ranks form the group.
        async_op: returns at once, with a work.
        group_src: the source, counted within the mesh dimension.

    Returns:
        A work to wait for if ``async_op``. ``None`` for a tensor on the meta device: nothing moves.
    """
    if tensor.is_meta:
        return None
    group = mesh.get_group(mesh_dim)
    work: Work | None = dist.broadcast(tensor, group=group, async_op=async_op, group_src=group_src)
    return work

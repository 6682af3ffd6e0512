"""DTensor's redistribution from one ``Shard`` to another over symm groups.

On CPU, torch gathers the whole tensor on every rank and drops most of it (``_collective_utils``), and on every device
it pads uneven shards first. Backends have no hook for this, so one method of ``Shard`` is replaced: it checks whether
the group of the mesh dimension is symm, and calls torch's own method if not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed._functional_collectives as funcol

from torch_symm._torch_compat import backend_of, group_name
from torch_symm.dtensor._alltoall import shard_dim_alltoall

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def replace_method(module: ModuleType) -> Callable[[], None]:
    """Changes ``torch.distributed.tensor.placement_types``; returns a function that undoes it."""
    shard = module.Shard
    theirs = shard._to_new_shard_dim

    def to_new_shard_dim(
        self: Any,
        local_tensor: torch.Tensor,
        mesh: DeviceMesh,
        mesh_dim: int,
        current_logical_shape: list[int],
        new_shard_dim: int,
    ) -> torch.Tensor:
        same: torch.Tensor
        if mesh.get_coordinate() is None or not _is_symm(mesh, mesh_dim):
            same = theirs(self, local_tensor, mesh, mesh_dim, current_logical_shape, new_shard_dim)
            return same
        if funcol._are_we_tracing():
            # Do as torch does on CUDA: padding gives all ranks the same graph, and compilers know torch's operator.
            shape, ranks, rank = current_logical_shape, mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim)
            padded = shard._pad_for_new_shard_dim(shape, local_tensor, ranks, self.dim, new_shard_dim)
            name = group_name(mesh, mesh_dim)
            moved = torch.ops._dtensor.shard_dim_alltoall(padded, self.dim, new_shard_dim, name)
            same = shard._unpad_for_new_shard_dim(shape, moved, ranks, self.dim, new_shard_dim, rank)
            return same
        size = current_logical_shape[self.dim]
        return shard_dim_alltoall(local_tensor, self.dim, new_shard_dim, mesh, mesh_dim, gather_size=size)

    shard._to_new_shard_dim = to_new_shard_dim

    def undo() -> None:
        # If other code has replaced our function since, that replacement stays, and may still call ours.
        if shard._to_new_shard_dim is to_new_shard_dim:
            shard._to_new_shard_dim = theirs

    return undo


def count_operator(module: ModuleType) -> Callable[[], None]:
    """Makes ``CommDebugMode`` count our operator as torch's operator for CUDA; returns a function that undoes it."""
    ours = torch.ops.torch_symm.shard_dim_alltoall
    module.NATIVE_TO_PY_MAPPING[ours] = torch.ops._dtensor.shard_dim_alltoall
    return lambda: module.NATIVE_TO_PY_MAPPING.pop(ours, None)


def _is_symm(mesh: DeviceMesh, mesh_dim: int) -> bool:
    """Returns true if the ranks of this dimension use symm; false if torch simulates ranks in one process."""
    local = sys.modules.get("torch.distributed._local_tensor")
    if local is not None and local.local_tensor_mode() is not None:
        return False
    try:
        backend = backend_of(mesh.get_group(mesh_dim), mesh.device_type)
    except RuntimeError:  # the group has no backend for the device
        return False
    return bool(backend.name() == "symm")

"""Backend support for DTensor: its collectives, and what they cost.

Moving shards between dimensions, scatter, broadcast, padding (``docs/guide/dtensor-costs.md``): the functions have the
names and arguments of ``torch.distributed.tensor._collective_utils`` and return the same bits. They support groups of
any backend. DTensors whose mesh has symm groups use :func:`shard_dim_alltoall` automatically, from the first symm group
of a process on; :func:`uninstall_redistribute` ends that.

Prices of collectives and of redistributions (``docs/design/cost-model.md``): in µs, measured if a profile of this
machine exists. DTensor uses them after :func:`install_cost_model`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch_symm._dtensor import install_redistribute, uninstall_redistribute
from torch_symm.tensor._alltoall import shard_dim_alltoall
from torch_symm.tensor._mesh import mesh_broadcast, mesh_scatter
from torch_symm.tensor._shards import (
    check_tensor_meta,
    fill_empty_tensor_to_shards,
    pad_tensor,
    spec_to_bytes,
    unpad_tensor,
)

if TYPE_CHECKING:
    from torch_symm.tensor._cost import (
        MeshTopoInfo,
        all_to_all_cost,
        allgather_cost,
        allreduce_cost,
        broadcast_cost,
        reduce_scatter_cost,
    )
    from torch_symm.tensor._install import install_cost_model, uninstall_cost_model
    from torch_symm.tensor._paths import Explanation, Step, explain_redistribute, redistribute_cost

__all__ = [
    "Explanation",
    "MeshTopoInfo",
    "Step",
    "all_to_all_cost",
    "allgather_cost",
    "allreduce_cost",
    "broadcast_cost",
    "check_tensor_meta",
    "explain_redistribute",
    "fill_empty_tensor_to_shards",
    "install_cost_model",
    "install_redistribute",
    "mesh_broadcast",
    "mesh_scatter",
    "pad_tensor",
    "redistribute_cost",
    "reduce_scatter_cost",
    "shard_dim_alltoall",
    "spec_to_bytes",
    "uninstall_cost_model",
    "uninstall_redistribute",
    "unpad_tensor",
]

#: The names that need all of DTensor, by module: DTensor imports this package while it is being imported itself.
_PRICES = {
    "Explanation": "_paths",
    "MeshTopoInfo": "_cost",
    "Step": "_paths",
    "all_to_all_cost": "_cost",
    "allgather_cost": "_cost",
    "allreduce_cost": "_cost",
    "broadcast_cost": "_cost",
    "explain_redistribute": "_paths",
    "install_cost_model": "_install",
    "redistribute_cost": "_paths",
    "reduce_scatter_cost": "_cost",
    "uninstall_cost_model": "_install",
}


if not TYPE_CHECKING:  # with it a misspelt name would be of any type

    def __getattr__(name: str) -> Any:
        if name not in _PRICES:
            raise AttributeError(f"module 'torch_symm.tensor' has no attribute {name!r}")
        return getattr(import_module(f"torch_symm.tensor.{_PRICES[name]}"), name)

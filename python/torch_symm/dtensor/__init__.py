"""Backend support for DTensor: its collectives, and what they cost.

The functions that move shards between dimensions, scatter, broadcast and pad (``docs/guide/dtensor-costs.md``) have the
names and arguments of ``torch.distributed.tensor._collective_utils`` and return the same bits. They support groups of
any backend. DTensors whose mesh has symm groups use :func:`shard_dim_alltoall` automatically, from the first symm group
of a process on; :func:`disable_redistribute` ends that.

Prices of collectives and of redistributions (``docs/design/cost-model.md``) are in µs, and measured if a profile
of this machine exists. DTensor uses them after :func:`enable_cost_model`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch_symm._dtensor import disable_redistribute, enable_redistribute
from torch_symm.dtensor._alltoall import shard_dim_alltoall
from torch_symm.dtensor._mesh import mesh_broadcast, mesh_scatter
from torch_symm.dtensor._shards import (
    check_tensor_meta,
    fill_empty_tensor_to_shards,
    pad_tensor,
    spec_to_bytes,
    unpad_tensor,
)

if TYPE_CHECKING:
    from torch_symm.dtensor._cost import (
        MeshTopoInfo,
        all_to_all_cost,
        allgather_cost,
        allreduce_cost,
        broadcast_cost,
        reduce_scatter_cost,
    )
    from torch_symm.dtensor._install import disable_cost_model, enable_cost_model
    from torch_symm.dtensor._redistribute_cost import (
        RedistributePlan,
        RedistributeStep,
        explain_redistribute,
        redistribute_cost,
    )

__all__ = [
    "MeshTopoInfo",
    "RedistributePlan",
    "RedistributeStep",
    "all_to_all_cost",
    "allgather_cost",
    "allreduce_cost",
    "broadcast_cost",
    "check_tensor_meta",
    "disable_cost_model",
    "disable_redistribute",
    "enable_cost_model",
    "enable_redistribute",
    "explain_redistribute",
    "fill_empty_tensor_to_shards",
    "mesh_broadcast",
    "mesh_scatter",
    "pad_tensor",
    "redistribute_cost",
    "reduce_scatter_cost",
    "shard_dim_alltoall",
    "spec_to_bytes",
    "unpad_tensor",
]

#: The module of each name that needs all of DTensor, loaded on access, because DTensor's import imports this package.
_PRICES = {
    "RedistributePlan": "_redistribute_cost",
    "MeshTopoInfo": "_cost",
    "RedistributeStep": "_redistribute_cost",
    "all_to_all_cost": "_cost",
    "allgather_cost": "_cost",
    "allreduce_cost": "_cost",
    "broadcast_cost": "_cost",
    "explain_redistribute": "_redistribute_cost",
    "enable_cost_model": "_install",
    "redistribute_cost": "_redistribute_cost",
    "reduce_scatter_cost": "_cost",
    "disable_cost_model": "_install",
}


if not TYPE_CHECKING:  # otherwise type checkers would accept misspelt names

    def __getattr__(name: str) -> Any:
        if name not in _PRICES:
            raise AttributeError(f"module 'torch_symm.dtensor' has no attribute {name!r}")
        return getattr(import_module(f"torch_symm.dtensor.{_PRICES[name]}"), name)

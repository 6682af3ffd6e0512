"""Prices of meshes that span nodes: a dimension across nodes has the price of the network."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from launch import on_nodes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

#: The prices come from given links, not from the current node.
ENVIRONMENT = {"SYMM_COST_PROFILE": "0"}


@on_nodes(2, 2, env=ENVIRONMENT)
def test_a_dimension_across_nodes_has_the_price_of_the_network() -> None:
    from torch_symm import dtensor

    os.environ["LOCAL_WORLD_SIZE"] = "2"
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    topo = dtensor.MeshTopoInfo.build_from_mesh(mesh)
    for cost in (
        dtensor.allgather_cost,
        dtensor.allreduce_cost,
        dtensor.reduce_scatter_cost,
        dtensor.all_to_all_cost,
        dtensor.broadcast_cost,
    ):
        for size in (8, 4096, 1 << 20, 64 << 20):
            assert cost(size, topo, 0) > 3 * cost(size, topo, 1), (cost, size)
    assert [topo.price("all_reduce", 1 << 20, dim)[1] for dim in (0, 1)] == ["two_level", "staged"]
    # Two ranks of each node share the network link: 6.6 µs, two trips, and a megabyte for each of them.
    fast = dtensor.MeshTopoInfo.build_from_mesh(mesh, network=(12.5, 10.0))
    assert dtensor.allreduce_cost(2**-10, fast, 0) == pytest.approx(6.6 + 20 + 2 * (1 << 20) / 12500)
    assert dtensor.allreduce_cost(2**-10, fast, 1) == dtensor.allreduce_cost(2**-10, topo, 1)
    # One dimension over all ranks, half of them on each node; a node has the price of two ranks.
    flat = init_device_mesh("cpu", (4,))
    whole = dtensor.MeshTopoInfo.build_from_mesh(flat, network=(12.5, 10.0))
    inner = dtensor.allreduce_cost(2**-10, topo, 1)
    assert dtensor.allreduce_cost(2**-10, whole, 0) == pytest.approx(inner + 6.6 + 20 + (1 << 20) / 12500)


@on_nodes(2, 2, env=ENVIRONMENT)
def test_plans_prefer_the_dimension_inside_a_node() -> None:
    from torch_symm import dtensor

    os.environ["LOCAL_WORLD_SIZE"] = "2"
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    whole = torch.arange(256 * 256.0).reshape(256, 256)

    def spec(*placements: Shard | Replicate) -> DTensor:
        return distribute_tensor(whole, mesh, placements)

    full = spec(Replicate(), Replicate())._spec
    across, inside = (spec(*placed)._spec for placed in ((Shard(0), Replicate()), (Replicate(), Shard(0))))
    assert dtensor.redistribute_cost(across, full) > 3 * dtensor.redistribute_cost(inside, full)
    dtensor.enable_cost_model(network=(1.25, 100.0))
    try:
        # The operands differ only in their shards within a node, so one of them is redistributed within the nodes.
        moved = spec(Shard(0), Shard(1)) + spec(Shard(0), Shard(0))
        assert moved.placements[0] == Shard(0), f"what lies on other nodes stays there: {moved.placements}"
        assert torch.equal(moved.full_tensor(), whole + whole)
        wired = dtensor.MeshTopoInfo.build_from_mesh(mesh)
        assert wired.mesh_dim_bandwidth[0] == 1.25 and wired.mesh_dim_latency[0] == 100.0
    finally:
        dtensor.disable_cost_model()
    with pytest.raises(ValueError, match="GB/s must be above 0"):
        dtensor.enable_cost_model(network=(0.0, 1.0))
    assert dtensor.MeshTopoInfo.build_from_mesh(mesh).mesh_dim_latency[0] != 100.0
    dist.barrier()

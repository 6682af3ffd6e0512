"""``tune --inter-node`` and prices of meshes across nodes.

All ranks get the same result, groups use the profile of their first rank, and a dimension across nodes has the price of
the network.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch_symm
from launch import on_nodes, run_nodes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch_symm import dtensor
from torch_symm.tools.tune import inter_node, profile

FOUND = {
    "date": "2026-11-24T00:00:00+00:00",
    "nodes": 2,
    "backend": "gloo",
    "gb_per_s": 0.5,
    "us": 90.0,
    "rails": [{"rails": 1, "gb_per_s": 0.5, "us": 90.0}],
    "thresholds": {"multi_rail_bytes": 2 << 20, "chunk_bytes": 64 << 10, "gather_bytes": 0},
}


def find(rank: int, world_size: int, path: str) -> dict[str, Any]:
    found = inter_node.measure(0.5, "cpu", around=(16 << 10, 128 << 10), turns=(256 << 10,))
    placed = inter_node.layout()
    for _ in range(2):
        # The second write keeps the content of the file.
        inter_node.write(placed, found, Path(path), "cpu")
    with patch.object(profile, "output_error", lambda _: "no room"):
        assert len(inter_node.output_errors(placed, None, "cpu")) == len(placed.nodes)
        assert inter_node.output_errors(placed, Path(path), "cpu") == []
    dist.barrier()
    return found


@pytest.mark.parametrize("layout", [(2, 2), (1, 1, 1)], ids=str)
def test_all_ranks_find_the_same_and_it_is_written(layout: tuple[int, ...], tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    results = run_nodes(find, layout, str(path))
    assert all(found == results[0] for found in results)
    assert json.loads(path.read_text())["inter_node"] == results[0]
    found = results[0]
    assert found["nodes"] == len(layout) and [rails["rails"] for rails in found["rails"]] == [1, 2][: min(layout)]
    assert all(rails["gb_per_s"] > 0 and rails["us"] > 0 for rails in found["rails"])
    thresholds = found["thresholds"]
    kind = inter_node.KINDS["cpu"]
    assert thresholds["chunk_bytes"] in kind.pieces
    if min(layout) == 1:
        assert thresholds["multi_rail_bytes"] == kind.usual["multi_rail_bytes"], "there is one"
    if len(layout) == 2:
        assert thresholds["gather_bytes"] == kind.usual["gather_bytes"], "two nodes always gather"


def sent(rank: int, world_size: int) -> int:
    """Number of transfers on this rank's rail in a call of one megabyte."""
    before = torch_symm.stats()["inter_node"]["default"].get(f"gloo rail {rank % 2}", {}).get("transfers", 0)
    tensor = torch.full((1 << 18,), float(rank))
    dist.all_reduce(tensor)
    assert bool((tensor == 6).all())
    after = torch_symm.stats()["inter_node"]["default"].get(f"gloo rail {rank % 2}", {}).get("transfers", 0)
    return after - before


def test_groups_go_by_the_profile_of_their_first_rank(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile.write(path, {**profile.bare(profile.key("cpu", 2), {}), "inter_node": FOUND})
    own, none = {"SYMM_COST_PROFILE": str(path)}, {"SYMM_COST_PROFILE": "0"}
    # One rail, in chunks of 64 KB; the header comes first.
    assert list(run_nodes(sent, (2, 2), settings=[own, none, none, none])) == [17, 0, 17, 0]
    usual = run_nodes(sent, (2, 2), settings=[none, own, own, own])
    assert usual[1] == usual[3] == usual[0] - 1 > 0, "what other ranks have measured does not count"


def test_a_faulty_network_is_refused_by_name(tmp_path: Path) -> None:
    for change, words in (
        ({"thresholds": {**FOUND["thresholds"], "chunk_bytes": 100}}, "inter_node: chunk_bytes is 100 bytes"),
        ({"us": -1.0}, "inter_node: 0.5 GB/s and -1 µs are no speed of a wire"),
    ):
        written = {**profile.bare(profile.key("cpu", 2), {}), "inter_node": {**FOUND, **change}}
        with pytest.raises(torch_symm.SymmConfigError, match=words):
            profile.write(tmp_path / "profile.json", written)
    assert not (tmp_path / "profile.json").exists()


def test_meshes_across_nodes_are_priced_by_the_measured_wire(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile.write(path, {**profile.bare(profile.key("cpu", 2), {}), "inter_node": FOUND})
    prices = torch_symm._native.load()._open_cost_model("cpu", [2, 2], 2, 2, "measured", profile=str(path).encode())
    assert (prices.gb_per_s[0], prices.us[0]) == (0.5, 90.0) and prices.gb_per_s[1] != 0.5


def test_a_profile_keeps_what_was_measured_between_nodes(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    assert profile.inter_node(path) == {}
    profile.write(path, {**profile.bare(profile.key("cpu", 2), {}), "inter_node": FOUND})
    assert profile.inter_node(path) == {"inter_node": FOUND}


@on_nodes(2, 2, env={"SYMM_COST_PROFILE": "0"})
def test_a_dimension_across_nodes_has_the_price_of_the_network() -> None:
    # The prices come from given links, not from the current node.
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
    # 6.6 µs for any call, 10 µs for each of two network latencies, and the time for 2 MiB on the link of the node: each
    # of its two ranks sends 1 MiB.
    fast = dtensor.MeshTopoInfo.build_from_mesh(mesh, network=(12.5, 10.0))
    assert dtensor.MeshTopoInfo.build_from_mesh(mesh, network=[12.5, 10.0]) is fast
    assert dtensor.allreduce_cost(2**-10, fast, 0) == pytest.approx(6.6 + 20 + 2 * (1 << 20) / 12500)
    assert dtensor.allreduce_cost(2**-10, fast, 1) == dtensor.allreduce_cost(2**-10, topo, 1)
    # One dimension over all ranks, half of them on each node; a node has the price of two ranks.
    flat = init_device_mesh("cpu", (4,))
    whole = dtensor.MeshTopoInfo.build_from_mesh(flat, network=(12.5, 10.0))
    inner = dtensor.allreduce_cost(2**-10, topo, 1)
    assert dtensor.allreduce_cost(2**-10, whole, 0) == pytest.approx(inner + 6.6 + 20 + (1 << 20) / 12500)
    # Plans prefer the dimension inside a node.
    values = torch.arange(256 * 256.0).reshape(256, 256)

    def spec(*placements: Shard | Replicate) -> DTensor:
        return distribute_tensor(values, mesh, placements)

    full = spec(Replicate(), Replicate())._spec
    across, inside = (spec(*placed)._spec for placed in ((Shard(0), Replicate()), (Replicate(), Shard(0))))
    assert dtensor.redistribute_cost(across, full) > 3 * dtensor.redistribute_cost(inside, full)
    dtensor.enable_cost_model(network=[1.25, 100.0])
    try:
        # The operands differ only in their shards within a node, so one of them is redistributed within the nodes.
        moved = spec(Shard(0), Shard(1)) + spec(Shard(0), Shard(0))
        assert moved.placements[0] == Shard(0), f"what lies on other nodes stays there: {moved.placements}"
        assert torch.equal(moved.full_tensor(), values + values)
        wired = dtensor.MeshTopoInfo.build_from_mesh(mesh)
        assert wired.mesh_dim_bandwidth[0] == 1.25 and wired.mesh_dim_latency[0] == 100.0
    finally:
        dtensor.disable_cost_model()
    with pytest.raises(ValueError, match="GB/s must be above 0"):
        dtensor.enable_cost_model(network=(0.0, 1.0))
    assert dtensor.MeshTopoInfo.build_from_mesh(mesh).mesh_dim_latency[0] != 100.0
    dist.barrier()

"""``tune --inter-node``: all ranks get the same result, and groups use the profile of their first rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_symm
from launch import run_nodes
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
    for _ in range(2):
        # Existing content is kept.
        inter_node.write(found, Path(path), "cpu")
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

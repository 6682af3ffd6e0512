"""Prices of collectives and redistributions: torch's to the last digit, ours from measurements."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_symm
from ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import _collective_utils as torchs
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch_symm import dtensor as ours
from torch_symm._native import load
from torch_symm.dtensor import _cost

SIZES = [0, 1, 3, 8, 1000, 4097, 65536, 10**6 + 1, 64 << 20, 3 * 10**9]
SHAPES: list[tuple[tuple[int, ...], tuple[str, ...]]] = [((4,), ("a",)), ((2, 2), ("a", "b")), ((1, 4), ("a", "b"))]


def specs(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]) -> DTensorSpec:
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensorSpec(mesh, placements, TensorMeta(torch.Size(shape), strides, torch.float32))


@pytest.mark.ranks(4)
def test_torchs_constants_give_torchs_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    finite, draw = 0, random.Random(7)
    for shape, names in SHAPES:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for per_node in (1, 2, 4, 8):
            # For CPUs, torch assumes one device per node. The numbers of devices set here are possible for meshes of
            # GPUs.
            hosts = SimpleNamespace(num_devices_per_host=lambda _device_type, count=per_node: count)
            with monkeypatch.context() as patch:
                for module in (torchs, _cost):
                    patch.setattr(module, "_mesh_resources", hosts)
                torchs.MeshTopoInfo.build_from_mesh.cache_clear()
                _cost.forget()
                theirs = torchs.MeshTopoInfo.build_from_mesh(mesh)
                mine = ours.MeshTopoInfo.build_from_mesh(mesh, source="torch")
            assert mine.mesh_dim_devices == theirs.mesh_dim_devices
            assert mine.mesh_dim_bandwidth == theirs.mesh_dim_bandwidth
            assert mine.mesh_dim_latency == theirs.mesh_dim_latency
            for size, dim in itertools.product(SIZES, range(mesh.ndim)):
                gb = size / 1024 / 1024 / 1024
                for name in ("allgather_cost", "allreduce_cost", "reduce_scatter_cost"):
                    assert getattr(ours, name)(gb, mine, dim) == getattr(torchs, name)(gb, theirs, dim), name
                assert ours.all_to_all_cost(gb, mine, dim) == torchs.allgather_cost(gb, theirs, dim) + 1.0
                assert ours.broadcast_cost(gb, mine, dim) >= torchs.allgather_cost(gb, theirs, dim) or size == 0
        torchs.MeshTopoInfo.build_from_mesh.cache_clear()
        _cost.forget()
        # torch's formula over given links.
        given = [123.4] * mesh.ndim, [0.7] * mesh.ndim
        theirs = torchs.MeshTopoInfo(mesh, list(shape), *given)
        mine = ours.MeshTopoInfo(mesh, list(shape), *given, source="torch")
        assert ours.allreduce_cost(10**7 / 1024**3, mine, -1) == torchs.allreduce_cost(
            10**7 / 1024**3, theirs, mesh.ndim - 1
        )
        topo = ours.MeshTopoInfo.build_from_mesh(mesh, source="torch")
        kinds: list[Placement] = [Replicate(), Shard(0), Shard(1), Partial()]
        for _ in range(120):
            size = (draw.choice([4, 7, 1000]), draw.choice([8, 333]), 5)
            source, target = (specs(mesh, tuple(draw.choices(kinds, k=mesh.ndim)), size) for _ in range(2))
            theirs, mine = torchs.redistribute_cost(source, target), ours.redistribute_cost(source, target, topo)
            assert mine == theirs, (source, target)
            explained = ours.explain_redistribute(source, target, topo)
            assert explained.us == theirs
            finite += 0 < theirs < math.inf
    assert finite > 50


@pytest.mark.ranks(4)
def test_redistributions_are_priced_by_what_moves(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    other = init_device_mesh("cpu", (4,), mesh_dim_names=("c",))
    size = (64, 64, 64)
    rows, columns = specs(mesh, (Shard(0), Replicate()), size), specs(mesh, (Shard(1), Replicate()), size)
    full, partial = specs(mesh, (Replicate(), Replicate()), size), specs(mesh, (Partial(), Replicate()), size)
    topo = ours.MeshTopoInfo.build_from_mesh(mesh, "links")
    assert ours.redistribute_cost(rows, specs(other, (Shard(0),), size)) == math.inf
    assert ours.redistribute_cost(rows, partial) == math.inf
    assert "impossible" in str(ours.explain_redistribute(rows, partial))
    assert ours.redistribute_cost(rows, rows) == ours.redistribute_cost(full, rows) == 0.0
    # A rank holds half of 1 MiB.
    assert ours.redistribute_cost(rows, columns, topo) == ours.all_to_all_cost(2**-11, topo, 0)
    assert ours.redistribute_cost(rows, full, topo) == ours.allgather_cost(2**-10, topo, 0)
    assert ours.redistribute_cost(partial, full, topo) == ours.allreduce_cost(2**-10, topo, 0)
    assert ours.redistribute_cost(partial, columns, topo) == ours.reduce_scatter_cost(2**-10, topo, 0)
    explained = ours.explain_redistribute(rows, specs(mesh, (Shard(1), Shard(0)), size))
    text = str(explained)
    assert explained.us == sum(step.us for step in explained.steps) and "all_to_all" in text and "µs" in text
    assert {step.price_source for step in explained.steps if step.collective_us} <= {"links", "measured"}
    tensor = distribute_tensor(torch.zeros(size), mesh, [Shard(0), Replicate()])
    assert ours.explain_redistribute(tensor, columns).us == ours.redistribute_cost(rows, columns)
    unknown = DTensorSpec(mesh, (Shard(0), Replicate()))
    for words, call in (
        ("no tensor's shape", lambda: ours.redistribute_cost(unknown, columns)),
        *(("cannot be moved", lambda gb=gb: ours.allgather_cost(gb, topo, 0)) for gb in (-1.0, math.nan, math.inf)),
        ("mesh dimension 2 of 2", lambda: ours.allgather_cost(1, topo, 2)),
        ("no source of prices", lambda: ours.MeshTopoInfo.build_from_mesh(mesh, source="guess")),
        ("bandwidth must be above 0", lambda: ours.MeshTopoInfo(mesh, [2, 2], [0.0, 1.0], [1.0, 1.0])),
        ("2 bandwidths, but 1 latencies", lambda: ours.MeshTopoInfo(mesh, [2, 2], [1.0, 1.0], [1.0])),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def propagation_cost(mesh: DeviceMesh) -> float:
    """The highest finite cost that sharding propagation requests for a product."""
    from torch.distributed.tensor._ops import utils

    requested: list[float] = []
    left, right = (distribute_tensor(torch.ones(64, 64), mesh, [Shard(0)]) for _ in range(2))
    cost = utils.redistribute_cost

    def note(source: DTensorSpec, target: DTensorSpec) -> float:
        requested.append(cost(source, target))
        return requested[-1]

    utils.redistribute_cost = note
    try:
        left @ right
    finally:
        utils.redistribute_cost = cost
    return max(value for value in requested if value < math.inf)


@pytest.mark.ranks(2)
def test_installing_is_reversible_and_sharding_propagation_hears_of_it(world_size: int) -> None:
    from torch.distributed.tensor import _redistribute, _utils
    from torch.distributed.tensor._ops import utils

    places: list[tuple[Any, str]] = [
        (torchs, "redistribute_cost"),
        (utils, "redistribute_cost"),
        (_utils, "redistribute_cost"),
        (torchs, "one_step_redistribute_cost"),
        (_redistribute, "one_step_redistribute_cost"),
    ]
    before = [getattr(*place) for place in places]
    mesh = init_device_mesh("cpu", (world_size,))
    foreign = DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu")
    rows, full = (specs(mesh, (kind,), (512, 512)) for kind in (Shard(0), Replicate()))
    theirs, mine = torchs.redistribute_cost(rows, full), ours.redistribute_cost(rows, full)
    propagated = [propagation_cost(mesh)]
    assert theirs != mine
    ours.enable_cost_model()
    ours.enable_cost_model()
    assert all(getattr(*place) is not function for place, function in zip(places, before, strict=True))
    assert torchs.redistribute_cost(rows, full) == utils.redistribute_cost(rows, full) == mine
    assert _redistribute.one_step_redistribute_cost(rows, full) == mine
    abroad = [specs(foreign, (kind,), (512, 512)) for kind in (Shard(0), Replicate())]
    assert torchs.redistribute_cost(*abroad) == theirs, "gloo's meshes keep torch's prices"
    propagated.append(propagation_cost(mesh))
    # DTensor's results are unchanged.
    left = distribute_tensor(torch.arange(64.0).view(8, 8), mesh, [Shard(0)])
    right = distribute_tensor(torch.eye(8), mesh, [Shard(1)])
    product = left @ right
    assert isinstance(product, DTensor) and torch.equal(product.full_tensor(), torch.arange(64.0).view(8, 8))
    ours.disable_cost_model()
    ours.disable_cost_model()
    assert [getattr(*place) for place in places] == before
    assert torchs.redistribute_cost(rows, full) == theirs
    assert min(propagated) > 0 and propagated[0] != propagated[1]
    told: list[Any] = [None] * world_size
    dist.all_gather_object(told, propagated)
    assert told == [propagated] * world_size, "all ranks are told the same"


def profile(**changes: Any) -> dict[str, Any]:
    """A valid profile of this node's CPU and 2 ranks, in which an all-reduce takes a millisecond per MB."""
    key = json.loads(load()._profile_key("cpu", 2))["hardware"]
    curve = {"op": "all_reduce", "algorithm": "staged", "bytes": [16384, 10**6], "us": [16.384, 1000.0]}
    return {
        "format": "torch_symm profile",
        "version": 1,
        "measured": {"date": "2026-11-21", "software": "none", "command": "none", "load": []},
        "hardware": key,
        "groups": [{"ranks": 2, "curves": [curve]}],
        **changes,
    }


def requested(rank: int, world: int) -> tuple[Any, ...]:
    mesh = init_device_mesh("cpu", (world,))
    try:
        topo = ours.MeshTopoInfo.build_from_mesh(mesh)
    except torch_symm.SymmConfigError as error:
        return ("refused", str(error))
    return (*topo.price("all_reduce", 500_000, 0), topo.price("broadcast", 1, 0)[2], topo.origin)


def test_a_profile_is_believed(tmp_path: Path) -> None:
    """A profile is used if the environment names it or it is in the cache; a broken one in the cache is ignored."""
    path = tmp_path / "profiles" / json.loads(load()._profile_key("cpu", 2))["file"]
    path.parent.mkdir()
    path.write_text(json.dumps(profile()))
    in_cache = {"SYMM_CACHE_DIR": str(tmp_path)}
    for env in ({"SYMM_COST_PROFILE": str(path)}, in_cache):
        for us, algorithm, source, other, origin in run_ranks(requested, 2, env=env):
            assert us == pytest.approx(500.0) and (algorithm, source, other) == ("staged", "measured", "links")
            assert "2026-11-21" in origin and path.name in origin
    path.write_text("{")
    for env in ({"SYMM_COST_PROFILE": "0"}, in_cache):
        results = run_ranks(requested, 2, env=env)
        assert results[0][2] == "links" and results[0][0] != pytest.approx(500.0)
    assert "passed over" in results.logs[0]


LOCAL = {"step_us": 50.0, "slice_us": 20.0, "copy_gb_per_s": 10.0}


def steps(rank: int, world: int) -> tuple[dict[str, float], float]:
    """For single steps on 1 MB, their price minus their collective's; and the price of a step that only cuts."""
    mesh = init_device_mesh("cpu", (world,))
    size = (500, 500)
    rows, columns, partial, full = (specs(mesh, (kind,), size) for kind in (Shard(0), Shard(1), Partial(), Replicate()))
    found = {}
    pairs = [(rows, full), (columns, full), (partial, full), (partial, rows), (partial, columns)]
    for source, target in [*pairs, (rows, columns), (columns, rows)]:
        (step,) = ours.explain_redistribute(source, target).steps
        assert step.collective_us == ours.MeshTopoInfo.build_from_mesh(mesh).price(step.collective, step.bytes, 0)[0]
        found[f"{step.source} {step.target}"] = step.us - step.collective_us
        assert "of them" in str(step)
    return found, ours.redistribute_cost(full, rows)


def test_what_a_step_takes_beside_its_collective_is_priced(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(profile(local=LOCAL)))
    answers = run_ranks(steps, 2, env={"SYMM_COST_PROFILE": str(path)})
    assert answers[0] == answers[1]
    # 1 MB takes 100 µs to copy; after a cut a rank has half of it.
    copied = {"S(0) R": 0, "S(1) R": 100, "P(sum) R": 100, "P(sum) S(0)": 0, "P(sum) S(1)": 100}
    local, cut = answers[0]
    assert local == pytest.approx(
        {name: 50 + us for name, us in {**copied, "S(0) S(1)": 100, "S(1) S(0)": 100}.items()}
    )
    assert cut == 0.0, "nothing moves"


OTHER = {"device": "cpu", "name": "Z80", "cores": 1, "link": "shared memory", "ranks": 2}
#: src/coll/cost/profile/tests.rs has every fault.
FAULTS = {
    json.dumps(profile(hardware=OTHER)): r"measured with 2 ranks on 1 cores of Z80.*; here there are 2 ranks on",
    "{": "EOF",
    "[]": "not a profile",
    json.dumps(profile(local={**LOCAL, "copy_gb_per_s": 0.0})): "copy_gb_per_s is 0; it must be above 0",
}


@pytest.mark.parametrize(("text", "words"), FAULTS.items(), ids=["hardware", "broken", "no object", "no speed"])
def test_faulty_profiles_are_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "faulty.json"
    path.write_text(text)
    for kind, message in run_ranks(requested, 2, env={"SYMM_COST_PROFILE": str(path)}):
        assert kind == "refused" and "faulty.json" in message and re.search(words, message), message

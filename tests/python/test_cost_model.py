"""Prices of collectives and redistributions: torch's to the last digit, ours from measurements."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
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
from torch_symm._native import load

SIZES = [0, 1, 3, 8, 1000, 4097, 65536, 10**6 + 1, 64 << 20, 3 * 10**9]
SHAPES: list[tuple[tuple[int, ...], tuple[str, ...]]] = [((4,), ("a",)), ((2, 2), ("a", "b")), ((1, 4), ("a", "b"))]


def specs(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]) -> DTensorSpec:
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensorSpec(mesh, placements, TensorMeta(torch.Size(shape), strides, torch.float32))


def torchs_numbers(rank: int, world: int) -> None:
    from torch_symm import dtensor as ours

    for shape, names in SHAPES:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for per_node in (1, 2, 4, 8):
            # For CPUs, torch assumes one device per node. A mesh of GPUs on nodes of other sizes has these numbers of
            # devices.
            class Hosts:
                @staticmethod
                def num_devices_per_host(_device_type: str, count: int = per_node) -> int:
                    return count

            saved = torchs._mesh_resources
            from torch_symm.dtensor import _cost

            torchs._mesh_resources = _cost._mesh_resources = Hosts()  # type: ignore[assignment]
            try:
                torchs.MeshTopoInfo.build_from_mesh.cache_clear()
                _cost.forget()
                theirs = torchs.MeshTopoInfo.build_from_mesh(mesh)
                mine = ours.MeshTopoInfo.build_from_mesh(mesh, source="torch")
            finally:
                torchs._mesh_resources = _cost._mesh_resources = saved
            assert mine.mesh_dim_devices == theirs.mesh_dim_devices
            assert mine.mesh_dim_bandwidth == theirs.mesh_dim_bandwidth
            assert mine.mesh_dim_latency == theirs.mesh_dim_latency
            for size, dim in itertools.product(SIZES, range(mesh.ndim)):
                gb = size / 1024 / 1024 / 1024
                assert ours.allgather_cost(gb, mine, dim) == torchs.allgather_cost(gb, theirs, dim)
                assert ours.allreduce_cost(gb, mine, dim) == torchs.allreduce_cost(gb, theirs, dim)
                assert ours.reduce_scatter_cost(gb, mine, dim) == torchs.reduce_scatter_cost(gb, theirs, dim)
                assert ours.all_to_all_cost(gb, mine, dim) == torchs.allgather_cost(gb, theirs, dim) + 1.0
                assert ours.broadcast_cost(gb, mine, dim) >= torchs.allgather_cost(gb, theirs, dim) or size == 0
        torchs.MeshTopoInfo.build_from_mesh.cache_clear()
        # torch's formula over given links.
        given = [123.4] * mesh.ndim, [0.7] * mesh.ndim
        theirs = torchs.MeshTopoInfo(mesh, list(shape), *given)
        mine = ours.MeshTopoInfo(mesh, list(shape), *given, source="torch")
        assert ours.allreduce_cost(10**7 / 1024**3, mine, -1) == torchs.allreduce_cost(
            10**7 / 1024**3, theirs, mesh.ndim - 1
        )


def test_torchs_constants_give_torchs_numbers() -> None:
    run_ranks(torchs_numbers, 4)


def torchs_redistributions(rank: int, world: int) -> int:
    from torch_symm import dtensor as ours

    finite = 0
    draw = random.Random(7)
    for shape, names in SHAPES:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
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
    return finite


def test_torchs_constants_give_torchs_costs_of_redistributions() -> None:
    assert min(run_ranks(torchs_redistributions, 4)) > 50


def our_rules(rank: int, world: int) -> None:
    from torch_symm import dtensor as ours

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
    with pytest.raises(ValueError, match="no tensor's shape"):
        ours.redistribute_cost(DTensorSpec(mesh, (Shard(0), Replicate())), columns)
    for wrong in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="cannot be moved"):
            ours.allgather_cost(wrong, topo, 0)
    with pytest.raises(ValueError, match="mesh dimension 2 of 2"):
        ours.allgather_cost(1, topo, 2)
    with pytest.raises(ValueError, match="no source of prices"):
        ours.MeshTopoInfo.build_from_mesh(mesh, source="guess")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bandwidth must be above 0"):
        ours.MeshTopoInfo(mesh, [2, 2], [0.0, 1.0], [1.0, 1.0])
    with pytest.raises(ValueError, match="2 bandwidths, but 1 latencies"):
        ours.MeshTopoInfo(mesh, [2, 2], [1.0, 1.0], [1.0])


def test_redistributions_are_priced_by_what_moves() -> None:
    run_ranks(our_rules, 4)


def installed(rank: int, world: int) -> None:
    from torch.distributed.tensor import _redistribute, _utils
    from torch.distributed.tensor._ops import utils
    from torch_symm import dtensor as ours

    places: list[tuple[Any, str]] = [
        (torchs, "redistribute_cost"),
        (utils, "redistribute_cost"),
        (_utils, "redistribute_cost"),
        (torchs, "one_step_redistribute_cost"),
        (_redistribute, "one_step_redistribute_cost"),
    ]
    before = [getattr(*place) for place in places]
    mesh = init_device_mesh("cpu", (world,))
    foreign = DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu")
    rows, full = (specs(mesh, (kind,), (512, 512)) for kind in (Shard(0), Replicate()))
    theirs, mine = torchs.redistribute_cost(rows, full), ours.redistribute_cost(rows, full)
    assert theirs != mine
    ours.enable_cost_model()
    ours.enable_cost_model()
    assert all(getattr(*place) is not function for place, function in zip(places, before, strict=True))
    assert torchs.redistribute_cost(rows, full) == utils.redistribute_cost(rows, full) == mine
    assert _redistribute.one_step_redistribute_cost(rows, full) == mine
    abroad = [specs(foreign, (kind,), (512, 512)) for kind in (Shard(0), Replicate())]
    assert torchs.redistribute_cost(*abroad) == theirs, "gloo's meshes keep torch's prices"
    # DTensor's results are unchanged.
    left = distribute_tensor(torch.arange(64.0).view(8, 8), mesh, [Shard(0)])
    right = distribute_tensor(torch.eye(8), mesh, [Shard(1)])
    product = left @ right
    assert isinstance(product, DTensor) and torch.equal(product.full_tensor(), torch.arange(64.0).view(8, 8))
    ours.disable_cost_model()
    ours.disable_cost_model()
    assert [getattr(*place) for place in places] == before
    assert torchs.redistribute_cost(rows, full) == theirs


def test_installing_is_reversible() -> None:
    run_ranks(installed, 2)


def chosen(rank: int, world: int) -> tuple[float, float]:
    """The costs that sharding propagation used, before and after installing ours."""
    from torch.distributed.tensor._ops import utils
    from torch_symm import dtensor as ours

    requested: list[float] = []
    mesh = init_device_mesh("cpu", (world,))

    def multiply() -> float:
        left = distribute_tensor(torch.ones(64, 64), mesh, [Shard(0)])
        right = distribute_tensor(torch.ones(64, 64), mesh, [Shard(0)])
        requested.clear()
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

    before = multiply()
    ours.enable_cost_model()
    after = multiply()
    ours.disable_cost_model()
    return before, after


def test_sharding_propagation_hears_of_our_prices() -> None:
    answers = run_ranks(chosen, 2)
    assert all(before > 0 and after > 0 and before != after for before, after in answers)
    assert len(set(answers)) == 1, "all ranks are told the same"


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
    from torch_symm import dtensor as ours

    mesh = init_device_mesh("cpu", (world,))
    try:
        topo = ours.MeshTopoInfo.build_from_mesh(mesh)
    except torch_symm.SymmConfigError as error:
        return ("refused", str(error))
    return (*topo.price("all_reduce", 500_000, 0), topo.price("broadcast", 1, 0)[2], topo.origin)


def test_a_profile_is_believed(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(profile()))
    for us, algorithm, source, other, origin in run_ranks(requested, 2, env={"SYMM_COST_PROFILE": str(path)}):
        assert us == pytest.approx(500.0) and (algorithm, source, other) == ("staged", "measured", "links")
        assert "2026-11-21" in origin and "mine.json" in origin
    found = run_ranks(requested, 2, env={"SYMM_COST_PROFILE": "0"})[0]
    assert found[2] == "links" and found[0] != pytest.approx(500.0)


LOCAL = {"step_us": 50.0, "slice_us": 20.0, "copy_gb_per_s": 10.0}


def steps(rank: int, world: int) -> tuple[dict[str, float], float]:
    """The cost of single steps on 1 MB in addition to their collectives, and the price of a step that only cuts."""
    from torch_symm import dtensor as ours

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


def test_a_profile_in_the_cache_is_found(tmp_path: Path) -> None:
    name = json.loads(load()._profile_key("cpu", 2))["file"]
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / name).write_text(json.dumps(profile()))
    assert run_ranks(requested, 2, env={"SYMM_CACHE_DIR": str(tmp_path)})[0][0] == pytest.approx(500.0)
    (tmp_path / "profiles" / name).write_text("{")
    results = run_ranks(requested, 2, env={"SYMM_CACHE_DIR": str(tmp_path)})
    assert results[0][0] != pytest.approx(500.0) and "passed over" in results.logs[0]


OTHER = {"device": "cpu", "name": "Z80", "cores": 1, "link": "shared memory", "ranks": 2}
FAULTS: list[tuple[str, dict[str, Any] | str, str]] = [
    ("other hardware", {"hardware": OTHER}, r"measured with 2 ranks on 1 cores of Z80.*; here there are 2 ranks on"),
    ("broken", "{", "EOF"),
    ("empty", "", "EOF"),
    ("no object", "[]", "not a profile"),
    ("version", {"version": 99}, "its version is 99, this torch_symm reads 1"),
    ("no groups", {"groups": []}, "no groups"),
    ("unsorted", {"bytes": [10**6, 16384]}, "16384 bytes come after 1000000; sizes must ascend"),
    ("negative", {"us": [-1.0, 1.0]}, "a time of -1 µs"),
    ("huge", {"us": [1.0, 1e300]}, "must be above 0 and at most 1000000000"),
    ("missing", {"groups": [{"ranks": 2}]}, "missing field `curves`"),
    ("no speed", {"local": {**LOCAL, "copy_gb_per_s": 0.0}}, "local: copy_gb_per_s is 0; it must be above 0"),
]


@pytest.mark.parametrize(("change", "output"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_faulty_profiles_are_refused(tmp_path: Path, change: dict[str, Any] | str, output: str) -> None:
    import re

    path = tmp_path / "faulty.json"
    if isinstance(change, dict):
        value = profile()
        curve = value["groups"][0]["curves"][0]
        for name, what in change.items():
            (curve if name in curve else value)[name] = what
        change = json.dumps(value)
    path.write_text(change)
    for kind, text in run_ranks(requested, 2, env={"SYMM_COST_PROFILE": str(path)}):
        assert kind == "refused" and "faulty.json" in text and re.search(output, text), text

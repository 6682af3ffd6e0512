"""The cost model on GPUs: it prices the algorithm that runs, and calibration writes a profile of these GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch_symm
from pool import WORLDS, Pool, device, needs_gpus, needs_unshared_gpus, settle
from torch.distributed.device_mesh import DeviceMesh
from torch_symm.dtensor import MeshTopoInfo
from torch_symm.tools.tune import profile, thresholds_cuda

pytestmark = needs_gpus

SIZES = (2048, 40_000, 300_000, 1 << 20, 6 << 20, 40 << 20)


def named(rank: int, world: int) -> list[tuple[str, int, str, dict[str, int]]]:
    """For each call the algorithm that the model prices, and the calls of each algorithm that ``stats`` then counts."""
    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cuda")
    topo = MeshTopoInfo.build_from_mesh(mesh, "links")
    found = []
    for size in SIZES:
        count = size // 4 // world
        part, whole = torch.ones(count, device=device()), torch.ones(count * world, device=device())
        calls = {
            "all_reduce": lambda whole=whole: dist.all_reduce(whole),
            "all_gather": lambda whole=whole, part=part: dist.all_gather_into_tensor(whole, part),
            "reduce_scatter": lambda whole=whole, part=part: dist.reduce_scatter_tensor(part, whole),
            "all_to_all": lambda whole=whole: dist.all_to_all_single(torch.empty_like(whole), whole),
            "broadcast": lambda whole=whole: dist.broadcast(whole, 0),
        }
        for op, call in calls.items():
            before = torch_symm.stats().get(op, {})
            call()
            settle()
            after = torch_symm.stats().get(op, {})
            counted = {name: times - before.get(name, 0) for name, times in after.items()}
            served = {name: times for name, times in counted.items() if times}
            found.append((op, size, topo.price(op, whole.nbytes, 0)[1], served))
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_the_algorithm_that_is_priced_is_the_one_that_runs(pool: Pool, world: int) -> None:
    for found in pool.run(named, world):
        assert all(served == {priced: 1} for _, _, priced, served in found), found


@needs_unshared_gpus
def test_calibration_writes_a_profile_of_these_gpus(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    options = ["--device", "cuda", "--ranks", "2", "--largest", "1M", "--seconds", "10", "--output", str(path)]
    command = [sys.executable, "-m", "torch_symm", "tune", *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    written = json.loads(path.read_text())
    assert written["hardware"]["device"] == "cuda" and written["hardware"]["name"] == torch.cuda.get_device_name(0)
    curves = written["groups"][0]["curves"]
    assert {"one_shot", "exchange_low_latency"} <= {curve["algorithm"] for curve in curves}
    assert all(0.5 < us < 1e5 for curve in curves for us in curve["us"])
    prices = profile.prices("cuda", 2, 2, "measured", path)
    for curve in curves:
        assert {prices.price(curve["op"], size, 0)[1] for size in curve["bytes"]} == {curve["algorithm"]}, curve


@needs_unshared_gpus
def test_the_search_times_every_kernel_in_graphs() -> None:
    received: dict[tuple[str, int], list[float]] = {}
    ops, largest = ("all_reduce", "broadcast"), 64 << 10
    found = thresholds_cuda.search(
        profile.key("cuda", 2), ops, largest, 3.0, lambda p, us: received.setdefault((p.op, p.bytes), []).append(us)
    )
    assert set(found) <= {2} and set(received) == {(op, size) for op in ops for size in (16 << 10, 32 << 10, 64 << 10)}
    for (op, size), times in received.items():
        assert len(times) >= (3 if op == "all_reduce" else 2), "each way's"
        assert all(0.5 < us < 1e5 for us in times), (op, size, times)

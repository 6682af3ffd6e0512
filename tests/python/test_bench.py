"""The benchmark's arithmetic, its exact checks, and one short run."""

from __future__ import annotations

import csv
import json
import os
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import targets
import torch
import torch.distributed as dist
from faults.resource_leaks import children
from torch_symm import __main__ as entry
from torch_symm.tools.bench import launch, limits, machine
from torch_symm.tools.bench.background_load import BackgroundLoad, running
from torch_symm.tools.bench.ops import OPS
from torch_symm.tools.bench.pattern import TILE, Pattern, WrongResult
from torch_symm.tools.bench.record import Figure, Found, quantile, read
from torch_symm.tools.bench.request import ROOTED, Wanted
from torch_symm.tools.bench.timing import MAX_ROUNDS, MAX_SAMPLES, plan
from torch_symm.tools.bench.units import format_size, parse_size

BACKEND = os.environ.get("SYMM_TEST_BACKEND", "symm")
KB, MB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("text", "size"), [("8", 8), ("64K", 64 * KB), ("64KB", 64 * KB), ("16 MB", 16 * MB), ("1GiB", 1 << 30), ("8b", 8)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-8", "K", "8X", "1.5M"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text)


def test_sizes_are_written() -> None:
    assert [format_size(size) for size in (0, 8, 64 * KB, 16 * MB)] == ["-", "8 B", "64 KB", "16 MB"]


def test_a_wrong_element_is_named() -> None:
    pattern = Pattern([0], 0, TILE + 10, 2, torch.float32)
    tensor = torch.empty(TILE + 10)
    pattern.fill(tensor)
    pattern.check(tensor, "right")
    tensor[TILE + 3] += 1
    with pytest.raises(WrongResult, match=f"here: element {TILE + 3} of {TILE + 10}"):
        pattern.check(tensor, "here")


def test_targets_follow_the_bands() -> None:
    assert targets.ratio_target("all_reduce", 8, 4) == 50
    assert targets.ratio_target("all_gather", 64 * MB, 4) == 6
    assert targets.ratio_target("all_gather", 256 * MB, 4) == 6
    assert targets.ratio_target("barrier", 0, 4) == 40
    assert targets.ratio_target("all_reduce", 4 * MB, 4) is None
    assert targets.ratio_target("all_reduce", 8, 2) is None
    assert targets.is_met("all_reduce", 8, 4, 14.0, 60.0) is True
    assert targets.is_met("all_reduce", 8, 4, 16.0, 60.0) is False
    assert targets.is_met("send_recv", MB, 4, 1.0, 3.9) is False
    assert targets.is_met("send_recv", MB, 4, 1.0, None) is None


def test_a_run_is_judged_by_its_targets() -> None:
    def row(ours: float, theirs: float, others: float = 0.0) -> Found:
        sides = {side: {"in_place": Figure(us, us, us, us, 20, 0)} for side, us in (("symm", ours), ("gloo", theirs))}
        return Found(Wanted("all_reduce", "f32", "sum", -1, MB, 4), sides, {}, None, None, others)

    assert targets.verdicts([row(10.0, 110.0)]) == [("all_reduce f32 1 MB in_place: 11.0 of 10", True)]
    assert targets.verdicts([row(10.0, 90.0, 0.6)]) == [("all_reduce f32 1 MB in_place: 9.0 of 10 ?", False)]


@pytest.mark.parametrize("op", [op for op in OPS if op != "barrier"])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_staging_costs_more_than_the_floor(op: str, world: int) -> None:
    floor = limits.limit_us(op, 64 * MB, world, 80e9, staged=False)
    staged = limits.limit_us(op, 64 * MB, world, 80e9, staged=True)
    assert floor is not None
    assert staged is not None
    assert floor < staged


def test_a_limit_of_memory_means_nothing_in_the_cache() -> None:
    assert limits.limit_us("all_reduce", MB, 4, 80e9, staged=False) is None
    assert limits.limit_us("all_reduce", 16 * MB, 4, 80e9, staged=False) == pytest.approx(8 * 16 * MB / 80e9 * 1e6)


@pytest.mark.parametrize("estimate", [0.01, 5.0, 9.9, 10.0, 700.0, 4_999.0, 5_000.0, 300_000.0])
@pytest.mark.parametrize("world", [2, 3, 4, 8, 16])
def test_the_rhythm_fits_the_shared_and_the_exponent(estimate: float, world: int) -> None:
    for rounds in (3, 5, MAX_ROUNDS):
        rhythm = plan(estimate, 1.5, world, least=20, rounds=rounds)
        assert 20 <= rhythm.rounds * rhythm.bursts * rhythm.samples <= MAX_SAMPLES + MAX_ROUNDS
        calls = rhythm.samples * rhythm.batch + int(rhythm.lead)
        assert torch.isfinite(torch.tensor(256.0 * float(world) ** (calls - 1), dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("backend", "output"),
    [
        ("sym", "no backend 'sym'; torch knows gloo"),
        ("cpu:sym", "no backend 'sym'"),
        ("nccl", "'nccl' serves no CPU tensors; for GPUs there is --device cuda"),
        ("cuda:nccl", "serves no CPU tensors"),
        ("symm", None),
        ("gloo", None),
        ("cpu:gloo,cuda:nccl", None),
    ],
)
def test_a_backend_that_cannot_be_measured_is_refused_in_one_sentence(backend: str, output: str | None) -> None:
    if backend == "nccl" and not dist.is_nccl_available():
        output = "this torch was built without 'nccl'"
    found = launch.unusable(backend)
    assert found is None if output is None else found is not None and output in found and "\n" not in found


@pytest.mark.parametrize(("text", "found"), [("0", BackgroundLoad()), ("3", BackgroundLoad(3))])
def test_what_runs_beside_is_read(text: str, found: BackgroundLoad) -> None:
    assert BackgroundLoad.parse(text) == found
    assert BackgroundLoad.parse("loader") == BackgroundLoad(machine.usable_cores(), loaders=True)
    for wrong in ("", "-1", "loaders", "2.5"):
        with pytest.raises(ValueError, match="neither a number of processes up to 9999 nor 'loader'"):
            BackgroundLoad.parse(wrong)


@pytest.mark.timed
@pytest.mark.parametrize("beside", [BackgroundLoad(2), BackgroundLoad(1, loaders=True)])
def test_what_runs_beside_is_busy_and_ends(beside: BackgroundLoad) -> None:
    before = children()
    with running(beside):
        mine = children() - before
        assert len(mine) == beside.count
        until = time.monotonic() + 20
        while not all(_cpu_ticks(child) > 5 for child in mine):
            assert time.monotonic() < until, "they do nothing"
            time.sleep(0.05)
    assert not children() & mine


def _cpu_ticks(process: int) -> int:
    """Ticks of CPU time that a process has spent in its own code."""
    return int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[11])


def test_quantiles_are_values_of_the_list() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (quantile(values, 0.5), quantile(values, 0.99), quantile([7.0], 0.99)) == (50.0, 99.0, 7.0)


@pytest.mark.usefixtures("forked")
def test_a_run_of_all_operations_is_right_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, table, beside = tmp_path / "bench.json", tmp_path / "rows.csv", list[BackgroundLoad]()
    monkeypatch.setattr(launch, "running", lambda wanted: nullcontext(beside.append(wanted)))
    typed = [
        "bench",
        *OPS,
        "--sizes",
        "20K",
        "-w",
        "1",
        "-o",
        "avg",
        "-r",
        "1",
        "--seconds",
        "4",
        "--background-load",
        "1",
    ]
    typed += ["--backend", BACKEND, "--against", "gloo,nccl", "--device", "cpu", "--csv", str(table)]
    assert entry.main([*typed, "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["absent"] == [{"side": "nccl", "reason": "serves CUDA tensors only"}]
    assert beside == [BackgroundLoad(1)] and found["failure"] is None and found["machine"]["cores"] >= 1
    rows, here = read(path)
    assert list(dict.fromkeys(row.wanted.op for row in rows)) == list(OPS) and here["cpu"] == machine.cpu_model()
    assert [record for row in rows for record in row.records()] == found["rows"]
    for row in rows:
        assert set(row.sides) == {BACKEND, "gloo"} and row.other_cores is not None
        assert row.wanted.root == (1 if row.wanted.op in ROOTED else -1)
        for placement, figure in (pair for placed in row.sides.values() for pair in placed.items()):
            assert figure.wrong == 0 and figure.iterations >= 5 and figure.median_us > 0
            assert row.ratio("gloo", placement) > 0
    placed = {(row.wanted.op, placement) for row in rows for placement in row.sides[BACKEND]}
    assert ("reduce_scatter", "in_place") in placed and ("reduce", "out_of_place") not in placed
    with table.open() as file:
        assert len(list(csv.DictReader(file))) == len(found["rows"])

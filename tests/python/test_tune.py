"""Calibration: the sizes that it measures, its output, and that the cost model reads it."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch_symm
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch_symm import __main__ as entry
from torch_symm.launch import ranks as launched
from torch_symm.launch.watch import StalledError
from torch_symm.tools.tune import command, launch, measurement_points, plot, profile, redistribution, thresholds_cpu
from torch_symm.tools.tune import rank as rank_process
from torch_symm.tools.tune.measurement_points import LARGEST, OPS, SMALLEST, STEP, Point, group_sizes, rounded
from torch_symm.tools.tune.thresholds import choose

Tune = Callable[..., str]


@pytest.fixture
def tune(capsys: pytest.CaptureFixture[str]) -> Tune:
    """Returns the output of ``torch-symm tune``."""

    def run(*arguments: str, expect: int = 0) -> str:
        try:
            status = entry.main(["tune", "--device", "cpu", *arguments])
        except SystemExit as ended:
            status = int(str(ended.code))
        said = capsys.readouterr()
        assert status == expect, said
        return said.out + said.err

    return run


class Steps:
    """Algorithms and the sizes from which they are used."""

    def __init__(self, *ends: int) -> None:
        self._ends = ends

    def price(self, op: str, bytes: float, dim: int) -> tuple[float, str, str]:
        return 0.0, str(sum(bytes > end for end in self._ends)), ""


def test_the_check_measures_other_sizes_than_calibration() -> None:
    known, new = measurement_points.calibrated(), measurement_points.checked()
    assert (known[0], known[-1]) == (SMALLEST, LARGEST) and {1 << shift for shift in range(10, 29)} < set(known)
    assert all(low < size < high for low, size, high in zip(known[:-1], new, known[1:], strict=True))
    assert all(high / low < 1.42 for low, high in itertools.pairwise(known) if 1 << 20 <= low < 64 << 20)
    assert [rounded(size, 3) for size in (1, 12, 13)] == [12, 12, 24]
    assert [group_sizes(world) for world in (2, 4, 6, 7)] == [(2,), (2, 4), (2, 3, 6), (7,)]


@pytest.mark.parametrize("ends", [(1500,), (1100, 1900), (1024,), ()])
def test_both_sides_of_a_switch_are_measured(ends: tuple[int, ...]) -> None:
    low, high = Point(4, "all_reduce", 1024), Point(4, "all_reduce", 2048)
    expected = {(end // 16 * 16, end // 16 * 16 + 16) for end in ends}
    found = [point.bytes for point in measurement_points.switches(low, high, Steps(*ends))]
    assert found == sorted(size for pair in expected for size in pair if size not in (1024, 2048))


def priced(rank: int, world: int) -> list[tuple[float, str]]:
    from torch_symm import dtensor

    topo = dtensor.MeshTopoInfo.build_from_mesh(init_device_mesh("cpu", (world,)), "measured")
    return [(us, basis) for op in OPS for us, _, basis in [topo.price(op, 2048, 0)]]


@pytest.mark.timed
def test_what_is_measured_is_what_the_model_says(tmp_path: Path, tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    # More launches only repeat the same steps, so one is enough.
    monkeypatch.setattr(command, "LAUNCHES", 1)
    monkeypatch.setattr(command, "VISITS", 2)
    path = tmp_path / "profile.json"
    output = tune("--ranks", "2", "--largest", "16K", "--seconds", "0.5", "--output", str(path))
    assert "2 ranks on" in output and str(path) in output
    written = json.loads(path.read_text())
    curves = written["groups"][0]["curves"]
    assert {curve["op"] for curve in curves} == set(OPS) and {curve["algorithm"] for curve in curves} >= {"inline"}
    sizes = [size for curve in curves if curve["op"] == "all_reduce" for size in curve["bytes"]]
    assert {1024, 2048, 4096, 8192, 16384} <= set(sizes) and len(sizes) == 7, "and both sides of the switch"
    times = {(curve["op"], size): us for curve in curves for size, us in zip(curve["bytes"], curve["us"], strict=True)}
    assert all(0.1 < us < 1e6 for us in times.values())
    local = written["local"]
    assert 0 < local["step_us"] < 1e5 and 0 < local["slice_us"] < 1e5 and 0.01 < local["copy_gb_per_s"] < 1000
    assert 0 < written["measured"]["reference_us"] < 1e6 and "of the visits count" in output
    answers = run_ranks(priced, 2, env={"SYMM_COST_PROFILE": str(path)})
    assert answers == [[(times[op, 2048], "measured") for op in OPS]] * 2

    figures = tmp_path / "check.json"
    small = ("--ranks", "2", "--largest", "16K", "--seconds", "0.5", "--ops", "all_gather,broadcast")
    output = tune(*small, "--check", "--profile", str(path), "--json", str(figures))
    assert "wanted: median ≤ 10%" in output and "torch" in output
    found = json.loads(figures.read_text())["points"]
    unvisited = re.search(r"(\d+) points were never visited", output)
    assert found and len(found) + int(unvisited[1] if unvisited else 0) == 2 * 4
    assert not {point["bytes"] for point in found} & {size for _, size in times}
    assert all(point["measured"] > 0 and point["predicted"] > 0 and point["torch"] > 6.6 for point in found)

    output = tune("--ranks", "2", "--redistribution", "2", "--profile", str(path), "--json", str(figures))
    cases = json.loads(figures.read_text())["cases"]
    assert len(cases) == 2 and all(len(case["plans"]) > 1 for case in cases) and "within 10%" in output

    assert "there is no profile of 127 ranks on" in tune("--check", "--ranks", "127", expect=1)
    output = tune("--ranks", "3", "--check", "--profile", str(path), expect=1)
    assert "was measured with 2 ranks on" in output and "here there are 3 ranks on" in output
    path.write_text("{")
    assert "profile.json: EOF" in tune("--ranks", "2", "--check", "--profile", str(path), expect=1)


def test_a_measurement_of_some_collectives_keeps_the_others() -> None:
    def profiled(us: float, *ops: str, **more: object) -> dict[str, Any]:
        curves = [{"op": op, "us": [us]} for op in ops]
        return {"hardware": {"cpu": "x"}, "groups": [{"ranks": ranks, "curves": curves} for ranks in (2, 3)], **more}

    made = profiled(1.0, "all_reduce")
    kept = profile.with_others(made, profiled(2.0, "all_reduce", "barrier", local={"step_us": 3}), ["all_reduce"])
    assert kept["local"] == {"step_us": 3}
    for group in kept["groups"]:
        assert [(curve["op"], curve["us"]) for curve in group["curves"]] == [("all_reduce", [1.0]), ("barrier", [2.0])]
    assert profile.with_others(made, {**profiled(2.0, "barrier"), "hardware": {"cpu": "y"}}, ["all_reduce"]) == made
    assert profile.with_others(made, {}, ["all_reduce"]) == made


def test_a_measurement_of_some_collectives_keeps_the_thresholds_of_the_others() -> None:
    def profiled(*ops: str, **settings: object) -> dict[str, Any]:
        curves = [{"op": op} for op in ops]
        return {"hardware": {"cpu": "x"}, "groups": [{"ranks": 2, **settings, "curves": curves}]}

    old = profiled("all_reduce", "barrier", stream_bytes=7, cuda_tuning="lanes=3, one_shot_bytes=1")
    for new, ops, expected in (
        ({}, ["all_reduce"], {"stream_bytes": 7, "cuda_tuning": "lanes=3,one_shot_bytes=1"}),
        ({"stream_bytes": 8}, ["barrier"], {"stream_bytes": 8, "cuda_tuning": "lanes=3,one_shot_bytes=1"}),
        (
            {"cuda_tuning": "one_shot_bytes=2,blocks=9"},
            ["barrier"],
            {"stream_bytes": 7, "cuda_tuning": "lanes=3,one_shot_bytes=2,blocks=9"},
        ),
        ({"stream_bytes": 8}, ["all_reduce", "barrier"], {"stream_bytes": 8}),
        ({}, ["all_reduce", "barrier"], {}),
    ):
        found = profile.settings_of(profile.with_others(profiled(*ops, **new), old, ops))
        assert found == ({2: expected} if expected else {}), (new, ops)


def test_some_collectives_are_measured_under_the_thresholds_of_the_others(
    tmp_path: Path, tune: Tune, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "LAUNCHES", 1)
    settings = {2: {"stream_bytes": 1 << 21}}
    old = profile.bare(profile.key("cpu", 2), settings)
    old["groups"][0]["curves"] = [{"op": "broadcast", "algorithm": "inline", "bytes": [1024], "us": [5.0]}]
    path, drafts, draft = tmp_path / "profile.json", [], profile.draft
    profile.write(path, old)
    monkeypatch.setattr(profile, "draft", lambda here, settings: drafts.append(settings) or draft(here, settings))
    tune("--ranks", "2", "--largest", "2K", "--seconds", "0.1", "--ops", "all_gather", "--output", str(path))
    written = json.loads(path.read_text())
    assert drafts == [settings] and profile.settings_of(written) == settings
    assert {curve["op"] for curve in written["groups"][0]["curves"]} == {"all_gather", "broadcast"}


def tuned(rank: int, world: int) -> int:
    return entry.main(["tune", "--device", "cpu", "--ranks", "2", "--largest", "2K", "--seconds", "0.1"])


def test_a_profile_goes_into_the_cache_and_is_found_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched, "WARM", "fork")
    cache = {"SYMM_CACHE_DIR": str(tmp_path)}
    assert run_ranks(tuned, 1, backend=None, env=cache) == [0]
    (file,) = (tmp_path / "profiles").iterdir()
    assert file.name.endswith("-2-ranks.json")
    assert all(basis == "measured" for _, basis in run_ranks(priced, 2, env=cache)[0])
    # A default that cannot be written is an error before anything is measured.
    (tmp_path / "file").touch()
    for folder, text in (("0", "there is no cache"), (f"{tmp_path}/file", "file/profiles: cannot be made: Not a dir")):
        without = run_ranks(tuned, 1, backend=None, env={"SYMM_CACHE_DIR": folder})
        assert without == [1] and text in without.logs[0] and "--output" in without.logs[0]
        assert "; load" not in without.logs[0]


def tune_with_stopped_ranks(_rank: int, _world: int, plans: bool) -> str:
    def main(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launched, "WARM", "fork")
        for module in (rank_process, redistribution):
            patch.setattr(module, "main", main)
            patch.setattr(module, "STILL_S", 1.0)
        with pytest.raises(StalledError) as raised:
            if plans:
                redistribution.measure(2, "cpu", 1, None, lambda *_: None)
            else:
                launch.measure(2, "cpu", [Point(2, "all_reduce", 1024)], 1.0, 1, lambda *_: None)
    return str(raised.value)


@pytest.mark.parametrize("plans", [False, True])
def test_ranks_that_stop_end_the_measurement(plans: bool) -> None:
    (text,) = run_ranks(tune_with_stopped_ranks, 1, plans, backend=None)
    assert text.startswith(f"no message for {1 if plans else 2} s: rank")


def test_a_profile_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    here = profile.key("cpu", 4)
    times = {Point(4, "all_reduce", 1024): 5.0, Point(4, "all_reduce", 1 << 20): 70.0}
    known = {ranks: profile.prices("cpu", ranks, 4, "links") for ranks in (2, 4)}
    bare = profile.bare(here, {4: {"stream_bytes": 1 << 20}})
    value = profile.assemble(bare, times, profile.measured("a test", [0.5], 81.0), known)
    assert [(group["ranks"], len(group["curves"])) for group in value["groups"]] == [(2, 0), (4, 2)]
    assert value["groups"][1]["stream_bytes"] == 1 << 20 and "local" not in value
    path = tmp_path / "profile.json"
    profile.write(path, value)
    before = path.read_text()
    assert json.loads(before) == value and len(before.splitlines()) < 60
    faulty: dict[str, Any] = {**value, "version": 7}
    with pytest.raises(torch_symm.SymmConfigError, match="its version is 7"):
        profile.write(path, faulty)
    assert path.read_text() == before and [file.name for file in tmp_path.iterdir()] == ["profile.json"]


def test_only_visits_in_one_state_of_the_machine_count() -> None:
    point, other = Point(4, "broadcast", 1024), Point(4, STEP, 1024)

    def visits(*pairs: tuple[float, float]) -> list[launch.Visit]:
        return [launch.Visit(0, us, reference_us) for us, reference_us in pairs]

    launches = [
        {point: visits((10.0, 80.0), (6.0, 50.0)), other: visits((30.0, 84.0))},
        {point: visits((12.0, 82.0), (11.0, 78.0)), other: visits((20.0, 83.0), (5.0, 50.0))},
    ]
    assert 78.0 <= launch.state(launches) <= 84.0, "five of seven references"
    assert launch.times(launches, 81.0) == ({point: 11.0, other: 20.0}, 5 / 7), "the median; of a step the least"
    assert launch.times(launches, 50.0) == ({point: 6.0, other: 5.0}, 2 / 7)
    assert launch.times(launches, 200.0) == ({}, 0.0), "never seen in this state"
    assert launch.all_times(launches, 200.0) == ({point: 10.5, other: 20.0}, 0.0)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("op", OPS)
def test_tensors_are_added_up_as_plans_do_it(ranks: int, op: str) -> None:
    known = profile.prices("cpu", ranks, 4, "links")
    default, unit = 48 << 20, 4 * ranks
    edge = default // thresholds_cpu.touched(Point(ranks, op, 1)) // unit * unit
    for size in (edge, edge + unit):
        streams = known.price(op, size, 0)[1] == "staged_streaming"
        assert streams == (thresholds_cpu.touched(Point(ranks, op, size)) > default), size
        assert streams != thresholds_cpu.usual(ranks)(Point(ranks, op, size))


def test_the_threshold_is_where_the_caches_stop_helping() -> None:
    sizes = [1 << 20, 4 << 20, 16 << 20, 64 << 20]
    own = [Point(4, "broadcast", size) for size in sizes]
    touched, edges = thresholds_cpu.touched, (thresholds_cpu.ALWAYS, thresholds_cpu.NEVER)
    assert [touched(point) >> 20 for point in own] == [4, 16, 64, 256]
    assert touched(Point(4, "all_gather", 100)) == 500 and touched(Point(2, "all_reduce", 100)) == 400

    def chosen(*ratios: float) -> int | None:
        """The threshold for these times of copies past the cache, relative to copies through it."""
        cached = dict.fromkeys(own, 100.0)
        streamed = {point: 100.0 * ratio for point, ratio in zip(own, ratios, strict=True)}
        return choose(own, touched, cached, streamed, thresholds_cpu.usual(4), edges)

    assert chosen(2.0, 2.0, 0.5, 0.5) is None, "that is the default"
    assert chosen(2.0, 0.5, 0.5, 0.5) == 8 << 20
    assert chosen(2.0, 2.0, 2.0, 0.5) == 128 << 20
    assert (chosen(0.5, 0.5, 0.5, 0.5), chosen(2.0, 2.0, 2.0, 2.0)) == (1, 1 << 50)
    assert chosen(2.0, 1.02, 0.5, 0.5) is None and chosen(2.0, 0.99, 0.5, 0.5) is None, "not worth it"


def test_an_earlier_check_is_drawn(tmp_path: Path, tune: Tune) -> None:
    times = {"measured": 9.0, "predicted": 8.0, "links": 5.0, "torch": 1.0}
    point = {"ranks": 2, "op": "all_gather", "algorithm": "staged", **times}
    check, picture = tmp_path / "check.json", tmp_path / "curves.svg"
    check.write_text(json.dumps({"origin": "a test", "points": [{**point, "bytes": 1448}, {**point, "bytes": 2896}]}))
    if find_spec("matplotlib") is None:
        output = "--plot: needs matplotlib, which is not installed: pip install matplotlib"
        assert output in tune("--draw", str(check), "--plot", str(picture), expect=2)
        assert output in tune("--check", "--plot", str(picture), expect=2)
    else:
        tune("--draw", str(check), "--plot", str(picture))
        assert "all_gather, 2 ranks" in picture.read_text()


def test_outputs_are_checked_before_and_their_failure_keeps_the_result(
    tmp_path: Path, tune: Tune, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = {"ranks": 2, "op": "all_gather", "algorithm": "staged", "bytes": 1448}
    found = {"origin": "a test", "points": [{**point, "measured": 9.0, "predicted": 8.0, "links": 5.0, "torch": 1.0}]}
    measured: list[object] = []

    def fails(compared: list[object], title: str, path: Path) -> None:
        assert len(compared) == 1 and title == "a test" and path.parent.is_dir()
        raise OSError("the disk is full")

    monkeypatch.setattr(command, "_measured", lambda *given: measured.append(given) or (0, found))
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: True)
    monkeypatch.setattr(plot, "draw", fails)
    new = tmp_path / "new"
    assert "ends in one of .png, .svg, .pdf" in tune("--check", "--plot", str(tmp_path / "costs.doc"), expect=2)
    for option, path in (("--plot", new / "costs.svg"), ("--json", new / "x.json"), ("--output", new / "x.json")):
        assert f"there is no folder {new}" in tune("--check", option, str(path), expect=2)
    assert f"{tmp_path} is a folder" in tune("--check", "--json", str(tmp_path), expect=2)
    assert not measured and not new.exists()
    written, picture = tmp_path / "check.json", tmp_path / "costs.svg"
    said = tune("--check", "--json", str(written), "--plot", str(picture), expect=1)
    assert "failed: the disk is full" in said and json.loads(written.read_text())["points"] == found["points"]
    assert "failed: the disk is full" in tune("--draw", str(written), "--plot", str(picture), expect=1)
    assert "No space left" in tune("--check", "--json", "/dev/full", expect=1)


def test_shipped_profiles_are_whole_and_named_by_their_hardware() -> None:
    folder = Path(torch_symm.__file__).parent / "profiles"
    names = {path.name for path in folder.glob("*.json")}
    assert {"cpu-amd-epyc-4-cores-4-ranks.json", "cuda-nvidia-h200-nvlink-4-0-x-18-2-ranks.json"} <= names
    for path in folder.glob("*.json"):
        read = json.loads(path.read_text())
        hardware = read["hardware"]
        words = [hardware["device"], hardware["name"], *([hardware["link"]] if hardware["device"] == "cuda" else [])]
        words += [f"{hardware['cores']} cores"] if hardware["device"] == "cpu" else []
        text = " ".join([*words, f"{hardware['ranks']} ranks"]).lower()
        assert path.name == re.sub("[^a-z0-9]+", "-", text) + ".json"
        for curve in (curve for group in read["groups"] for curve in group["curves"]):
            assert len(curve["bytes"]) == len(curve["us"]) >= 1 and sorted(curve["bytes"]) == curve["bytes"], path.name


def test_plans_are_all_ways_in_single_steps() -> None:
    full, rows, columns, partial = Replicate(), Shard(0), Shard(1), Partial()
    direct, gathered = [(rows,), (columns,)], [(rows,), (full,), (columns,)]
    assert list(redistribution._plans((rows,), (columns,), 2)) == [gathered, direct]
    found = list(redistribution._plans((partial, rows), (full, full), 3))
    assert [(partial, rows), (full, rows), (full, full)] in found and len(found) > 4
    assert all(sum(a != b for a, b in zip(x, y, strict=True)) == 1 for way in found for x, y in zip(way, way[1:]))  # noqa: B905, RUF007
    assert not any(state == (rows, rows) for way in found for state in way), "the order of two cuts would matter"


def test_the_loss_of_a_model_is_what_its_choice_costs() -> None:
    def plan(us: float, ours: float, torchs: float) -> redistribution.Timed:
        return redistribution.Timed(("a", "b"), us, {"measured": ours, "links": ours, "torch": torchs})

    case = redistribution.RedistributionCase(
        (4,), 1024, (plan(20.0, 5.0, 1.0), plan(10.0, 4.0, 2.0), plan(10.5, 9.0, 9.0))
    )
    assert (redistribution.loss(case, "measured"), redistribution.loss(case, "torch")) == (1.0, 2.0)
    rows = redistribution.summary([case])
    assert rows[-3] == ["all", "measured", "1", "100%", "100%", "0%", "0%"]
    assert rows[-1] == ["all", "torch", "1", "0%", "0%", "100%", "100%"]

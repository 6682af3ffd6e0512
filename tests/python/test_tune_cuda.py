"""The search for thresholds of GPUs, without a GPU: the plan's own algorithms with given times."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from ranks import run_ranks
from torch_symm.tools.tune import profile, rank, thresholds_cuda
from torch_symm.tools.tune.measurement_points import OPS, Point
from torch_symm.tools.tune.thresholds_cuda import SHORT, STAGED, TWO_SHOT, WAYS, Way

KIB, MIB = 1 << 10, 1 << 20
POINTS = thresholds_cuda._points(4, OPS, 256 * MIB)
PRICES = profile.prices


@functools.cache
def served(tuning: str) -> Mapping[Point, str]:
    """The algorithms that :data:`POINTS` use with a tuning, which a process reads only once."""
    found = run_ranks(named, 1, backend=None, env={"SYMM_CUDA_TUNING": tuning})
    return cast(Mapping[Point, str], found[0])


def named(rank: int, world: int) -> Mapping[Point, str]:
    profile.prices = PRICES
    return thresholds_cuda._names(POINTS, 4)


def test_ways_have_their_kernel_wherever_it_has_room() -> None:
    reduces, messages = ([p for p in POINTS if (p.op == "all_reduce") == reduces] for reduces in (True, False))
    assert {(p.op, p.ranks) for p in POINTS} == {(op, n) for op in OPS if op != "all_to_all" for n in (2, 4)}
    assert {p.bytes for p in reduces} == {16 * KIB << shift for shift in range(10)}
    assert {p.bytes for p in messages} == {16 * KIB << shift for shift in range(9)}
    short, two_shot, staged, usual = (served(tuning) for tuning in (*WAYS, ""))
    for point in reduces:
        room = {2: 2 * MIB, 4: 1 * MIB}[point.ranks]
        two = "two_shot" if point.bytes <= 4 * MIB else "rsag_staged"
        assert short[point] == ("one_shot" if point.bytes <= room else two), point
        assert (two_shot[point], staged[point]) == (two, "rsag_staged"), point
    lines, default = {2: 512 * KIB, 4: 256 * KIB}, {2: 512 * KIB, 4: 512 * KIB // 3}
    for point in messages:
        length, flags = thresholds_cuda.message(point), {"exchange_low_latency", "reduce_low_latency"}
        assert (short[point] in flags, staged[point] in flags) == (length <= lines[point.ranks], False), point
        assert usual[point] == (short if length <= default[point.ranks] else staged)[point], point


def way(tuning: str, us: Mapping[Point, float]) -> Way:
    return Way(us, served(tuning))


def test_measured_times_move_one_threshold() -> None:
    """Times in µs of 4 H200, 2026-11-21."""
    sizes = [64 * KIB, 128 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB]
    reduces = [Point(4, "all_reduce", size) for size in sizes]
    gathers = [Point(4, "all_gather", size) for size in (64 * KIB, 256 * KIB, 512 * KIB, MIB)]
    own = [*reduces, *gathers]

    def timed(*us: float) -> dict[Point, float]:
        return dict(zip(own, us, strict=False))

    ways = [
        way(SHORT, timed(3.2, 3.9, 7.3, 12.3, 13.2, 23.6, 53.4, 3.8, 5.4, 7.7, 11.6)),
        way(TWO_SHOT, timed(4.4, 4.7, 6.1, 8.1, 13.2, 23.6, 53.4)),
        way(STAGED, timed(12.5, 13.0, 13.7, 15.1, 21.9, 32.1, 53.4, 8.3, 9.0, 9.3, 10.2)),
    ]
    assert thresholds_cuda.choose_all(own, ways, served("one_shot_bytes=65536")) == {"one_shot_bytes": 256 * KIB}
    assert thresholds_cuda.choose_all(own, ways, served("")) == {}, "the defaults are of these figures"
    assert thresholds_cuda.choose_all(gathers, ways, served("")) == {}
    assert thresholds_cuda.choose_all([], [Way({}, {})] * 3, {}) == {}
    slow = [way(SHORT, dict.fromkeys(own, 30.0)), way(TWO_SHOT, dict.fromkeys(own, 20.0)), ways[2]]
    below = {64 * KIB: 46340, 16 * KIB: 11585}
    assert thresholds_cuda.choose_all(own, slow, served("")) == {
        "one_shot_bytes": below[64 * KIB],
        "two_shot_bytes": below[64 * KIB],
        "zero_copy_two_shot_bytes": below[64 * KIB],
        "low_latency_bytes": below[16 * KIB],
    }, "half a step below what is slower staged"


def us(point: Point, name: str) -> float:
    """Times of a node whose best thresholds are not the defaults."""
    length = thresholds_cuda.message(point) / KIB
    steps = {"one_shot": (2, 0.05), "two_shot": (5, 0.01), "rsag_staged": (13, 0.003), "staged": (9, 0.003)}
    if point.op == "broadcast" and name == "rsag_staged":
        name = "staged"
    start, per_kib = steps.get(name.removeprefix("exchange_").removeprefix("reduce_"), (2, 0.2))
    return start + per_kib * length


def fake(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the launch of processes by :func:`us`; returns the list to which each launched tuning is added."""
    launched: list[str] = []

    def tuning(path: Path | None) -> str:
        groups = json.loads(path.read_text())["groups"] if path else [{"cuda_tuning": ""}]
        assert len({group["cuda_tuning"] for group in groups}) == 1
        return str(groups[0]["cuda_tuning"])

    class Named:
        def __init__(self, names: Mapping[Point, str], ranks: int) -> None:
            self._names, self._ranks = names, ranks

        def price(self, op: str, bytes: int, dim: int) -> tuple[float, str, str]:
            return 0.0, self._names[Point(self._ranks, op, bytes)], ""

    def prices(device: str, ranks: int, world: int, source: str, path: Path | None = None) -> Named:
        assert (device, world, source) == ("cuda", 4, "measured" if path else "links")
        return Named(served(tuning(path)), ranks)

    def measure(*given: Any, graphs: bool) -> dict[Point, list[rank.Visit]]:
        world, device, points, seconds, visits, received, path = given
        assert (world, device, seconds, graphs) == (4, "cuda", 4.0, True)
        launched.append(tuning(path))
        names, found = served(launched[-1]), {}
        for point in points:
            found[point] = [rank.Visit(0, us(point, names[point]), 0.0)] * visits
            for visit in found[point]:
                received(point, visit.us)
        return found

    # The written file cannot be read back on a machine without such a GPU.
    monkeypatch.setattr(profile, "write", lambda path, value: path.write_text(json.dumps(value)))
    monkeypatch.setattr(profile, "prices", prices)
    monkeypatch.setattr(thresholds_cuda, "measure", measure)
    return launched


def test_the_found_thresholds_choose_what_was_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    launched, received = fake(monkeypatch), list[Point]()
    here = profile.Key({"device": "cuda", "ranks": 4}, "cuda.json", "4 GPUs")
    found = thresholds_cuda.search(here, OPS, 256 * MIB, 12.0, lambda point, _us: received.append(point))
    assert launched == list(WAYS) and len(received) == thresholds_cuda.count(4, OPS, 256 * MIB)
    assert set(found) == {2, 4}
    for ranks, setting in found.items():
        names = served(setting["cuda_tuning"])
        for point in (point for point in POINTS if point.ranks == ranks):
            times = {served(tuning)[point]: us(point, served(tuning)[point]) for tuning in WAYS}
            assert names[point] == min(times, key=lambda name: times[name]), (point, setting, times)

    launched.clear()
    assert thresholds_cuda.search(here, ("all_to_all",), 256 * MIB, 12.0, lambda *_: None) == {} and not launched
    found = thresholds_cuda.search(here, ("broadcast",), 256 * MIB, 12.0, lambda *_: None)
    assert launched == [SHORT, STAGED] and set(found[4]) == {"cuda_tuning"} and "shot" not in found[4]["cuda_tuning"]


class Recorded:
    """A graph whose replays are counted."""

    def __init__(self, run: Callable[[], None], calls: int) -> None:
        self._run, self._calls, self.replays = run, calls, 0

    def replay(self) -> None:
        self.replays += 1
        for _ in range(self._calls):
            self._run()
        time.sleep(0.002)


def visited(me: int, world: int) -> tuple[list[float | None], list[int]]:
    recorded: list[Recorded] = []

    class Clock:
        def capture(self, run: Callable[[], None], calls: int) -> Recorded:
            recorded.append(Recorded(run, calls))
            return recorded[-1]

    rank.GpuClock = Clock  # type: ignore[misc, assignment]
    point = Point(world, "all_reduce", 1024)
    caller = rank._Caller(me, rank.TuneTask(world, "cpu", (point,), 2, 1.0, "", graphs=True), torch.device("cpu"))
    times = [caller.visit(0, point, budget_s, must=True) for budget_s in (0.3, 0.0)]
    return [*times, caller.visit(0, point, 0.0, must=False)], [each.replays for each in recorded]


@pytest.mark.timed
def test_replays_are_timed_and_as_many_on_all_ranks() -> None:
    first, second = run_ranks(visited, 2)
    assert first == second
    times, replays = first
    assert times[2] is None and all(us is not None and 100 <= us < 10_000 for us in times[:2]), "µs per call"
    # Each burst starts with one untimed replay; a first visit adds one burst to measure its duration. A replay that
    # takes long, as on a busy machine, is measured less often.
    assert replays[0] >= 2 + 1 + rank.FEWEST_LONG and replays[2] == 0
    assert replays[1] in (1 + rank.FEWEST_LONG, 1 + rank.FEWEST)

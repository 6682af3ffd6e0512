"""Finds thresholds between GPU kernels by measuring each kernel at every size for which it has room."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from . import profile
from .launch import measure, times
from .measurement_points import Point, group_sizes, points
from .thresholds import choose

#: Longest tensors. One-shot and two-shot apply only to all-reduce; the other collectives use LL lines or staging.
LARGEST = {"all_reduce": 8 << 20, "all_gather": 4 << 20, "reduce_scatter": 4 << 20, "broadcast": 4 << 20}
SMALLEST = 16 << 10
VISITS = 3

#: A threshold of SYMM_CUDA_TUNING that uses a kernel wherever it has room; elsewhere the next kernel runs.
_ROOM = 1 << 30
SHORT = f"one_shot_bytes={_ROOM},two_shot_bytes={_ROOM},low_latency_bytes={_ROOM}"
TWO_SHOT = f"one_shot_bytes=0,two_shot_bytes={_ROOM},low_latency_bytes=0"
STAGED = "one_shot_bytes=0,two_shot_bytes=0,low_latency_bytes=0"
#: These tunings, and the collectives to measure with each.
WAYS = {SHORT: tuple(LARGEST), TWO_SHOT: ("all_reduce",), STAGED: tuple(LARGEST)}

Names: TypeAlias = Mapping[Point, str]


@dataclass(frozen=True)
class Way:
    """µs of points, and the algorithms that ran them."""

    us: Mapping[Point, float]
    names: Names


def search(
    here: profile.Key, ops: Iterable[str], largest: int, seconds: float, on_visit: Callable[[Point, float], None]
) -> dict[int, dict[str, Any]]:
    """Spends about ``seconds``; returns ``cuda_tuning`` by number of ranks, where it is better than the default.

    Raises:
        As :func:`torch_symm.tools.tune.launch.measure`.
    """
    world: int = here.hardware["ranks"]
    todo = _points(world, ops, largest)
    usual, ways = _names(todo, world), []
    for tuning, served in WAYS.items():
        own = [point for point in todo if point.op in served]
        ways.append(_measured(here, tuning, own, seconds / len(WAYS), on_visit) if own else Way({}, {}))
    found = {}
    for ranks in group_sizes(world):
        best = choose_all([point for point in todo if point.ranks == ranks], ways, usual)
        if best:
            found[ranks] = {"cuda_tuning": ",".join(f"{name}={value}" for name, value in best.items())}
    return found


def count(world: int, ops: Iterable[str], largest: int) -> int:
    """Number of visits of a search."""
    todo = _points(world, ops, largest)
    return VISITS * sum(point.op in served for served in WAYS.values() for point in todo)


def _points(world: int, ops: Iterable[str], largest: int) -> list[Point]:
    found = []
    for op in ops:
        doublings = (min(LARGEST.get(op, 0), largest) // SMALLEST).bit_length()
        found += points(group_sizes(world), [op], [SMALLEST << shift for shift in range(doublings)])
    return found


def _measured(
    here: profile.Key, tuning: str, todo: Sequence[Point], seconds: float, on_visit: Callable[[Point, float], None]
) -> Way:
    world: int = here.hardware["ranks"]
    with profile.draft(here, {ranks: {"cuda_tuning": tuning} for ranks in group_sizes(world)}) as path:
        # Time calls in graphs, because calls from the host would also take the host's time.
        visits = measure(world, "cuda", todo, seconds, VISITS, on_visit, path, graphs=True)
        return Way(times([visits], 0.0)[0], _names(todo, world, path))


def _names(todo: Iterable[Point], world: int, path: Path | None = None) -> dict[Point, str]:
    """Returns the algorithms that run ``todo`` with the profile at ``path``; without one, by default."""
    source = "measured" if path else "links"
    known = {ranks: profile.prices("cuda", ranks, world, source, path) for ranks in group_sizes(world)}
    return {point: known[point.ranks].price(point.op, point.bytes, 0)[1] for point in todo}


def choose_all(own: Sequence[Point], ways: Sequence[Way], usual: Names) -> dict[str, int]:
    """Returns the thresholds for groups of one size that are better than the defaults, by name.

    Args:
        own: The points of these groups.
        ways: The measurements, in the order of :data:`WAYS`.
        usual: The algorithms of ``own`` by default.
    """
    short, two_shot, staged = ways
    reduces = [point for point in own if point.op == "all_reduce"]
    messages = [point for point in own if point.op != "all_reduce"]

    def limit(own: list[Point], below: Way, above: Way, goes_below: Callable[[Point], bool]) -> int | None:
        differ = [point for point in own if below.names[point] != above.names[point]]
        return choose(differ, message, below.us, above.us, goes_below)

    def usually_two(point: Point) -> bool:
        return usual[point] != staged.names[point]

    two = limit(reduces, two_shot, staged, usually_two)
    # The points that use two-shot if they do not use one-shot.
    in_two = {point for point in reduces if (usually_two(point) if two is None else point.bytes <= two)}
    rest = {point: (two_shot if point in in_two else staged).us[point] for point in reduces}
    one = limit(reduces, short, Way(rest, two_shot.names), lambda point: usual[point] == short.names[point])
    flags = limit(messages, short, staged, lambda point: usual[point] == short.names[point])
    # Zero-copy calls were not measured. By default, their threshold equals the two-shot threshold, so they stay equal.
    found = {"one_shot_bytes": one, "two_shot_bytes": two, "zero_copy_two_shot_bytes": two, "low_latency_bytes": flags}
    return {name: value for name, value in found.items() if value is not None}


def message(point: Point) -> int:
    """Returns the size of the longest message between two ranks, as the plan of a collective counts it."""
    return point.bytes if point.op in ("all_reduce", "broadcast") else point.bytes // point.ranks

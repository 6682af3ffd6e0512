"""Finds the size from which CPU results are written past the cache.

The search compares runs in which all results bypass the cache with runs in which all results go through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from . import profile
from .launch import measure, state, times
from .measurement_points import Point, group_sizes, points
from .rank import Visit
from .thresholds import choose

#: Tensors from 1 to 64 MB: smaller ones fit in all caches, larger ones in none.
SIZES = [1 << shift for shift in range(20, 27)]
NEVER, ALWAYS = 1 << 50, 1
TURNS, VISITS = 2, 3


def search(
    here: profile.Key, ops: Iterable[str], largest: int, seconds: float, on_visit: Callable[[Point, float], None]
) -> dict[int, dict[str, Any]]:
    """Searches for about ``seconds`` for a ``stream_bytes`` that is faster than the default, for each size of group.

    Returns the thresholds by number of ranks, without the sizes of group for which the default is best.

    Raises:
        As :func:`torch_symm.tools.tune.launch.measure`.
    """
    world: int = here.hardware["ranks"]
    todo = _points(world, ops, largest)
    if not todo:
        return {}
    launches: list[dict[Point, list[Visit]]] = []
    # The two values take turns, so that other work of the machine does not affect only one of them.
    for stream_bytes in (NEVER, ALWAYS) * TURNS:
        with profile.draft(here, {ranks: {"stream_bytes": stream_bytes} for ranks in group_sizes(world)}) as path:
            launches.append(measure(world, "cpu", todo, seconds / 2 / TURNS, VISITS, on_visit, path))
    reference_us = state(launches)
    cached, streamed = (times(launches[way::2], reference_us)[0] for way in range(2))
    found = {}
    for ranks in group_sizes(world):
        own = [point for point in todo if point.ranks == ranks and point in cached and point in streamed]
        best = choose(own, touched, cached, streamed, usual(ranks), (ALWAYS, NEVER))
        if best is not None:
            found[ranks] = {"stream_bytes": best}
    return found


def count(world: int, ops: Iterable[str], largest: int) -> int:
    """Number of visits of a search."""
    return 2 * TURNS * VISITS * len(_points(world, ops, largest))


def _points(world: int, ops: Iterable[str], largest: int) -> list[Point]:
    return points(group_sizes(world), ops, [size for size in SIZES if size <= largest])


def usual(ranks: int) -> Callable[[Point], bool]:
    """Returns whether a result goes through the cache by default, in groups of ``ranks``."""
    prices = profile.prices("cpu", ranks, ranks, "links")
    return lambda point: prices.price(point.op, point.bytes, 0)[1] != "staged_streaming"


def touched(point: Point) -> int:
    """Returns the size of the tensors of all ranks together, as the plan of a collective counts them."""
    each = {"all_reduce": 2 * point.ranks, "all_to_all": 2 * point.ranks, "broadcast": point.ranks}
    return point.bytes * each.get(point.op, point.ranks + 1)

"""Where CPU results begin to be written past the cache: both ways are measured, and what was faster counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from . import profile
from .launch import measure, state, times
from .points import Point, group_sizes, points
from .rank import Visit

#: Tensors from 1 to 64 MB: below, all caches hold them; above, none.
SIZES = [1 << shift for shift in range(20, 27)]
NEVER, ALWAYS = 1 << 50, 1
TURNS, VISITS = 2, 3
#: A threshold must save so much of the time of all these calls, else the default stays.
WORTH = 0.01


def search(
    here: profile.Key, ops: Iterable[str], largest: int, seconds: float, heard: Callable[[Point, float], None]
) -> dict[int, dict[str, Any]]:
    """``stream_bytes`` by ranks of a group, where another than the default is better; in about ``seconds``.

    Raises:
        As :func:`torch_symm.tune.launch.measure`.
    """
    world: int = here.hardware["ranks"]
    todo = _points(world, ops, largest)
    if not todo:
        return {}
    launches: list[dict[Point, list[Visit]]] = []
    with TemporaryDirectory(prefix="torch-symm-tune-") as folder:
        # In turn: what else the machine does must not meet one of them alone.
        for stream_bytes in (NEVER, ALWAYS) * TURNS:
            path = Path(folder) / f"{stream_bytes}.json"
            profile.write(path, profile.bare(here, {n: {"stream_bytes": stream_bytes} for n in group_sizes(world)}))
            launches.append(measure(world, "cpu", todo, seconds / 2 / TURNS, VISITS, heard, path))
    reference_us = state(launches)
    cached, streamed = (times(launches[way::2], reference_us)[0] for way in range(2))
    found = {}
    for ranks in group_sizes(world):
        own = [point for point in todo if point.ranks == ranks and point in cached and point in streamed]
        best = choose(own, cached, streamed) if own else None
        if best is not None:
            found[ranks] = {"stream_bytes": best}
    return found


def count(world: int, ops: Iterable[str], largest: int) -> int:
    """Visits of one of both ways."""
    return TURNS * VISITS * len(_points(world, ops, largest))


def _points(world: int, ops: Iterable[str], largest: int) -> list[Point]:
    return points(group_sizes(world), ops, [size for size in SIZES if size <= largest])


def choose(own: list[Point], cached: Mapping[Point, float], streamed: Mapping[Point, float]) -> int | None:
    """The threshold with the least time, calls of all sizes and collectives counting alike; ``None``: the default's."""
    prices = profile.prices("cpu", own[0].ranks, own[0].ranks, "links")

    def cost(stream: Callable[[Point], bool]) -> float:
        return sum(math.log(streamed[point] if stream(point) else cached[point]) for point in own)

    default = cost(lambda point: prices.price(point.op, point.bytes, 0)[1] == "staged_streaming")
    candidates = [ALWAYS, *sorted({touched(point) for point in own}), NEVER]
    costs = [cost(partial(_beyond, limit)) for limit in candidates]
    least = min(costs)
    # Between the last size that the caches serve better and the next, as far from both as may be.
    place = costs.index(least)
    limit = candidates[place]
    if default - least < WORTH * len(own):
        return None
    if limit in (ALWAYS, NEVER):
        return limit
    above = candidates[place + 1]
    return NEVER if above == NEVER else math.isqrt(limit * above)


def _beyond(limit: int, point: Point) -> bool:
    return touched(point) > limit


def touched(point: Point) -> int:
    """Bytes of the tensors of all ranks together, as the plan of a collective counts them."""
    each = {"all_reduce": 2 * point.ranks, "all_to_all": 2 * point.ranks, "broadcast": point.ranks}
    return point.bytes * each.get(point.op, point.ranks + 1)

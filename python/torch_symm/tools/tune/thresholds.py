"""Where one way to serve a collective ends and the next begins: what was faster when both were measured. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from .points import Point

#: A threshold must save so much of the time of all the calls that it decides on, else the default stays.
WORTH = 0.01


def choose(
    own: Sequence[Point],
    length: Callable[[Point], int],
    below: Mapping[Point, float],
    above: Mapping[Point, float],
    usual: Callable[[Point], bool],
    edges: tuple[int, int] | None = None,
) -> int | None:
    """The longest that goes the one way, so that all calls together take least; ``None``: as by default.

    Calls of all sizes and collectives count alike, by the logarithm of their time.

    Args:
        own: What the threshold decides on.
        length: What is compared with it.
        below: µs of each point the one way.
        above: And the other.
        usual: Whether a point goes the one way by default.
        edges: The threshold where all points go the other way, and where all go the one: by default those of doublings
            that were not measured.
    """

    def cost(goes_below: Callable[[Point], bool]) -> float:
        return sum(math.log(below[point] if goes_below(point) else above[point]) for point in own)

    def cost_at(limit: int) -> float:
        return cost(lambda point: length(point) <= limit)

    if not own:
        return None
    lengths = sorted({length(point) for point in own})
    # As far as may be from the last size that is better the one way, and from the next.
    between = [math.isqrt(low * high) for low, high in pairwise(lengths)]
    least, most = edges or (math.isqrt(lengths[0] ** 2 // 2), math.isqrt(lengths[-1] ** 2 * 2))
    best = min((least, *between, most), key=cost_at)
    return best if cost(usual) - cost_at(best) >= WORTH * len(own) else None

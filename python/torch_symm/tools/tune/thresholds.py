"""Finds thresholds between two algorithms from measurements of both, without side effects."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from .measurement_points import Point

#: A threshold must save this share of the time of all calls that it affects; otherwise the default stays.
WORTH = 0.01


def choose(
    own: Sequence[Point],
    length: Callable[[Point], int],
    below: Mapping[Point, float],
    above: Mapping[Point, float],
    usual: Callable[[Point], bool],
    edges: tuple[int, int] | None = None,
) -> int | None:
    """Returns the threshold that minimizes the time of all calls together; ``None`` for the default.

    Calls of all sizes and collectives have equal weight, by the logarithm of their time.

    Args:
        own: The points that the threshold affects.
        length: Returns the value that is compared with the threshold.
        below: µs of each point below the threshold.
        above: µs of each point above it.
        usual: Whether a point is below the default threshold.
        edges: A threshold below the lengths of all points, and one above them. By default they are the smallest length
            divided by √2, and the largest length multiplied by √2.
    """

    def cost(goes_below: Callable[[Point], bool]) -> float:
        return sum(math.log(below[point] if goes_below(point) else above[point]) for point in own)

    def cost_at(limit: int) -> float:
        return cost(lambda point: length(point) <= limit)

    if not own:
        return None
    lengths = sorted({length(point) for point in own})
    # Candidates between two neighbouring lengths are their geometric means.
    between = [math.isqrt(low * high) for low, high in pairwise(lengths)]
    least, most = edges or (math.isqrt(lengths[0] ** 2 // 2), math.isqrt(lengths[-1] ** 2 * 2))
    best = min((least, *between, most), key=cost_at)
    return best if cost(usual) - cost_at(best) >= WORTH * len(own) else None

"""Starts the rank processes and gathers their reports."""

from __future__ import annotations

import statistics
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from torch_symm.launch import ranks
from torch_symm.launch.messages import reported_in_time

from . import rank as rank_process
from .measurement_points import SLICE, STEP, Point
from .rank import Visit

#: The visits of each point, launch by launch.
Launches: TypeAlias = Sequence[Mapping[Point, Sequence[Visit]]]
#: References that differ by no more than this factor belong to one state.
SAME = 1.1


def measure(
    world: int,
    device: str,
    points: Sequence[Point],
    seconds: float,
    visits: int,
    on_visit: Callable[[Point, float], None],
    profile: Path | None = None,
    graphs: bool = False,
) -> dict[Point, list[Visit]]:
    """Returns the visits of each point; ``on_visit`` is called for each.

    ``world`` processes visit every point ``visits`` times, at least once, within about ``seconds``. ``profile``
    overrides the thresholds that would be found. ``graphs``: see :class:`torch_symm.tools.tune.rank.TuneTask`.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank failed; its text holds the rank's traceback.
        torch.multiprocessing.ProcessExitedException: a rank was killed or ended the process.
        StalledError: rank 0 sent no visit for ``seconds`` and :data:`torch_symm.tools.tune.rank.STILL_S`.
    """
    results = ranks.queue()
    still_s = seconds + rank_process.STILL_S
    found: dict[Point, list[Visit]] = {point: [] for point in points}
    distinct = tuple(found)
    with tempfile.TemporaryDirectory(prefix="torch-symm-tune-") as folder:
        rendezvous = "symm+" + (Path(folder) / "rendezvous").as_uri()
        task = rank_process.TuneTask(world, device, distinct, visits, seconds, rendezvous, graphs)
        settings = {"SYMM_COST_PROFILE": str(profile)} if profile else {}
        with ranks.started(rank_process.main, (task, results), world, warm=True, settings=settings) as started:
            for message in reported_in_time(started, results, 1, still_s, still_s, rank_process.TuneDone):
                if isinstance(message, Visit):
                    found[distinct[message.index]].append(message)
                    on_visit(distinct[message.index], message.us)
    return found


def state(launches: Launches) -> float:
    """Returns µs of the reference in the machine's most frequent state: the one to which most visits are close."""
    references = sorted(visit.reference_us for launch in launches for visits in launch.values() for visit in visits)

    def alike(reference: float) -> int:
        return bisect_right(references, reference * SAME) - bisect_left(references, reference / SAME)

    return max(references, key=alike)


def times(launches: Launches, reference_us: float) -> tuple[dict[Point, float], float]:
    """Returns µs of each point that was visited while the machine was in a state, and the share of such visits.

    The time is the median of these visits; for steps the minimum, because other work of the node only adds to it.
    ``reference_us``: the time of the reference in that state.
    """
    found, alike, total = {}, 0, 0
    for point in launches[0]:
        visits = [visit for launch in launches for visit in launch[point]]
        counting = [v.us for v in visits if reference_us / SAME <= v.reference_us <= reference_us * SAME]
        alike, total = alike + len(counting), total + len(visits)
        if counting:
            found[point] = min(counting) if point.op in (STEP, SLICE) else statistics.median(counting)
    return found, alike / total


def all_times(launches: Launches, reference_us: float) -> tuple[dict[Point, float], float]:
    """Like :func:`times`; a point that was never visited in that state has the median of its other visits."""
    found, share = times(launches, reference_us)
    for point in launches[0].keys() - found.keys():
        found[point] = statistics.median(visit.us for launch in launches for visit in launch[point])
    return {point: found[point] for point in launches[0]}, share

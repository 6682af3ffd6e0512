"""Compares predictions and measurements, at sizes that calibration did not measure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .measurement_points import OPS, Point
from .profile import prices

#: The goal of a model: maximum of the median and of the worst relative error.
GOAL_MEDIAN, GOAL_WORST = 0.10, 0.30


@dataclass(frozen=True)
class Compared:
    """A point: µs as measured, as predicted from the profile, from only the links, and by torch's model."""

    ranks: int
    op: str
    bytes: int
    algorithm: str
    measured: float
    predicted: float
    links: float
    torch: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return abs(self.predicted / self.measured - 1)


def compare(device: str, world: int, times: Mapping[Point, float], profile: Path | None) -> list[Compared]:
    """Compares the models' answers with ``times``. torch's model assumes one node for all ranks, to its advantage.

    Raises:
        SymmConfigError: there is no profile of this hardware, or the profile is faulty.
    """
    found = []
    for ranks in sorted({point.ranks for point in times}):
        ours = prices(device, ranks, world, "measured", profile)
        if ours is None:
            from torch_symm._native import load

            raise load().SymmConfigError("there is no profile of this hardware: run `python -m torch_symm tune` first")
        links, theirs = prices(device, ranks, world, "links"), prices(device, ranks, world, "torch")
        for point, measured in times.items():
            if point.ranks != ranks:
                continue
            requested = point.op, point.bytes, 0
            us, algorithm, _ = ours.price(*requested)
            answers = us, links.price(*requested)[0], theirs.price(*requested)[0]
            found.append(Compared(ranks, point.op, point.bytes, algorithm, measured, *answers))
    return found


def summary(compared: Sequence[Compared]) -> list[list[str]]:
    """Returns rows of a table: for each group and collective, and for all, the errors of each model."""
    rows = []
    for ranks in sorted({one.ranks for one in compared}):
        for op in OPS:
            part = [one for one in compared if (one.ranks, one.op) == (ranks, op)]
            if part:
                rows.append([str(ranks), op, *_errors(part)])
    rows.append(["all", "", *_errors(compared)])
    return rows


HEADINGS = ("ranks", "collective", "median", "worst", "links: median", "worst", "torch: median", "worst")


def _errors(part: Sequence[Compared]) -> list[str]:
    models: tuple[Callable[[Compared], float], ...] = (
        lambda one: one.predicted,
        lambda one: one.links,
        lambda one: one.torch,
    )
    cells = []
    for model in models:
        errors = [abs(model(one) / one.measured - 1) for one in part]
        cells += [f"{statistics.median(errors):.1%}", f"{max(errors):.0%}"]
    return cells

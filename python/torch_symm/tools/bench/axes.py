"""The parts that all figures of runs share: axes with plain numbers, and bars where only one size was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .units import format_size

COLORS = ("#0b6e4f", "#8a8a8a", "#b5541c", "#3b5b92", "#7a4b94", "#a08000")
#: More ticks than this would overlap.
MOST_TICKS = 10


def pyplot() -> Any:
    """Returns matplotlib's pyplot, which draws into files and repeats an SVG byte for byte.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib  # type: ignore[import-not-found, unused-ignore]

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "torch-symm", "svg.fonttype": "none"})
    from matplotlib import pyplot as drawing  # type: ignore[import-not-found, unused-ignore]

    return drawing


def ticks(low: float, high: float) -> list[float]:
    """Returns 1, 2 and 5 times powers of ten that enclose ``low`` and ``high``; in a long range only the powers."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = [step * 10.0**power for power in range(first, last + 2) for step in (1, 2, 5)]
    below = max(step for step in steps if step <= low)
    above = min(step for step in steps if step >= high and step > below)
    wanted = [step for step in steps if below <= step <= above]
    if len(wanted) <= MOST_TICKS:
        return wanted
    return [10.0**power for power in range(first, last + 1)]


def plain(number: float) -> str:
    """Returns the number without an exponent: ``0.5``, ``600``, ``20,000``."""
    return f"{number:,.12g}"


def times(axis: Any, low: float, high: float) -> None:
    """Makes the vertical axis logarithmic from ``low`` to ``high``, with plain numbers."""
    marks = ticks(low, high)
    axis.set_yscale("log")
    axis.set_yticks(marks, [plain(mark) for mark in marks], fontsize=8)
    axis.minorticks_off()
    axis.set_ylim(marks[0], marks[-1])


def sizes(axis: Any, measured: Sequence[int], most: int = 8) -> None:
    """Makes the horizontal axis show sizes, about ``most`` of them with labels."""
    shown = measured[:: max(1, len(measured) // most)]
    axis.set_xscale("log", base=2)
    axis.set_xticks(shown, [format_size(size) for size in shown], fontsize=8)
    axis.minorticks_off()
    axis.grid(True, which="major", linewidth=0.4, alpha=0.5)


def bars(axis: Any, rows: Sequence[tuple[str, Mapping[str, float]]], label: str) -> None:
    """Draws a group of bars for each of ``rows``, a bar for each side in it, with its value."""
    sides = list(dict.fromkeys(side for _, values in rows for side in values))
    place, middles, highest = 0.0, [], max(max(values.values()) for _, values in rows)
    for _, values in rows:
        begun = place
        for side, value in values.items():
            axis.barh(place, value, 0.8, color=COLORS[sides.index(side) % len(COLORS)])
            said = f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
            axis.text(value + highest / 100, place, said, va="center", fontsize=7)
            place += 1.0
        middles.append((begun + place - 1.0) / 2)
        place += 0.7
    axis.set_yticks(middles, [name for name, _ in rows], fontsize=8)
    axis.set_ylim(place - 0.9, -0.7)
    axis.set_xlim(0, highest * 1.15)
    axis.set_xlabel(label)
    for number, side in enumerate(sides):
        axis.barh(0, 0, 0, color=COLORS[number % len(COLORS)], label=side)
    # Put the legend above the bars, because elsewhere it would cover them.
    axis.legend(fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)

"""Plots time and bus bandwidth over size, of all sides, with the limit set by plain copies (needs matplotlib)."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import axes, columns
from .record import Figure, Found
from .units import format_size

#: Formats by the ending of the file.
ENDINGS = (".png", ".svg", ".pdf", ".html")
TIME, BANDWIDTH = "µs per call", "bus bandwidth, GB/s"


def draw(rows: Sequence[Found], heading: str, path: Path, bound: str = "memory") -> None:
    """Writes a figure of ``rows`` to ``path``: a row of two plots for each operation, type, reduction and root.

    Operations with one size each share a row, as bars. ``bound`` names the drawn limit. ``.html`` has figure and table
    in one self-contained file.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
        ValueError: no row can be drawn, or matplotlib rejects the figure.
    """
    pyplot = axes.pyplot()
    measured = drawable(rows)
    if not measured:
        raise ValueError("--plot: no row with a size was measured")
    kinds = list(dict.fromkeys(_kind(found) for found in measured))
    parts = [[found for found in measured if _kind(found) == kind] for kind in kinds]
    curves = [part for part in parts if len(part) > 1]
    single = [found for part in parts if len(part) == 1 for found in part]
    heights = [3.9] * len(curves)
    if single:
        heights.append(1.4 + 0.35 * len(single) + 0.18 * sum(len(_bars(found, "median_us")) for found in single))
    figure, panels = pyplot.subplots(
        len(heights), 2, figsize=(12.8, sum(heights)), squeeze=False, height_ratios=heights
    )
    for (left, right), part in zip(panels, curves, strict=False):
        _curves(left, part, TIME, "median_us")
        _curves(right, part, BANDWIDTH, "busbw")
        # The bytes that must move are proportional to the size, so the rate is constant.
        limits = [
            found.wanted.size / found.limit_us / 1e3 * found.wanted.bus_factor for found in part if found.limit_us
        ]
        if limits:
            right.axhline(max(limits), linestyle=":", color="#c0392b", label=f"limit of {bound}")
        shown = [us for found in part for us in _bars(found, "median_us").values()]
        axes.times(left, min(shown), max(shown))
        right.set_ylim(bottom=0)
        for axis in (left, right):
            axis.set_title(f"{_name(part[0])}, {part[0].wanted.world} ranks", fontsize=10)
            axis.legend(fontsize=8)
    if single:
        for axis, label, value in zip(panels[-1], (TIME, BANDWIDTH), ("median_us", "busbw"), strict=True):
            groups = [(f"{_name(found)}\n{format_size(found.wanted.size)}", _bars(found, value)) for found in single]
            axes.bars(axis, groups, f"{label}; {single[0].wanted.world} ranks")
    figure.text(0.5, 0.005, heading, fontsize=8, ha="center")
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    if path.suffix == ".html":
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
        path.write_text(_page(rows, heading, drawn.getvalue()))
    else:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)
    pyplot.close(figure)


def drawable(rows: Sequence[Found]) -> list[Found]:
    """Returns the rows with a figure and a size; a barrier has no size."""
    return [found for found in rows if any(found.sides.values()) and found.wanted.size]


def title(machine: Mapping[str, Any]) -> str:
    """Returns the data that must accompany a figure, from the fields of `Machine`: date, processor, cores, torch."""
    return f"{machine['date'][:10]}, {machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}"


def _kind(found: Found) -> tuple[str, ...]:
    wanted = found.wanted
    redop = "" if wanted.redop == "none" else wanted.redop
    return (wanted.op, wanted.dtype, redop, f"root {wanted.root}" if wanted.root > 0 else "")


def _name(found: Found) -> str:
    return ", ".join(filter(None, _kind(found)))


def _value(found: Found, figure: Figure, value: str) -> float:
    return found.busbw(figure) if value == "busbw" else figure.median_us


def _bars(found: Found, value: str) -> dict[str, float]:
    """Values of all sides, by side and placement."""
    return {
        f"{side}, {placement.replace('_', '-')}": _value(found, figure, value)
        for side, placed in found.sides.items()
        for placement, figure in placed.items()
    }


def _curves(axis: Any, part: Sequence[Found], label: str, value: str) -> None:
    sides = list(dict.fromkeys(side for found in part for side in found.sides))
    for color, side in zip(axes.COLORS * len(sides), sides, strict=False):
        for placement, style in (("in_place", "o-"), ("out_of_place", "s--")):
            points: list[tuple[int, float]] = [
                (found.wanted.size, _value(found, one, value))
                for found in part
                if (one := found.sides.get(side, {}).get(placement)) is not None
            ]
            if points:
                name = f"{side}, {placement.replace('_', '-')}"
                axis.plot(*zip(*points, strict=True), style, color=color, label=name, markersize=4)
    axes.sizes(axis, [found.wanted.size for found in part])
    axis.set_xlabel("size")
    axis.set_ylabel(label)


def _page(rows: Sequence[Found], heading: str, drawn: str) -> str:
    table = "\n".join(columns.table(rows))
    svg = drawn[drawn.index("<svg") :]
    title = html.escape(heading)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>\n'
        f"<body><h1>torch-symm bench</h1><p>{title}</p>\n{svg}\n<pre>{html.escape(table)}</pre></body></html>\n"
    )

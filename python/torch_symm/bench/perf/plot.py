"""Time and bus bandwidth over size, of all sides, with what plain copies would allow (needs matplotlib)."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..units import format_size
from .columns import headings, lines
from .record import Figure, Found

#: Formats by the ending of the file.
ENDINGS = (".png", ".svg", ".pdf", ".html")
_COLORS = ("#0b6e4f", "#8a8a8a", "#b5541c", "#3b5b92", "#7a4b94", "#a08000")


def draw(rows: Sequence[Found], heading: str, path: Path, bound: str = "memory") -> None:
    """Writes a figure of ``rows`` to ``path``: a row of two plots for each operation, type, reduction and root.

    ``bound``: what sets the limit that is drawn. ``.html`` has figure and table in one file that needs no other.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    import matplotlib  # type: ignore[import-not-found, unused-ignore]

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "torch-symm", "svg.fonttype": "none"})
    from matplotlib import pyplot  # type: ignore[import-not-found, unused-ignore]

    kinds = list(dict.fromkeys(_kind(found) for found in rows))
    figure, axes = pyplot.subplots(len(kinds), 2, figsize=(12.8, 3.9 * len(kinds)), squeeze=False)
    for (left, right), kind in zip(axes, kinds, strict=True):
        part = [found for found in rows if _kind(found) == kind]
        _curves(left, part, "µs per call", lambda found, one: one.median_us)
        _curves(right, part, "bus bandwidth, GB/s", Found.busbw)
        # The bytes that must move grow with the size, and so the rate is one.
        limits = [
            found.wanted.size / found.limit_us / 1e3 * found.wanted.bus_factor for found in part if found.limit_us
        ]
        if limits:
            right.axhline(max(limits), linestyle=":", color="#c0392b", label=f"limit of {bound}")
        left.set_yscale("log")
        right.set_ylim(bottom=0)
        for axis in (left, right):
            axis.set_title(", ".join(filter(None, kind)) + f", {part[0].wanted.world} ranks", fontsize=10)
            axis.legend(fontsize=8)
    figure.text(0.5, 0.005, heading, fontsize=8, ha="center")
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    if path.suffix == ".html":
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
        path.write_text(_page(rows, heading, drawn.getvalue()))
    else:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)
    pyplot.close(figure)


def _kind(found: Found) -> tuple[str, ...]:
    wanted = found.wanted
    redop = "" if wanted.redop == "none" else wanted.redop
    return (wanted.op, wanted.dtype, redop, f"root {wanted.root}" if wanted.root > 0 else "")


def _curves(axis: Any, part: Sequence[Found], label: str, value: Any) -> None:
    sides = list(dict.fromkeys(side for found in part for side in found.sides))
    for color, side in zip(_COLORS * len(sides), sides, strict=False):
        for placement, style in (("in_place", "o-"), ("out_of_place", "s--")):
            points: list[tuple[int, Figure, Found]] = [
                (found.wanted.size, one, found)
                for found in part
                if (one := found.sides.get(side, {}).get(placement)) is not None
            ]
            if points:
                name = f"{side}, {placement.replace('_', '-')}"
                values = [value(found, one) for _, one, found in points]
                axis.plot([size for size, _, _ in points], values, style, color=color, label=name, markersize=4)
    sizes = [found.wanted.size for found in part]
    axis.set_xscale("log", base=2)
    shown = sizes[:: max(1, len(sizes) // 8)]
    axis.set_xticks(shown, [format_size(size) for size in shown], fontsize=8)
    axis.minorticks_off()
    axis.set_xlabel("size")
    axis.set_ylabel(label)
    axis.grid(True, which="major", linewidth=0.4, alpha=0.5)


def _page(rows: Sequence[Found], heading: str, drawn: str) -> str:
    several = any(len(found.sides) > 1 for found in rows)
    table = "\n".join([*headings(several), *(line for found in rows for line in lines(found, several))])
    svg = drawn[drawn.index("<svg") :]
    title = html.escape(heading)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>\n'
        f"<body><h1>torch-symm bench</h1><p>{title}</p>\n{svg}\n<pre>{html.escape(table)}</pre></body></html>\n"
    )

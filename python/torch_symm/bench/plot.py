"""A run as curves, time over size, for each operation (needs matplotlib)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .record import Cell, Row, Side
from .units import format_size


def draw(rows: Sequence[Row], heading: str, path: Path) -> None:
    """Writes a figure of ``rows``, a plot for each operation, type and number of ranks.

    The ending of ``path`` says the format, such as ``.svg``.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no row has a size.
    """
    plots = list(dict.fromkeys((row.cell.op, row.cell.dtype, row.cell.world) for row in rows if row.cell.size))
    if not plots:
        raise ValueError("--plot: nothing that was measured has a size")

    import matplotlib  # type: ignore[import-not-found, unused-ignore]

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "torch-symm", "svg.fonttype": "none"})
    from matplotlib import pyplot  # type: ignore[import-not-found, unused-ignore]

    figure, axes = pyplot.subplots(1, len(plots), figsize=(6.4 * len(plots), 3.8), squeeze=False, sharey=True)
    for axis, plot in zip(axes[0], plots, strict=True):
        part = [row for row in rows if (row.cell.op, row.cell.dtype, row.cell.world) == plot]
        part.sort(key=lambda row: row.cell.size)
        sizes = [row.cell.size for row in part]
        axis.plot(sizes, [row.tested.median_us for row in part], "o-", color="#0b6e4f", label=part[0].tested.backend)
        peers = [(row.cell.size, row.peer) for row in part if row.peer is not None]
        if peers:
            theirs = [peer.median_us for _, peer in peers]
            axis.plot([size for size, _ in peers], theirs, "s--", color="#8a8a8a", label=peers[0][1].backend)
        for row in part:
            if row.ratio is not None:
                place, below = (row.cell.size, row.tested.median_us), (0, -14)
                says = f"{row.ratio:.0f}×" if row.ratio >= 10 else f"{row.ratio:.1f}×"
                axis.annotate(says, place, below, textcoords="offset points", ha="center", fontsize=7)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_ylim(bottom=min(row.tested.median_us for row in part) / 3)
        axis.set_xticks(sizes, [format_size(size) for size in sizes], fontsize=8)
        axis.minorticks_off()
        axis.set_title(f"{plot[0]}, {plot[1]}, {plot[2]} ranks", fontsize=10)
        axis.set_xlabel("size of the tensor")
        axis.set_ylabel("µs per call (median)")
        axis.grid(True, which="major", linewidth=0.4, alpha=0.5)
        axis.legend(loc="upper left")
    figure.text(0.5, 0.015, heading, fontsize=8, ha="center")
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)
    pyplot.close(figure)


def title(machine: Mapping[str, Any]) -> str:
    """What a figure has to be quoted with, from the fields of `Machine`: date, processor, cores, torch."""
    return f"{machine['date'][:10]}, {machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}"


def read(path: Path) -> tuple[list[Row], str]:
    """The rows of a run that was written to ``path`` as JSON, and its title.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no run.
    """
    try:
        run = json.loads(path.read_text())
        rows = [
            Row(
                **{
                    **row,
                    "cell": Cell(**row["cell"]),
                    "tested": Side(**row["tested"]),
                    "peer": Side(**row["peer"]) if row["peer"] else None,
                }
            )
            for row in run["rows"]
        ]
        return rows, title(run["machine"])
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"--draw: {path} holds no run of this benchmark: {error}") from error

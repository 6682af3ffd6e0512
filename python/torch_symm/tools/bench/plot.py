"""A run as curves, time over size, for each operation; as bars if it has one size (needs matplotlib)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_symm.tools.command import check_figures

from . import axes
from .record import Cell, Row, Side
from .units import format_size


def draw(rows: Sequence[Row], heading: str, path: Path) -> None:
    """Writes a figure of ``rows``, a plot for each operation, type and number of ranks; bars if all have one size.

    The ending of ``path`` says the format, such as ``.svg``.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no row has a size.
    """
    measured = [row for row in rows if row.cell.size]
    if not measured:
        raise ValueError("--plot: nothing that was measured has a size")
    pyplot = axes.pyplot()
    if len({row.cell.size for row in measured}) == 1:
        figure, axis = pyplot.subplots(figsize=(9.6, 1.6 + 0.5 * len(measured)))
        label = f"µs per call (median) of {format_size(measured[0].cell.size)}"
        axes.bars(axis, [(_name(row), _sides(row)) for row in measured], label)
    else:
        kinds = list(dict.fromkeys(_name(row) for row in measured))
        figure, panels = pyplot.subplots(1, len(kinds), figsize=(6.4 * len(kinds), 3.8), squeeze=False, sharey=True)
        for axis, kind in zip(panels[0], kinds, strict=True):
            _curves(axis, kind, sorted((r for r in measured if _name(r) == kind), key=lambda row: row.cell.size))
        times = [us for row in measured for us in _sides(row).values()]
        axes.times(panels[0][0], min(row.tested.median_us for row in measured) / 3, max(times))
    figure.text(0.5, 0.015, heading, fontsize=8, ha="center")
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)
    pyplot.close(figure)


def _name(row: Row) -> str:
    return f"{row.cell.op}, {row.cell.dtype}, {row.cell.world} ranks"


def _sides(row: Row) -> dict[str, float]:
    """Medians by backend, the tested one first."""
    return {side.backend: side.median_us for side in (row.tested, row.peer) if side is not None}


def _curves(axis: Any, kind: str, part: Sequence[Row]) -> None:
    measured = [row.cell.size for row in part]
    axis.plot(measured, [row.tested.median_us for row in part], "o-", color="#0b6e4f", label=part[0].tested.backend)
    peers = [(row.cell.size, row.peer) for row in part if row.peer is not None]
    if peers:
        theirs = [peer.median_us for _, peer in peers]
        axis.plot([size for size, _ in peers], theirs, "s--", color="#8a8a8a", label=peers[0][1].backend)
    for row in part:
        if row.ratio is not None:
            place, below = (row.cell.size, row.tested.median_us), (0, -14)
            says = f"{row.ratio:.0f}×" if row.ratio >= 10 else f"{row.ratio:.1f}×"
            axis.annotate(says, place, below, textcoords="offset points", ha="center", fontsize=7)
    axes.sizes(axis, measured, len(measured))
    axis.set_title(kind, fontsize=10)
    axis.set_xlabel("size of the tensor")
    axis.set_ylabel("µs per call (median)")
    axis.legend(loc="upper left")


def title(machine: Mapping[str, Any]) -> str:
    """What a figure has to be quoted with, from the fields of `Machine`: date, processor, cores, torch."""
    return f"{machine['date'][:10]}, {machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}"


def _figures(one: Side | Cell) -> list[object]:
    """Returns the values of all fields but names."""
    return [value for name, value in vars(one).items() if name not in ("backend", "op", "dtype", "redop")]


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
        for row in rows:
            check_figures(_figures(row.cell) + _figures(row.tested) + (_figures(row.peer) if row.peer else []))
            check_figures([] if row.ratio is None else [row.ratio])
        return rows, title(run["machine"])
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"--draw: {path} holds no run of this benchmark: {error}") from error

"""Draws the node: memory nodes with threads and caches, GPUs and their links (needs matplotlib)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_symm._repr import counted

from .cpu import ranges

ENDINGS = (".svg", ".png", ".pdf")
#: No GPU so far has more NVLinks. If the pairs of a GPU have more links in all, they share the GPU's through switches.
MOST_LINKS = 18
#: Maximum number of GPUs for which each path through PCIe has its own line.
FEW = 4
GREEN, GREY = "#0b6e4f", "#bbbbbb"
#: Minimum width, of 10 in all, of a box with text.
NARROW = 0.62


#: Points where lines meet: id, label and position.
HUBS = (("switch", "NVSwitch", (5.0, 6.3)), ("pcie", "PCIe and host", (5.0, 5.7)))


def lines(gpus: int, nvlinks: Sequence[Sequence[int]]) -> list[tuple[int, int | str, int]]:
    """Returns each line: a GPU; another GPU, ``"switch"`` or ``"pcie"``; the number of NVLinks, 0 for PCIe."""
    links = [[nvlinks[one][other] if one < len(nvlinks) else 0 for other in range(gpus)] for one in range(gpus)]
    switched = {one for one in range(gpus) if sum(links[one]) > MOST_LINKS}
    found: list[tuple[int, int | str, int]] = [(one, "switch", max(links[one])) for one in sorted(switched)]
    apart = set()
    for one in range(gpus):
        for other in range(one):
            if {one, other} <= switched and links[one][other]:
                continue
            if links[one][other] or gpus <= FEW:
                found.append((other, one, links[one][other]))
            else:
                apart |= {one, other}
    return found + [(one, "pcie", 0) for one in sorted(apart)]


def draw(
    processor: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]], nvlinks: Sequence[Sequence[int]], path: Path
) -> None:
    """Writes the drawing to ``path``, in the format of its ending. ``nvlinks[i][j]``: links between two GPUs.

    Each memory node shows the cores that may be used and the caches that they share. Without GPUs, the ranks are drawn
    above. In an SVG, a core has the id of its first thread, ``core-0``, and so has a cache, ``L2-0``; a rank has
    ``rank-0``, a GPU ``gpu-0``, a line ``link-0-1``, a line to the switches ``link-0-switch``, a line to PCIe
    ``link-0-pcie``, and a memory node ``node-0``.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    import matplotlib  # type: ignore[import-not-found, unused-ignore]

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "torch-symm", "svg.fonttype": "none"})
    from matplotlib import pyplot  # type: ignore[import-not-found, unused-ignore]

    figure, axis = pyplot.subplots(figsize=(8, 3.2 + (5 if gpus else 0.8)))
    axis.set_axis_off()
    axis.set_title(str(processor["model"]), fontsize=10)
    nodes = processor["nodes"]
    width = 10.0 / max(1, len(nodes))
    for number, (node, threads) in enumerate(nodes.items()):
        _node(axis, processor, node, threads, number * width + 0.1, width - 0.2)
    if not gpus:
        _ranks(axis, processor)
    spots = [
        (5 + 3.6 * math.cos(angle), 6 + 2.6 * math.sin(angle))
        for angle in (2 * math.pi * number / max(1, len(gpus)) for number in range(len(gpus)))
    ]
    box = {"boxstyle": "round", "facecolor": "white", "edgecolor": GREEN}
    middles = {name: (label, spot) for name, label, spot in HUBS}
    found = lines(len(gpus), nvlinks)
    for one, other, links in found:
        (x, y), (u, v) = spots[one], middles[other][1] if isinstance(other, str) else spots[other]
        style: dict[str, Any] = (
            {"color": GREEN, "linewidth": 0.6 + links / 6} if links else {"color": GREY, "linestyle": ":"}
        )
        axis.plot([x, u], [y, v], zorder=1, gid=f"link-{one}-{other}", **style)
        axis.text((x + u) / 2, (y + v) / 2, f"NV{links}" if links else "PCIe", fontsize=7, ha="center")
    for hub in dict.fromkeys(other for _, other, _ in found if isinstance(other, str)):
        label, (x, y) = middles[hub]
        axis.text(x, y, label, ha="center", va="center", fontsize=8, zorder=2, bbox=box, gid=hub)
    for number, (x, y) in enumerate(spots):
        text = f"cuda:{number}\n{gpus[number]['name']}"
        axis.text(x, y, text, ha="center", va="center", fontsize=8, zorder=2, bbox=box, gid=f"gpu-{number}")
    axis.set_xlim(0, 10)
    axis.set_ylim(-0.2, 9.4 if gpus else 3.6)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)
    pyplot.close(figure)


def _node(
    axis: Any, processor: Mapping[str, Any], node: str, threads: Sequence[int], left: float, width: float
) -> None:
    """Draws a memory node: a column for each core, and each cache above the cores that share it."""
    _box(axis, (left, 0, width, 2.4), "", f"node-{node}", "#eef3f0")
    cores = [core for core in processor["threads"] if set(core) & set(threads)]
    column = (width - 0.2) / max(1, len(cores))
    ends = {thread: number for number, core in enumerate(cores) for thread in core}
    for number, core in enumerate(cores):
        said = "" if column < NARROW else f"core\n{ranges(core)}"
        _box(axis, (left + 0.1 + number * column, 0.1, column, 0.55), said, f"core-{core[0]}", "#cfe5da")
    if cores and column < NARROW:
        _label(axis, left + width / 2, 0.375, counted(len(cores), "core"))
    for row, cache in enumerate(processor["caches"]):
        groups = [group for group in cache["shared"] if set(group) & set(ends)]
        for group in groups:
            spanned = [ends[thread] for thread in group if thread in ends]
            first, count = min(spanned), max(spanned) - min(spanned) + 1
            place = (left + 0.1 + first * column, 0.72 + 0.36 * row, count * column, 0.32)
            said = "" if count * column < NARROW else f"{cache['name']} {cache['size']}"
            _box(axis, place, said, f"{cache['name']}-{group[0]}", "white")
        if groups and all(len(group) * column < NARROW for group in groups):
            says = f"{len(groups)} × {cache['name']} {cache['size']}"
            _label(axis, left + width / 2, 0.88 + 0.36 * row, says)
    said = f"NUMA node {node}: hardware threads {ranges(threads)}"
    axis.text(left + width / 2, 2.18, said, ha="center", va="center", fontsize=8)


def _ranks(axis: Any, processor: Mapping[str, Any]) -> None:
    """Draws the ranks above the memory nodes, because they are not pinned."""
    ranks = int(processor["ranks"])
    column = 9.8 / ranks
    for rank in range(ranks):
        said = "" if column < NARROW else f"rank {rank}"
        _box(axis, (0.1 + rank * column, 3.0, column, 0.45), said, f"rank-{rank}", "white")
    usable = ranges(processor["usable"])
    said = f"{counted(ranks, 'rank')}, each on any of the hardware threads {usable}: nothing pins them"
    axis.text(5, 2.7, said, ha="center", va="center", fontsize=8)


def _label(axis: Any, x: float, y: float, said: str) -> None:
    """Writes over boxes that are too narrow for their own text."""
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
    axis.text(x, y, said, ha="center", va="center", fontsize=8, bbox=box)


def _box(axis: Any, place: tuple[float, float, float, float], said: str, name: str, color: str) -> None:
    """Draws a box at ``place``: left, bottom, width and height."""
    left, bottom, width, height = place
    axis.fill(
        [left, left + width, left + width, left],
        [bottom, bottom, bottom + height, bottom + height],
        facecolor=color,
        edgecolor=GREEN,
        linewidth=0.8,
        gid=name,
    )
    axis.text(left + width / 2, bottom + height / 2, said, ha="center", va="center", fontsize=8)

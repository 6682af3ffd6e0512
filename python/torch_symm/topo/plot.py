"""A drawing of the host: memory nodes with threads and caches, GPUs and their links (needs matplotlib)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .cpu import ranges

ENDINGS = (".svg", ".png", ".pdf")


def draw(
    processor: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]], nvlinks: Sequence[Sequence[int]], path: Path
) -> None:
    """Writes the drawing to ``path``, whose ending says the format. ``nvlinks[i][j]``: links between two GPUs.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    import matplotlib  # type: ignore[import-not-found, unused-ignore]

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "torch-symm", "svg.fonttype": "none"})
    from matplotlib import pyplot  # type: ignore[import-not-found, unused-ignore]

    figure, axis = pyplot.subplots(figsize=(8, 3.2 + (5 if gpus else 0)))
    axis.set_axis_off()
    axis.set_title(str(processor["model"]), fontsize=10)
    nodes = processor["nodes"]
    width = 10.0 / max(1, len(nodes))
    for number, (node, cores) in enumerate(nodes.items()):
        left = number * width
        axis.add_patch(pyplot.Rectangle((left + 0.1, 0), width - 0.2, 2.4, facecolor="#eef3f0", edgecolor="#0b6e4f"))
        lines = [f"NUMA node {node}", f"threads {ranges(cores)}"]
        for cache in processor["caches"]:
            own = sum(bool(set(group) & set(cores)) for group in cache["shared"])
            lines.append(f"{own} × {cache['name']} {cache['size']}")
        axis.text(left + width / 2, 1.2, "\n".join(lines), ha="center", va="center", fontsize=8)
    spots = [
        (5 + 3.6 * math.cos(angle), 6 + 2.6 * math.sin(angle))
        for angle in (2 * math.pi * number / max(1, len(gpus)) for number in range(len(gpus)))
    ]
    for one in range(len(gpus)):
        for other in range(one):
            links = nvlinks[one][other] if one < len(nvlinks) else 0
            (x, y), (u, v) = spots[one], spots[other]
            style = (
                {"color": "#0b6e4f", "linewidth": 0.6 + links / 6} if links else {"color": "#bbbbbb", "linestyle": ":"}
            )
            axis.plot([x, u], [y, v], zorder=1, **style)
            axis.text((x + u) / 2, (y + v) / 2, f"NV{links}" if links else "PCIe", fontsize=7, ha="center")
    for number, (x, y) in enumerate(spots):
        axis.text(
            x, y, f"cuda:{number}\n{gpus[number]['name']}", ha="center", va="center", fontsize=8, zorder=2,
            bbox={"boxstyle": "round", "facecolor": "white", "edgecolor": "#0b6e4f"},
        )  # fmt: skip
    axis.set_xlim(0, 10)
    axis.set_ylim(-0.2, 9.4 if gpus else 2.6)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)
    pyplot.close(figure)

"""A drawing of the host: memory nodes with threads and caches, GPUs and their links (needs matplotlib)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .cpu import ranges

ENDINGS = (".svg", ".png", ".pdf")
#: Most NVLinks of a GPU so far. A GPU with more in all, counted by pairs, shares them through switches.
MOST_LINKS = 18
#: Most GPUs between which each path through PCIe is a line of its own.
FEW = 4
GREEN, GREY = "#0b6e4f", "#bbbbbb"


#: What lines meet in: id, label and place.
HUBS = (("switch", "NVSwitch", (5.0, 6.3)), ("pcie", "PCIe and host", (5.0, 5.7)))


def lines(gpus: int, nvlinks: Sequence[Sequence[int]]) -> list[tuple[int, int | str, int]]:
    """Each line: a GPU, the other or ``"switch"`` or ``"pcie"``, and how many NVLinks, 0 for PCIe."""
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
    """Writes the drawing to ``path``, whose ending says the format. ``nvlinks[i][j]``: links between two GPUs.

    In an SVG, a GPU has the id ``gpu-0``, a line ``link-0-1``, one to the switches ``link-0-switch``, one to PCIe
    ``link-0-pcie``, and a memory node ``node-0``.

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
        axis.add_patch(
            pyplot.Rectangle(
                (left + 0.1, 0), width - 0.2, 2.4, facecolor="#eef3f0", edgecolor=GREEN, gid=f"node-{node}"
            )
        )
        said = [f"NUMA node {node}", f"threads {ranges(cores)}"]
        for cache in processor["caches"]:
            own = sum(bool(set(group) & set(cores)) for group in cache["shared"])
            said.append(f"{own} × {cache['name']} {cache['size']}")
        axis.text(left + width / 2, 1.2, "\n".join(said), ha="center", va="center", fontsize=8)
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
    axis.set_ylim(-0.2, 9.4 if gpus else 2.6)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)
    pyplot.close(figure)

"""Plots measured times and the models' answers as curves (needs matplotlib)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .measurement_points import OPS

if TYPE_CHECKING:
    from .check import Compared

#: Formats by the ending of the file.
ENDINGS = (".png", ".svg", ".pdf")


def draw(compared: Sequence[Compared], title: str, path: Path) -> None:
    """Writes a figure to ``path``, in the format of its ending.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
        ValueError: matplotlib rejects the figure.
    """
    import matplotlib  # type: ignore[import-not-found, unused-ignore]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # type: ignore[import-not-found, unused-ignore]

    worlds = sorted({one.ranks for one in compared})
    ops = [op for op in OPS if any(one.op == op for one in compared)]
    size = (3.2 * len(ops), 3.0 * len(worlds))
    figure, axes = pyplot.subplots(len(worlds), len(ops), figsize=size, squeeze=False, sharex=True, sharey=True)
    for row, ranks in enumerate(worlds):
        for column, op in enumerate(ops):
            part = sorted((one for one in compared if (one.ranks, one.op) == (ranks, op)), key=lambda one: one.bytes)
            sizes, axis = [one.bytes for one in part], axes[row][column]
            axis.loglog(sizes, [one.measured for one in part], "k.", label="measured")
            axis.loglog(sizes, [one.predicted for one in part], "-", label="from the profile")
            axis.loglog(sizes, [one.torch for one in part], ":", label="torch's model")
            axis.set_title(f"{op}, {ranks} ranks", fontsize=9)
            axis.set_xlabel("bytes", fontsize=8)
            axis.set_ylabel("µs", fontsize=8)
    axes[0][0].legend(fontsize=7)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)

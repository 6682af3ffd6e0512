"""Rows in the columns of nccl-tests; with several sides, the name and the ratio of each side follow."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from .record import PLACEMENTS, Figure, Found
from .request import NCCL_TYPES

_NAMES = ("size", "count", "type", "redop", "root")
_WIDTHS = (12, 14, 9, 8, 7)
_FIGURES = 34
#: The out-of-place calls of operations that ``dist`` has only in place.
_OTHER_CALLS = {
    "all_reduce": "torch.ops.symm.all_reduce on symm, torch's functional all_reduce on others; which allocate",
    "broadcast": "torch's functional broadcast, which allocates",
}


def headings(several: bool) -> list[str]:
    """The three lines above the rows. ``several``: sides are compared."""
    head, figures = " " * sum(_WIDTHS), f"{'time':>10}{'algbw':>8}{'busbw':>8}{'#wrong':>8}"
    units = f"{'(us)':>10}{'(GB/s)':>8}{'(GB/s)':>8}{'':>8}"
    names = "".join(f"{name:>{width}}" for name, width in zip(_NAMES, _WIDTHS, strict=True))
    below = f"{'(B)':>12}{'(elements)':>14}".ljust(len(head))
    behind = "  side          ratio   ratio" if several else ""
    placed = f"{'out-of-place':^{_FIGURES}}{'in-place':^{_FIGURES}}"
    lines = [head + placed, names + figures + figures + behind, below + units + units]
    return [f"#{line[1:]}".rstrip() for line in lines]


def table(rows: Sequence[Found]) -> list[str]:
    """The whole table, with each operation below its name and headings."""
    several, shown, text = any(len(found.sides) > 1 for found in rows), "", []
    for found in rows:
        text += [] if found.wanted.op == shown else opening(found.wanted.op, several)
        text += lines(found, several)
        shown = found.wanted.op
    return text


def opening(op: str, several: bool) -> list[str]:
    """The lines above the first row of an operation."""
    note = [f"# out-of-place: {_OTHER_CALLS[op]}"] if op in _OTHER_CALLS else []
    return ["#", f"# {op}", *note, *headings(several)]


def lines(found: Found, several: bool) -> list[str]:
    """A line for each side, and one for each note."""
    wanted = found.wanted
    head = f"{wanted.size:>12}{wanted.count:>14}{NCCL_TYPES[wanted.dtype]:>9}{wanted.redop:>8}{wanted.root:>7}"
    text = []
    for side, placed in found.sides.items():
        if placed:
            line = head + "".join(_figures(found, placed.get(placement)) for placement in PLACEMENTS)
            ratios = "".join(_ratio(found.ratio(side, placement)) for placement in PLACEMENTS)
            text.append(line + (f"  {side:<11}{ratios}" if several else ""))
    if found.disturbed:
        text.append(f"# other processes kept {found.other_cores:.1f} cores busy, so this row says little")
    return text + [f"# {side}: {note}" for side, note in found.notes.items()]


def _figures(found: Found, figure: Figure | None) -> str:
    if figure is None:
        return f"{'N/A':>10}{'N/A':>8}{'N/A':>8}{'N/A':>8}"
    us = figure.median_us
    time = f"{us:.0f}" if us >= 10_000 else f"{us:.1f}" if us >= 1000 else f"{us:.2f}"
    wrong = "N/A" if figure.wrong is None else str(figure.wrong)
    return f"{time:>10}{found.algbw(figure):>8.2f}{found.busbw(figure):>8.2f}{wrong:>8}"


def _ratio(ratio: float | None) -> str:
    return f"{'':>8}" if ratio is None else f"{ratio:>8.2f}"


def closing(rows: Sequence[Found], checked: bool) -> list[str]:
    """The lines below the rows: wrong values, and the average bus bandwidth of the first side."""
    first = [figure for found in rows for figure in next(iter(found.sides.values()), {}).values()]
    wrong = sum(found.wrong for found in rows)
    verdict = f"{wrong} {'FAILED' if wrong else 'OK'}" if checked else "not checked (-c 0)"
    if not rows:
        verdict = "not checked (no row was measured)"
    text = [f"# Out of bounds values : {verdict}"]
    if first:
        rates = [found.busbw(figure) for found in rows for figure in next(iter(found.sides.values())).values()]
        text.append(f"# Avg bus bandwidth    : {sum(rates) / len(rates):.6g}")
    return text


def write_csv(rows: Iterable[Found], path: Path) -> None:
    """Writes a line for each row, side and placement to ``path``.

    Raises:
        OSError: the file cannot be written.
    """
    records = [record for found in rows for record in found.records()]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]) if records else ["size"])
        writer.writeheader()
        writer.writerows(records)

"""Rows as text: one line of progress, and the closing table by rich where it is installed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

from .record import Cell, Row
from .units import format_size, format_us

HEADINGS = (
    "ranks", "operation", "dtype", "size",
    "µs", "p99", "algbw", "busbw", "peer µs", "peer p99", "ratio", "target", "×limit", "others",
)  # fmt: skip
TEXT_COLUMNS = 3
MISSED_SHOWN = 12


def progress_line(row: Row, number: int, total: int) -> str:
    """One finished cell."""
    cell, tested = row.cell, row.tested
    parts = [
        f"[{number}/{total}] {cell.world} ranks {_name(cell)}:",
        f"{tested.backend} {format_us(tested.median_us)} µs",
    ]
    if row.peer is not None and row.ratio is not None:
        parts.append(f"{row.peer.backend} {format_us(row.peer.median_us)} µs, {row.ratio:.1f}×{_target(row)}")
    return " ".join(parts)


def write_table(rows: Sequence[Row], stream: TextIO | None = None) -> None:
    """Writes the table of ``rows`` to ``stream`` (default: standard output)."""
    stream = stream or sys.stdout
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        lines = [_fields(row) for row in rows]
        stream.write(plain_text(_title(rows), HEADINGS, lines, range(1, TEXT_COLUMNS)) + CAPTION + "\n")
        return
    width = None if stream.isatty() else 140
    table = Table(title=_title(rows), caption=CAPTION, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if 0 < number <= TEXT_COLUMNS - 1 else "right", no_wrap=True)
    before: Row | None = None
    for row in rows:
        if before is not None and (before.cell.op, before.cell.world) != (row.cell.op, row.cell.world):
            table.add_section()
        table.add_row(*_fields(row), style=None if row.met is None else ("green" if row.met else "red"))
        before = row
    Console(file=stream, width=width).print(table)


CAPTION = (
    "µs: median over calls of the slowest rank; algbw, busbw in GB/s; "
    "target: ratio wanted (and met: yes/NO, with ? beside other work); "
    "×limit: median ÷ time to read each input and write each output once at the measured copy bandwidth; "
    "others: cores used by other processes"
)


def verdict(rows: Iterable[Row]) -> str:
    """How many of the targets are met, which are not, and how many cells were measured beside other work."""
    judged = [row for row in rows if row.met is not None]
    missed = [_name(row.cell) for row in judged if not row.met]
    text = f"{len(judged) - len(missed)} of {len(judged)} targets met"
    if missed:
        more = f" and {len(missed) - MISSED_SHOWN} more" if len(missed) > MISSED_SHOWN else ""
        text += f"; not met: {', '.join(missed[:MISSED_SHOWN])}{more}"
    disturbed = sum(row.disturbed for row in judged)
    return f"{text}; {disturbed} of them measured beside other work (marked ?)" if disturbed else text


def _name(cell: Cell) -> str:
    return f"{cell.op} {cell.dtype} {format_size(cell.size)}" if cell.size else cell.op


def _title(rows: Sequence[Row]) -> str:
    if not rows:
        return "nothing measured"
    peer = rows[0].peer
    return rows[0].tested.backend + (f" against {peer.backend}" if peer else "")


def _target(row: Row) -> str:
    if row.target is None or row.met is None:
        return ""
    return f" (target {row.target:g}× {'met' if row.met else 'NOT met'})"


def _fields(row: Row) -> list[str]:
    cell, tested, peer = row.cell, row.tested, row.peer
    judged = ""
    if row.met is not None:
        judged = (" yes" if row.met else " NO") + ("?" if row.disturbed else "")
    return [
        str(cell.world),
        cell.op,
        cell.dtype if cell.size else "",
        format_size(cell.size),
        format_us(tested.median_us),
        format_us(tested.p99_us),
        f"{tested.algbw:.2f}" if cell.size else "",
        f"{tested.busbw:.2f}" if cell.size else "",
        format_us(peer.median_us) if peer else "",
        format_us(peer.p99_us) if peer else "",
        f"{row.ratio:.2f}" if row.ratio is not None else "",
        (f"{row.target:g}" if row.target is not None else "") + judged,
        f"{row.times_floor:.2f}" if row.times_floor is not None else "",
        f"{row.other_cores:.1f}",
    ]


def plain_text(title: str, headings: Sequence[str], lines: Sequence[Sequence[str]], left: range) -> str:
    """A table without rich. ``left``: the columns that are aligned to the left."""
    everything = [headings, *lines]
    widths = [max(len(line[column]) for line in everything) for column in range(len(headings))]
    text = [title]
    for line in everything:
        padded = [
            field.ljust(width) if column in left else field.rjust(width)
            for column, (field, width) in enumerate(zip(line, widths, strict=True))
        ]
        text.append("  ".join(padded).rstrip())
    return "\n".join([*text, ""])

"""Formats a finished run as text: one line of progress per cell, and one table per operation."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

from gpu_shared import write_table
from torch_symm.tools.bench.gpu.record import OURS, GpuFigure, Measured
from torch_symm.tools.bench.units import format_size, format_us

HEADINGS = ("dtype", "size")
PEER_HEADINGS = ("best peer", "which", "ratio")


def progress_line(measured: Measured, number: int, total: int) -> str:
    """One finished cell: every side's time in a graph and eagerly."""
    cell = measured.cell
    name = f"{cell.op} {cell.dtype} {format_size(cell.size)}" if cell.size else cell.op
    parts = [f"{side} {_us(figure.graph_us)}/{_us(figure.eager_us)}" for side, figure in measured.figures.items()]
    notes = [f"  {side}: {figure.note}" for side, figure in measured.figures.items() if figure.note]
    return "\n".join([f"[{number}/{total}] {name}: {', '.join(parts)}", *notes])


def write_tables(cells: Sequence[Measured], stream: TextIO | None = None) -> None:
    """Writes the tables to ``stream`` (default: standard output)."""
    stream = stream or sys.stdout
    for op in dict.fromkeys(measured.cell.op for measured in cells):
        _write_one(op, [measured for measured in cells if measured.cell.op == op], stream)
    hosted = [measured for measured in cells if any(figure.host_us for figure in measured.figures.values())]
    if hosted:
        _write_host(hosted, stream)


def _write_host(cells: Sequence[Measured], stream: TextIO) -> None:
    """The host's time in a call, and its parts; differences of medians may be negative."""
    headings = ["call", "time", "Python of torch", "dispatcher", "backend", "of that a launch", "as an operator"]
    lines = []
    for measured in cells:
        for side, figure in measured.figures.items():
            host, group, backend = figure.host_us, figure.group_us, figure.backend_us
            if host is None:
                continue
            parts: list[float | None] = [None, None, None]
            if group is not None and backend is not None:
                parts = [host - group, group - backend, backend]
            fields = [host, *parts, figure.launch_us, figure.operator_us]
            lines.append([f"{measured.cell.op} {side}", *("" if us is None else f"{us:.2f}" for us in fields)])
    cell = cells[0].cell
    title = f"host time of a call, {cell.dtype} {format_size(cell.size)}, {cell.world} ranks, µs"
    write_table(title, headings, lines, stream)


def _write_one(op: str, cells: Sequence[Measured], stream: TextIO) -> None:
    ours = [side for side in OURS if any(side in measured.figures for measured in cells)]
    modes = [mode for mode in ("graph", "eager") if any(_has(measured, mode) for measured in cells)]
    headings = list(HEADINGS)
    for mode in modes:
        for side in ours:
            headings += [f"{side} {mode}"] + ([] if side == "symm" else ["ratio"])
        headings += [f"{PEER_HEADINGS[0]} {mode}", *PEER_HEADINGS[1:]]
    lines = [_fields(measured, ours, modes) for measured in cells]
    title = f"{op}, {cells[0].cell.world} ranks, µs"
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        write_table(title, headings, lines, stream)
        return
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number == 0 else "right", no_wrap=True)
    before = cells[0]
    for measured, line in zip(cells, lines, strict=True):
        if measured.cell.dtype != before.cell.dtype:
            table.add_section()
        ratio = measured.ratio("symm", modes[0]) if modes else None
        table.add_row(*line, style=None if ratio is None else ("green" if ratio >= 1 else "red"))
        before = measured
    Console(file=stream, width=None if stream.isatty() else 170).print(table)


def _fields(measured: Measured, ours: Sequence[str], modes: Sequence[str]) -> list[str]:
    cell = measured.cell
    fields = [cell.dtype if cell.size else "", format_size(cell.size)]
    for mode in modes:
        for side in ours:
            figure = measured.figures.get(side, GpuFigure())
            fields.append(_us(figure.us(mode)))
            if side != "symm":
                fields.append(_ratio(measured.ratio(side, mode)))
        best = measured.best_peer(mode)
        fields += [_us(best[1]) if best else "-", best[0] if best else "", _ratio(measured.ratio("symm", mode))]
    return fields


def _has(measured: Measured, mode: str) -> bool:
    return any(figure.us(mode) is not None for figure in measured.figures.values())


def _us(us: float | None) -> str:
    return "-" if us is None else format_us(us)


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"

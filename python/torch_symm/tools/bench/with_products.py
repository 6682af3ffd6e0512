"""``torch-symm bench --background-load matmul``: the time that calls and matrix products lose when both run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .gpu.record import Cell, Measured
from .units import format_size

HEADING = (
    f"{'size':>8} {'side':14} {'us/call':>9} {'calls':>6} {'alone':>8} {'products':>9} {'together':>9} {'lost':>7}"
)


def heading() -> list[str]:
    """The lines above all rows."""
    return [
        "times in ms of a CUDA graph, the median over turns: the calls alone, matrix products alone, both together",
        "lost = (together - longer) / shorter: 0 % is perfect overlap, 100 % one after the other",
        "copies: plain copies from peers by copy engines, of the bytes that each rank receives: the bound",
    ]


def lines(measured: Measured, shown: Cell | None) -> Iterator[str]:
    """Yields the lines of a cell; ``shown`` is the cell whose lines precede them."""
    cell = measured.cell
    if shown is None or (shown.op, shown.dtype) != (cell.op, cell.dtype):
        yield f"# {cell.op} {cell.dtype}"
        yield f"#{HEADING[1:]}"
    for side, figure in measured.figures.items():
        if found := figure.overlap:
            times = " ".join(
                f"{us / 1e3:{width}.2f}"
                for us, width in ((found.alone_us, 8), (found.products_us, 9), (found.together_us, 9))
            )
            yield (
                f"{format_size(cell.size):>8} {side:14} {found.call_us:9.1f} {found.calls:6} {times} {found.lost:7.0%}"
            )
        if figure.note:
            yield f"# {side}: {figure.note}"


def records(measured: Measured) -> list[dict[str, Any]]:
    """A record of each side, for JSON."""
    cell = measured.cell
    return [
        {
            "op": cell.op,
            "dtype": cell.dtype,
            "size": cell.bytes,
            "world": cell.world,
            "side": side,
            "note": figure.note,
            **(figure.overlap.record() if figure.overlap else {}),
        }
        for side, figure in measured.figures.items()
    ]

"""Progress and tables, with rich if it is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch_symm.tools.bench.units import format_size, format_us

from .measurement_points import Point

#: Without rich, a line is written for each such fraction of the whole.
PLAIN_STEP = 0.1


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[Point, float], None]]:
    """Shows the progress of ``total`` visits; the body calls the yielded function after each."""
    try:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    except ImportError:
        yield _plain(title, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[last]}"), disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task(title, total=total, last="")

        def on_visit(point: Point, us: float) -> None:
            bar.update(task, advance=1, last=f"{point.op} {format_size(point.bytes)} {format_us(us)} µs")

        yield on_visit


def _plain(title: str, total: int) -> Callable[[Point, float], None]:
    done = 0

    def on_visit(_point: Point, _us: float) -> None:
        nonlocal done
        done += 1
        before, now = ((number / total) // PLAIN_STEP for number in (done - 1, done))
        if now > before:
            say(f"{title}: {done} of {total}")

    return on_visit


def say(text: str) -> None:
    """Writes a line."""
    print(text, flush=True)


def table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Writes a table, whose first two columns are text."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(row[column]) for row in [headings, *rows]) for column in range(len(headings))]
        say(title)
        for row in [headings, *rows]:
            say("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
        return
    shown = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, heading in enumerate(headings):
        shown.add_column(heading, justify="left" if number < 2 else "right", no_wrap=True)
    for row in rows:
        shown.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 140).print(shown)

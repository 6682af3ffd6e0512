"""Starts one process per GPU and yields their reports; restarts without a side that hung or killed a process."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from torch_symm.launch import ranks
from torch_symm.launch.messages import reported
from torch_symm.launch.watch import RankActivity, StalledError, Watch

from ..ops import DTYPES
from ..units import format_size
from . import rank as rank_process
from .calls import OPS
from .contenders import GROUP_TIMEOUT, Makers
from .process import Entrances, GpuTask, Message
from .rank_sync import Meeting
from .record import Cell, GpuAbsent, Measured

# A call whose peer is missing ends after the group's timeout, by itself or by NCCL's watchdog; 25 s are a margin.
STILL_S = GROUP_TIMEOUT.total_seconds() + 25.0
# Processes import torch, make a context on their GPU and meet, before they make a side.
START_S = 150.0

#: With these settings NCCL ends a call whose peer is missing, but not the process: it aborts the communicator (2), does
#: not kill the process when its watchdog is late, and does not first wait a minute for a dump.
PATIENT_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


@dataclass(frozen=True)
class GpuOptions:
    """The run. ``seconds``: time after which no cell starts; ``still_s``: time without progress after which ranks hang.

    ``products``: measures calls while matrix products run (`overlap`).
    ``rows``: cells in place of every combination of ``ops``, ``dtypes`` and ``sizes``.
    """

    world: int
    device: str
    makers: Makers
    sides: tuple[str, ...]
    ops: tuple[str, ...]
    dtypes: tuple[str, ...]
    sizes: tuple[int, ...]
    seconds: float
    turns: int
    still_s: float = STILL_S
    warmup: int = 0
    checks: int = 1
    rows: tuple[Cell, ...] = ()
    entrances: Entrances | None = None
    products: bool = False


def cells(options: GpuOptions) -> list[Cell]:
    """Returns the cells, operation by operation and dtype by dtype, from small to large."""
    found = list(options.rows)
    for op in options.ops:
        for dtype in options.dtypes if op != "barrier" else options.dtypes[:1]:
            for size in options.sizes if op != "barrier" else (0,):
                unit = DTYPES[dtype].itemsize * (options.world if OPS[op].divided else 1)
                found.append(Cell(op, dtype, options.world, size, -(-size // unit) * unit))
    return found


def measure(options: GpuOptions) -> Iterator[Message]:
    """Runs everything, and yields each finding at once. Ends before the last cell when the time is over.

    If a rank dies or hangs in a call of one side, that side is reported absent, and new processes continue without it.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank failed outside any side; the text holds the traceback.
        torch.multiprocessing.ProcessExitedException: a rank was killed or ended the process, outside any side.
        StalledError: a rank hangs outside any side, or no side is left.
    """
    deadline = time.monotonic() + options.seconds
    sides, todo = list(options.sides), cells(options)
    while sides:
        meeting = Meeting(options.world, len(sides), ranks.barrier(options.world))
        # The ranks number the sides and cells of this start.
        started_sides, started_cells = tuple(sides), tuple(todo)
        try:
            for message in _start(options, meeting, started_sides, started_cells, deadline):
                if isinstance(message, Measured):
                    del todo[0]
                elif message.side in sides:
                    sides.remove(message.side)
                yield message
            return
        except (ProcessRaisedException, ProcessExitedException, StalledError) as error:
            if not todo or time.monotonic() >= deadline:
                return  # only the exit of the processes failed
            doing = meeting.progress.doing()
            if doing.side is None:
                raise
            name = started_sides[doing.side]
            if name in sides:
                sides.remove(name)
            yield GpuAbsent(name, f"{_place(doing, started_cells)}: {_last_line(error)}", lost=True)
    raise StalledError("no side is left")


def _start(
    options: GpuOptions, meeting: Meeting, sides: Sequence[str], todo: Sequence[Cell], deadline: float
) -> Iterator[Message]:
    results = ranks.queue()
    with tempfile.TemporaryDirectory(prefix="torch-symm-bench-") as folder:
        task = GpuTask(
            world=options.world,
            device=options.device,
            makers=options.makers,
            sides=tuple(sides),
            cells=tuple(todo),
            rendezvous="symm+" + (Path(folder) / "rendezvous").as_uri(),
            seconds=max(0.0, deadline - time.monotonic()),
            turns=options.turns,
            warmup=options.warmup,
            checks=options.checks,
            entrances=options.entrances,
            products=options.products,
        )
        watch = Watch(meeting.progress, START_S, options.still_s)

        def watched() -> None:
            if watch.stuck():
                raise StalledError(f"nothing happened for {watch.limit_s:.0f} s")

        with ranks.started(rank_process.main, (task, meeting, results), options.world) as started:
            yield from reported(started, results, None, watched=watched)


def _place(doing: RankActivity, todo: Sequence[Cell]) -> str:
    if doing.cell is None:
        return "while it was made"
    cell = todo[doing.cell]
    return f"at {cell.op} {cell.dtype} {format_size(cell.size)}" if cell.size else f"at {cell.op}"


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__

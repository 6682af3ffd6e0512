"""Starts the ranks on CPU tensors and yields the rows as they are found."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch.distributed as dist

from torch_symm.launch import ranks
from torch_symm.launch.messages import reported
from torch_symm.launch.watch import Progress, RankActivity, StalledError, Watch, stopped, which
from torch_symm.tools.command import closest

from . import rank as rank_process
from .background_load import BackgroundLoad, running
from .record import Found
from .request import Wanted
from .timing import FIXED_ROUNDS, MAX_BURST, MAX_ROUNDS, MAX_SAMPLES, SharedTensors
from .units import LIMIT_S, format_size

#: Seconds that the processes may take to import torch and join, before they make the first side.
START_S = 60.0


def unusable(backend: str) -> str | None:
    """Why ``backend``, a name or ``device:name`` pairs, cannot be measured on CPU tensors here; ``None`` if it can."""
    known = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake")]
    serving = dict(pair.split(":", 1) for pair in backend.lower().split(",") if ":" in pair) or {"cpu": backend.lower()}
    for name in serving.values():
        if name not in known:
            return f"no backend {name!r}{closest(name, known) or '; torch knows ' + ', '.join(known)}"
        if not dist.is_backend_available(name):
            return f"this torch was built without {name!r}"
    if "cpu" not in serving or (":" not in backend and "cpu" not in dist.Backend.backend_capability[serving["cpu"]]):
        return f"{backend!r} serves no CPU tensors; for GPUs there is --device cuda"
    return None


def measure(
    world: int,
    sides: Sequence[str],
    rows: Sequence[Wanted],
    calls: int,
    warmup: int,
    checks: int,
    bandwidth: bool,
    limit_s: float = LIMIT_S,
    seconds: float | None = None,
    load: BackgroundLoad = BackgroundLoad(),  # noqa: B008 - frozen
) -> Iterator[Found]:
    """Yields all ``rows`` on all ``sides``, in the same processes; ``bandwidth``: also measures plain copies.

    ``seconds``: approximate time, in place of a number of ``calls``. ``load``: other processes to run meanwhile.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank failed; its text holds the rank's traceback.
        torch.multiprocessing.ProcessExitedException: a rank was killed or ended the process.
        StalledError: the ranks made no progress for ``limit_s``. The message names side, row and ranks.
    """
    # Leaves room for rounding up to whole rounds and bursts.
    samples = max(calls + FIXED_ROUNDS * (calls // MAX_BURST + 16), MAX_SAMPLES + MAX_ROUNDS if seconds else 0)
    shared = SharedTensors(world, ranks.barrier(world), len(sides), samples)
    progress, results = Progress(world), ranks.queue()
    watch = Watch(progress, START_S + limit_s, limit_s)

    with tempfile.TemporaryDirectory(prefix="torch-symm-bench-") as folder:
        rendezvous = "symm+" + (Path(folder) / "rendezvous").as_uri()
        # Longer than the launcher's limit, so that the launcher reports a stall, with the same text for all sides.
        patience = limit_s + 30.0
        deadline = time.monotonic() + seconds if seconds else None
        task = rank_process.BenchTask(
            world, tuple(sides), tuple(rows), rendezvous, calls, warmup, checks, bandwidth, patience, deadline
        )
        given = (task, shared, progress, results)
        with running(load), ranks.started(rank_process.main, given, world) as started:

            def watched() -> None:
                if doing := watch.stuck():
                    who = _who(doing, stopped(started.processes), world)
                    raise StalledError(f"{_place(doing, sides, rows)}: {who} for {watch.limit_s:g} s (--limit)")

            yield from reported(started, results, len(rows), watched=watched)


def _place(doing: RankActivity, sides: Sequence[str], rows: Sequence[Wanted]) -> str:
    if doing.cell is None:
        return "before the first row"
    side = "between sides" if doing.side is None else sides[doing.side]
    wanted = rows[doing.cell]
    return f"{side}, {wanted.op} {wanted.dtype} {format_size(wanted.size)}"


def _who(doing: RankActivity, halted: Sequence[int], world: int) -> str:
    """Names the idle ranks: those whose processes are stopped, otherwise those that are behind the others."""
    late = halted or doing.behind
    if not late:
        return f"none of {world} ranks got on"
    return f"{which(late, world)} {'stopped' if halted else 'did not get on'}"

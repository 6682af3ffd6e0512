"""``SYMM_STATS_INTERVAL``: a thread that writes this process's last calls; on the first rank it also prints a table.

When the first rank ends, it prints the counts of all its calls.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from contextlib import suppress
from multiprocessing import parent_process, util
from pathlib import Path
from typing import Any

from torch_symm._trace.dump import Dump, parse

from . import files, summary, table

#: The process whose thread runs.
_started: int | None = None


def start(native: Any) -> None:
    """Starts the thread if ``SYMM_STATS_INTERVAL`` requests it, once per process."""
    global _started
    seconds = native._stats_seconds()
    if seconds and _started != os.getpid():
        _started = os.getpid()
        ended = threading.Event()
        atexit.register(_end, native, ended)
        if parent_process() is not None:
            # A process of multiprocessing ends without atexit.
            util.Finalize(None, _end, (native, ended), exitpriority=-3)
        threading.Thread(target=_run, args=(native, seconds, ended), name="symm-stats", daemon=True).start()


def _run(native: Any, seconds: int, ended: threading.Event) -> None:
    while not ended.wait(seconds):
        try:
            own, path = write(native)
        except Exception as error:  # A failure to report must not end the job or fill its log.
            print(f"SYMM_STATS_INTERVAL: no statistics any more: {error}", file=sys.stderr, flush=True)
            return
        if _first(own):
            # The other ranks write at the same time.
            ended.wait(min(0.5, seconds / 2))
            print(table.render(files.job(own, path.parent)), file=sys.stderr, flush=True)


def _end(native: Any, ended: threading.Event) -> None:
    """Ends the thread; the first rank prints its counts."""
    if ended.is_set():
        return
    ended.set()
    try:
        trace = json.loads(native._trace())
        rank = _rank(parse(trace, "this process"))
        if rank is not None and trace["totals"]["lines"]:
            print(summary.render(trace, rank), file=sys.stderr, flush=True)
    except Exception as error:  # A failure to report must not change how the process ends.
        print(f"SYMM_STATS_INTERVAL: no summary: {error}", file=sys.stderr, flush=True)


def _rank(own: Dump) -> int | None:
    """Returns this process's global rank if it is the lowest of this node in all groups, including those it left."""
    here = {member.global_rank: member.pid for view in own.views for member in view.members}
    return min(here) if here and here[min(here)] == own.pid else None


def write(native: Any) -> tuple[Dump, Path]:
    """Writes the last calls of this process for other processes; the file is removed when this process exits.

    Raises:
        SymmConfigError: the directory cannot be used.
    """
    text: str = native._trace()
    written = Path(native._write_trace(b"", files.name(os.getpid()), text.encode()))
    atexit.unregister(_remove)
    atexit.register(_remove, written)
    return parse(json.loads(text), "this process"), written


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def _first(own: Dump) -> bool:
    """Returns true if this process has the lowest global rank of this node in its groups."""
    here = {member.global_rank: member.pid for view in own.views if view.left_ns is None for member in view.members}
    return bool(here) and here[min(here)] == own.pid

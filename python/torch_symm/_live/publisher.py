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
#: The file that this process, or the process from which it was forked, has written.
_written: Path | None = None


def start(native: Any) -> None:
    """Starts the thread if ``SYMM_STATS_INTERVAL`` requests it, once per process."""
    global _started
    seconds = native._stats_seconds()
    if seconds and _started != os.getpid():
        _started = os.getpid()
        ended = threading.Event()
        thread = threading.Thread(target=_run, args=(native, seconds, ended), name="symm-stats", daemon=True)
        atexit.register(_end, native, ended, thread)
        if parent_process() is not None:
            # A process of multiprocessing ends without atexit.
            util.Finalize(None, _end, (native, ended, thread), exitpriority=-3)
        thread.start()


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


def _end(native: Any, ended: threading.Event, thread: threading.Thread) -> None:
    """Ends the thread and removes the file; the first rank prints its counts."""
    if ended.is_set():
        return
    ended.set()
    # The thread may be writing the file.
    thread.join(timeout=1)
    try:
        trace = json.loads(native._trace())
        rank = _rank(parse(trace, "this process"))
        if rank is not None and trace["totals"]["lines"]:
            print(summary.render(trace, rank), file=sys.stderr, flush=True)
    except Exception as error:  # A failure to report must not change how the process ends.
        print(f"SYMM_STATS_INTERVAL: no summary: {error}", file=sys.stderr, flush=True)
    # A forked child has the path of its parent's file.
    if _written and _written.name == files.name(os.getpid()):
        with suppress(OSError):
            _written.unlink()


def _rank(own: Dump) -> int | None:
    """Returns this process's global rank if it is the lowest of this node in all groups, including those it left."""
    here = {member.global_rank: member.pid for view in own.views for member in view.members}
    return min(here) if here and here[min(here)] == own.pid else None


def write(native: Any) -> tuple[Dump, Path]:
    """Writes the last calls of this process for other processes; :func:`_end` removes the file.

    Raises:
        SymmConfigError: the directory cannot be used.
    """
    global _written
    text: str = native._trace()
    _written = Path(native._write_trace(b"", files.name(os.getpid()), text.encode()))
    return parse(json.loads(text), "this process"), _written


def _first(own: Dump) -> bool:
    """Returns true if this process has the lowest global rank of this node in its groups."""
    here = {member.global_rank: member.pid for view in own.views if view.left_ns is None for member in view.members}
    return bool(here) and here[min(here)] == own.pid

"""The files in which ranks write their last calls for other processes."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from torch_symm._trace.dump import Dump, NotADump, read


def folder() -> Path:
    """Returns the directory where processes with this environment and user write traces."""
    named = os.environ.get("SYMM_TRACE_DIR", "").strip()
    if named.startswith("/"):
        return Path(named)
    temporary = os.environ.get("TMPDIR", "")
    return Path(temporary if temporary.startswith("/") else "/tmp") / f"torch-symm-{os.geteuid()}"


def name(pid: int) -> str:
    """Returns the name of the file of process ``pid``."""
    return f"stats-{pid}.json"


def job(of: Dump, place: Path) -> list[Dump]:
    """Returns the dumps of all processes of this node that share a group with ``of`` and have written one."""
    pids = {member.pid for view in of.views for member in view.members}
    found = {of.pid: of}
    for pid in sorted(pids - {of.pid}):
        # The file may be left from an earlier process with this pid, or its process may just be removing it.
        with suppress(NotADump):
            one = read(place / name(pid), private=True)
            if {view.key for view in one.views} & {view.key for view in of.views}:
                found[pid] = one
    return [found[pid] for pid in sorted(found)]


def newest(place: Path) -> int | None:
    """Returns the process of this user that wrote last and still runs."""
    written = []
    for path in place.glob("stats-*.json"):
        number = path.stem.partition("-")[2]
        with suppress(OSError):
            if number.isdecimal() and running(int(number)):
                written.append((path.stat().st_mtime_ns, int(number)))
    return max(written)[1] if written else None


def running(pid: int) -> bool:
    """Returns true if a process with this number exists."""
    return Path(f"/proc/{pid}").exists()

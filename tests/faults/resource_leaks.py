"""Resources of a process, and existing processes and files: counted before and after."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
# Linux's own threads for io_uring, which libuv under torch's TCPStore uses: their number changes at any time.
_IO_WORKER = "iou-"


def own() -> Counter[str]:
    """File descriptors, threads and mappings of shared memory of this process."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return Counter(
        fds=len(os.listdir("/proc/self/fd")),
        threads=sum(not name.startswith(_IO_WORKER) for name in threads()),
        mappings=sum("memfd:symm" in line or "/dev/shm/" in line for line in maps),
    )


def threads() -> Iterator[str]:
    """Names of this process's threads."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            yield (task / "comm").read_text().strip()


def beyond(before: Counter[str], patience: float = 1.5) -> Counter[str]:
    """The additional resources since ``before``, once threads that are ending have ended."""
    deadline = time.monotonic() + patience
    while (more := own() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    return more


def shared_names() -> set[str]:
    """Names in /dev/shm that a backend could have made."""
    return {entry.name for entry in Path("/dev/shm").iterdir() if "symm" in entry.name or "torch" in entry.name}


def left_names(before: set[str]) -> set[str]:
    """Names in /dev/shm since ``before``, except those with the pid of a process that runs: of another test."""
    return {name for name in shared_names() - before if not _has_owner(name)}


def _has_owner(name: str) -> bool:
    pid = re.search(r"\d+", name)
    return pid is not None and Path(f"/proc/{pid[0]}").exists()


@contextlib.contextmanager
def fresh_folder() -> Iterator[Path]:
    """A folder that is removed at the end, but only by this process, not by a forked child that exits."""
    folder = tempfile.mkdtemp(prefix="fault-")
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Processes whose parents exit become children of this process, so that ``children`` finds them."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def children() -> set[int]:
    """Processes whose parent is this one."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found.update(int(pid) for pid in (task / "children").read_text().split())
    return found


def end_orphans(before: set[int], bystanders: set[int], grace: float = 0.3) -> int:
    """Ends processes adopted since ``before``; returns how many of them still ran, not counting bystanders."""
    deadline = time.monotonic() + grace
    while True:
        running = {pid for pid in children() - before if not _ended(pid)}
        if not running - bystanders or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    return len(running - bystanders)


def _ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True

"""A limit for tests that hang."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType


@contextmanager
def ends_after(seconds: float) -> Iterator[None]:
    """Raises ``TimeoutError`` in the parent process once the ``with`` block has run for this long.

    Kills the processes that were started within the block, and names each with its state and what it waits for.
    """
    earlier = descendants()

    def expire(_signal: int, _frame: FrameType | None) -> None:
        late = {pid: doing for pid, doing in descendants().items() if pid not in earlier}
        for pid in late:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raise TimeoutError("\n  ".join([f"the test took longer than {seconds} s; its processes:", *late.values()]))

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def descendants() -> dict[int, str]:
    """The processes that descend from this one. Each text has the pid, state, kernel function and command."""
    parents = {int(name): parent for name in os.listdir("/proc") if name.isdigit() and (parent := _parent(name))}
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {pid: _doing(pid) for pid in found - {os.getpid()}}


def _parent(pid: str) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    return 0


def _doing(pid: int) -> str:
    try:
        folder = Path(f"/proc/{pid}")
        state = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        command = (folder / "cmdline").read_text(errors="replace").replace("\0", " ")
        return f"{pid} {state} {(folder / 'wchan').read_text()} {command}"
    except OSError:
        return f"{pid} has ended"

"""Plays one case in a process of its own, so that nothing it does stays with the next."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import sys
from pathlib import Path

from torch_symm.launch.ranks import Forked

from . import leftovers
from .case import CRASH, HANG, Case, Outcome, Saw


def guarded(case: Case, side: str, limit: float) -> Outcome:
    """The outcome of a case on a side; one that takes longer than ``limit`` seconds is ended, with all it started."""
    with leftovers.fresh_folder() as folder, leftovers.adopting_orphans():
        result, log = folder / "outcome", folder / "log"
        adopted = leftovers.children()
        forked = Forked()
        forked.fork(lambda: _play(case, side, result, log))
        late = not forked.wait(limit)
        forked.end()
        # Killed, the case leaves its ranks, and those their children, to this process.
        while leftovers.end_orphans(adopted, set(), grace=0.0):
            pass
        with contextlib.suppress(OSError, EOFError):
            return pickle.loads(result.read_bytes())  # type: ignore[no-any-return]
        text = log.read_text(errors="replace")[-2000:] if log.exists() else ""
        return Outcome(saw={0: Saw(HANG if late else CRASH, f"the case itself: {text}", limit if late else 0.0)})


def _play(case: Case, side: str, result: Path, log: Path) -> None:
    """Whatever the case or its servers print goes into the log."""
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # Ranks collect garbage before they count; older objects are left out, which saves most of the time.
    gc.freeze()
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - as long as the process
    result.write_bytes(pickle.dumps(case.play(side)))

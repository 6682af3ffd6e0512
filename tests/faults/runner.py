"""Runs one case in a separate process, so that none of its effects reach the next case."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import sys
from pathlib import Path

from torch_symm.launch.ranks import Forked

from . import resource_leaks
from .case import CRASH, HANG, Case, Outcome, Saw


def guarded(case: Case, side: str, limit: float) -> Outcome:
    """The outcome of a case on a side; after ``limit`` seconds the case is killed, with its processes."""
    with resource_leaks.fresh_folder() as folder, resource_leaks.adopting_orphans():
        result, log = folder / "outcome", folder / "log"
        adopted = resource_leaks.children()
        forked = Forked()
        forked.fork(lambda: _play(case, side, result, log))
        late = not forked.wait(limit)
        forked.end()
        # This process has adopted the ranks of a killed case, and adopts their children once the ranks end.
        while resource_leaks.end_orphans(adopted, set(), grace=0.0):
            pass
        with contextlib.suppress(OSError, EOFError):
            return pickle.loads(result.read_bytes())  # type: ignore[no-any-return]
        text = log.read_text(errors="replace")[-2000:] if log.exists() else ""
        return Outcome(saw={0: Saw(HANG if late else CRASH, f"the case itself: {text}", limit if late else 0.0)})


def _play(case: Case, side: str, result: Path, log: Path) -> None:
    """Runs a case; the output of the case and of its servers goes to ``log``."""
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # Ranks collect garbage before they count resources; older objects are skipped, which saves most of the time.
    gc.freeze()
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - as long as the process
    result.write_bytes(pickle.dumps(case.play(side)))

"""Limits for every test, and a torch that may be forked."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

# Forked ranks must not inherit a pool of threads.
torch.set_num_threads(1)

#: Seconds that any single test may take; the ranks' own limits are shorter.
LIMIT_S = 240.0


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    """Ends a test that hangs in the parent process."""

    def expire(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"the test took longer than {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)

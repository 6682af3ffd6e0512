"""Limits for every test, and one pool of rank processes for all of them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "python")]

from pool import Pool  # noqa: E402 - needs the path
from torch_symm.bench.machine import MULTICAST_SETTINGS  # noqa: E402

#: Seconds that any single test may take; the ranks' own limits are shorter.
LIMIT_S = 300.0

for name, value in MULTICAST_SETTINGS.items():
    os.environ.setdefault(name, value)


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


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Rank processes that serve one test after the other."""
    shared = Pool()
    yield shared
    shared.stop()

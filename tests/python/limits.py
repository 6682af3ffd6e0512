"""A limit for tests that hang."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ends_after(seconds: float) -> Iterator[None]:
    """Raises ``TimeoutError`` in the parent process once the ``with`` block has run for this long."""

    def expire(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"the test took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)

"""Communication between the processes of a run outside the groups: numbers in shared memory that outlive a process."""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterable

PID, STEP, JOINING, STORMING, LEAVING, ARRIVED, STRUCK, CHILD = range(8)
WORDS = 8


class Table:
    """One row per rank, of words that are 0 at the start of a round."""

    def __init__(self, world: int) -> None:
        self._words = memoryview(mmap.mmap(-1, world * WORDS * 8)).cast("d")
        self.world = world

    def clear(self) -> None:
        for place in range(len(self._words)):
            self._words[place] = 0.0

    def get(self, rank: int, word: int) -> float:
        return self._words[rank * WORDS + word]

    def put(self, rank: int, word: int, value: float) -> None:
        self._words[rank * WORDS + word] = value

    def mark(self, rank: int, word: int) -> None:
        """Stores the current time."""
        self.put(rank, word, time.monotonic())

    def meet(self, rank: int, ranks: Iterable[int], step: int, limit: float = 40) -> None:
        """Returns once all ``ranks`` have reached ``step``."""
        self.put(rank, STEP, step)
        deadline = time.monotonic() + limit
        while late := [other for other in ranks if self.get(other, STEP) < step]:
            if time.monotonic() > deadline:
                raise AssertionError(f"rank {rank} is at step {step}; ranks {late} did not come in {limit} s")
            time.sleep(0.001)

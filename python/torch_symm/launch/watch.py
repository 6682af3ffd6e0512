"""The progress of a run's ranks, in memory that the launcher reads to detect ranks that hang."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


NOBODY = -1


class StalledError(RuntimeError):
    """The ranks have made no progress for so long that one of them must hang."""


@dataclass(frozen=True)
class RankActivity:
    """The position of the most advanced rank. ``steps`` grows while any rank advances; ``side`` is None between sides.

    ``behind``: the ranks that have not advanced as far.
    """

    steps: int
    cell: int | None
    side: int | None
    behind: tuple[int, ...] = ()


class Progress:
    """A record of every rank's progress."""

    def __init__(self, world: int) -> None:
        """Makes the record of ``world`` ranks."""
        import torch

        self._rows: torch.Tensor = torch.zeros((world, 3), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._rows[:, 1:] = NOBODY

    def enter(self, rank: int, cell: int | None, side: int | None) -> None:
        """Records this rank's next step, for a launcher that finds it dead or hanging."""
        row = self._rows[rank]
        row[1] = NOBODY if cell is None else cell
        row[2] = NOBODY if side is None else side
        row[0] += 1

    def doing(self) -> RankActivity:
        """Returns where the ranks are, for the launcher. Ranks wait for each other, so none is two steps ahead."""
        rows = self._rows.tolist()
        most, cell, side = max(rows)
        behind = tuple(rank for rank, row in enumerate(rows) if row[0] < most)
        at_cell, at_side = (None if each == NOBODY else each for each in (cell, side))
        return RankActivity(sum(row[0] for row in rows), at_cell, at_side, behind)


class Watch:
    """Detects that ``progress`` stalls, for ``first_s`` at the start or ``still_s`` later."""

    def __init__(self, progress: Progress, first_s: float, still_s: float) -> None:
        """Starts the clock now."""
        self._progress, self._still_s = progress, still_s
        self._steps, self._since, self._limit = 0, time.monotonic(), first_s

    def stuck(self) -> RankActivity | None:
        """Returns where the ranks are if they have stalled."""
        now, doing = time.monotonic(), self._progress.doing()
        if doing.steps != self._steps:
            self._steps, self._since, self._limit = doing.steps, now, self._still_s
        return doing if now - self._since > self._limit else None

    @property
    def limit_s(self) -> float:
        """The current limit in seconds."""
        return self._limit


def which(ranks: Sequence[int], world: int) -> str:
    """Names some of ``world`` ranks, such as ``ranks 0, 2 of 4``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {world}"


def stopped(processes: Sequence[Any]) -> tuple[int, ...]:
    """The ranks whose processes are stopped, by a signal or a debugger."""
    return tuple(rank for rank, process in enumerate(processes) if state(process.pid) in ("T", "t"))


def state(pid: int) -> str:
    """Returns Linux's letter for the state of a process; empty if the process does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""

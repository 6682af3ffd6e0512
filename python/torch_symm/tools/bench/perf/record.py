"""What a run finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .request import NCCL_TYPES, Wanted

#: Where results go: to tensors of their own, or over the input.
PLACEMENTS = ("out_of_place", "in_place")


@dataclass(frozen=True)
class Figure:
    """Times of one side in µs per call, each call its slowest rank's; ``wrong`` elements, ``None``: not checked."""

    median_us: float
    mean_us: float
    p99_us: float
    min_us: float
    iterations: int
    wrong: int | None


@dataclass(frozen=True)
class Found:
    """A finished row: figures by side and placement. ``notes``: why a side has none, by side."""

    wanted: Wanted
    sides: Mapping[str, Mapping[str, Figure]]
    notes: Mapping[str, str] = field(default_factory=dict)
    #: The least time that memory allows, in µs, where it sets a limit.
    limit_us: float | None = None

    def algbw(self, figure: Figure) -> float:
        """GB/s (10⁹ bytes): S / time."""
        return self.wanted.size / figure.median_us / 1e3

    def busbw(self, figure: Figure) -> float:
        """GB/s as the links see it."""
        return self.algbw(figure) * self.wanted.bus_factor

    def ratio(self, side: str, placement: str) -> float | None:
        """How many times as long ``side`` takes as the first side."""
        first = next(iter(self.sides.values()), {}).get(placement)
        other = self.sides.get(side, {}).get(placement)
        return other.median_us / first.median_us if first and other else None

    @property
    def wrong(self) -> int:
        """Wrong elements in all."""
        return sum(figure.wrong or 0 for placed in self.sides.values() for figure in placed.values())

    def records(self) -> list[dict[str, Any]]:
        """A flat record for each side and placement."""
        head: dict[str, Any] = {
            **asdict(self.wanted),
            "count": self.wanted.count,
            "type": NCCL_TYPES[self.wanted.dtype],
            "limit_us": self.limit_us,
        }
        return [
            {
                **head,
                "side": side,
                "placement": placement,
                **asdict(figure),
                "algbw": self.algbw(figure),
                "busbw": self.busbw(figure),
                "ratio": self.ratio(side, placement),
            }
            for side, placed in self.sides.items()
            for placement, figure in placed.items()
        ]


@dataclass(frozen=True)
class Absent:
    """A side that cannot be measured here, and why."""

    side: str
    reason: str

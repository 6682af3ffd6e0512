"""The results of a run, and how they are read from JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch_symm.tools.command import check_figures

from .ops import OPS
from .request import NCCL_TYPES, Wanted

#: Where results are written: to separate tensors, or over the input.
PLACEMENTS = ("out_of_place", "in_place")
DISTURBED_CORES = 0.5


@dataclass(frozen=True)
class Figure:
    """Times of one side in µs per call of the slowest rank; the number of wrong elements, ``None`` if unchecked."""

    median_us: float
    mean_us: float
    p99_us: float
    min_us: float
    iterations: int
    wrong: int | None


@dataclass(frozen=True)
class Found:
    """A finished row: figures by side and placement. ``notes``: by side, the reason why it has no figure."""

    wanted: Wanted
    sides: Mapping[str, Mapping[str, Figure]]
    notes: Mapping[str, str] = field(default_factory=dict)
    #: The minimum time in µs that the memory's bandwidth allows, and the same if every byte is staged. ``None`` if
    #: memory does not limit the call.
    limit_us: float | None = None
    staged_us: float | None = None
    #: Number of cores that other processes kept busy meanwhile.
    other_cores: float | None = None

    @property
    def disturbed(self) -> bool:
        """True if other processes kept more than half a core busy, so that the figures are unreliable."""
        return (self.other_cores or 0.0) > DISTURBED_CORES

    def algbw(self, figure: Figure) -> float:
        """Algorithm bandwidth in GB/s (10⁹ bytes): size / time."""
        return self.wanted.size / figure.median_us / 1e3

    def busbw(self, figure: Figure) -> float:
        """Bus bandwidth in GB/s."""
        return self.algbw(figure) * self.wanted.bus_factor

    def ratio(self, side: str, placement: str) -> float | None:
        """Returns the time of ``side`` divided by the time of the first side."""
        first = next(iter(self.sides.values()), {}).get(placement)
        other = self.sides.get(side, {}).get(placement)
        return other.median_us / first.median_us if first and other else None

    @property
    def wrong(self) -> int:
        """Number of wrong elements in all."""
        return sum(figure.wrong or 0 for placed in self.sides.values() for figure in placed.values())

    def records(self) -> list[dict[str, Any]]:
        """Returns a flat record for each side and placement."""
        head: dict[str, Any] = {
            **asdict(self.wanted),
            "count": self.wanted.count,
            "type": NCCL_TYPES[self.wanted.dtype],
            "limit_us": self.limit_us,
            "staged_us": self.staged_us,
            "other_cores": self.other_cores,
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


def quantile(ordered: Sequence[float], share: float) -> float:
    """Returns the smallest of the ``ordered`` values that is not below ``share`` of them (nearest rank)."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def read(path: Path) -> tuple[list[Found], dict[str, Any]]:
    """Reads the rows of a run that ``--json`` wrote to ``path``, and its machine.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file does not hold a run.
    """
    try:
        run = json.loads(path.read_text())
        found: dict[Wanted, Found] = {}
        for row in run["rows"]:
            wanted = Wanted(**{name: row[name] for name in Wanted.__dataclass_fields__})
            figure = Figure(**{name: row[name] for name in Figure.__dataclass_fields__})
            check_figures([wanted.size, wanted.world, *(v for name, v in vars(figure).items() if name != "wrong")])
            rest = {name: row[name] for name in ("limit_us", "staged_us", "other_cores")}
            check_figures([value for value in rest.values() if value is not None])
            one = found.setdefault(wanted, Found(wanted, {}, {}, **rest))
            sides: Any = one.sides
            sides.setdefault(row["side"], {})[row["placement"]] = figure
            if wanted.op not in OPS or not figure.median_us > 0 or wanted.dtype not in NCCL_TYPES:
                raise ValueError(f"no row: {str(row)[:80]}")
        here = {name: run["machine"][name] for name in ("date", "cpu", "cores", "torch")}
        if not all(isinstance(value, (str, int)) for value in here.values()):
            raise ValueError("no machine")
        return list(found.values()), here
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"--draw: {path} holds no run of this benchmark: {error}") from error

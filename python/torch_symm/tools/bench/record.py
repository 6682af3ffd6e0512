"""What one run writes down, and how it is read from and written to JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from . import limits, targets
from .machine import Machine
from .ops import OPS

DISTURBED_CORES = 0.5


@dataclass(frozen=True)
class Cell:
    """One thing to measure. ``size`` is S as asked for; ``bytes`` is S rounded up to whole elements (a rank).

    ``redop`` and ``root`` say how, where the operation has them.
    """

    op: str
    dtype: str
    world: int
    size: int
    bytes: int
    redop: str = "sum"
    root: int = 0


@dataclass(frozen=True)
class Side:
    """One backend's figures in one cell. Times in µs per call, bandwidths in GB/s (10^9 bytes)."""

    backend: str
    median_us: float
    p99_us: float
    mean_us: float
    min_us: float
    iterations: int
    algbw: float
    busbw: float


@dataclass(frozen=True)
class Row:
    """One measured cell. ``ratio`` is peer median / tested median; limits in µs; ``other_cores`` others kept busy."""

    cell: Cell
    tested: Side
    peer: Side | None
    ratio: float | None
    target: float | None
    met: bool | None
    floor_us: float | None
    staged_us: float | None
    other_cores: float

    @property
    def disturbed(self) -> bool:
        """Whether others kept more than half a core busy, so that ratio and verdict say little."""
        return self.other_cores > DISTURBED_CORES

    @property
    def times_floor(self) -> float | None:
        """Tested median as a multiple of the memory limit `floor_us`."""
        return self.tested.median_us / self.floor_us if self.floor_us else None


@dataclass(frozen=True)
class Run:
    """Everything that one run found. ``copy_bytes_per_s`` by number of ranks; ``failure`` if it ended early."""

    machine: Machine
    arguments: list[str]
    rows: list[Row]
    copy_bytes_per_s: dict[int, float]
    loadavg_after: list[float]
    seconds: float
    failure: str | None = None

    def write(self, path: Path) -> None:
        """Writes the run to ``path`` as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest of the ``ordered`` values that is not below ``share`` of them (nearest rank)."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def summarize(cell: Cell, backend: str, samples_us: Sequence[float], iterations: int) -> Side:
    """Figures of one side from its samples in µs, each the slowest rank's."""
    ordered = sorted(samples_us)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    algbw = cell.bytes / median / 1e3 if cell.size else 0.0
    return Side(
        backend=backend,
        median_us=median,
        p99_us=quantile(ordered, 0.99),
        mean_us=sum(ordered) / len(ordered),
        min_us=ordered[0],
        iterations=iterations,
        algbw=algbw,
        busbw=algbw * OPS[cell.op].bus_factor(cell.world),
    )


def judge(cell: Cell, tested: Side, peer: Side | None, bytes_per_second: float, other_cores: float) -> Row:
    """The row of a measured cell: ratio, target and limits."""
    ratio = peer.median_us / tested.median_us if peer else None
    known = peer is not None and peer.backend == targets.PEER
    return Row(
        cell=cell,
        tested=tested,
        peer=peer,
        ratio=ratio,
        target=targets.ratio_target(cell.op, cell.size, cell.world),
        met=targets.is_met(cell.op, cell.size, cell.world, tested.median_us, ratio if known else None),
        floor_us=limits.limit_us(cell.op, cell.bytes, cell.world, bytes_per_second, staged=False),
        staged_us=limits.limit_us(cell.op, cell.bytes, cell.world, bytes_per_second, staged=True),
        other_cores=other_cores,
    )

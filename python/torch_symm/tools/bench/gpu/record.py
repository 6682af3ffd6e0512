"""The findings about a cell."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Cell:
    """One cell. ``size`` is the requested size in bytes; ``bytes`` is rounded up to whole elements (per rank).

    ``redop`` and ``root`` apply where the operation has them.
    """

    op: str
    dtype: str
    world: int
    size: int
    bytes: int
    redop: str = "sum"
    root: int = 0


#: Sides that are the tested backend.
OURS = ("symm", "symm pool")


@dataclass(frozen=True)
class Overlap:
    """Times in µs of a chain of ``calls`` calls, of a chain of products, and of both at once."""

    calls: int
    alone_us: float
    products_us: float
    together_us: float

    @property
    def call_us(self) -> float:
        """Time of a call while nothing else runs."""
        return self.alone_us / self.calls

    @property
    def lost(self) -> float:
        """(together - longer) / shorter: 0 is perfect overlap, 1 is one after the other."""
        longer, shorter = max(self.alone_us, self.products_us), min(self.alone_us, self.products_us)
        return (self.together_us - longer) / shorter

    def record(self) -> dict[str, float]:
        """Everything by name."""
        return {**asdict(self), "call_us": self.call_us, "lost": self.lost}


@dataclass
class GpuFigure:
    """One side in one cell: µs per call, the median over turns, and the turns. ``note``: why a figure is missing.

    ``host_us``, ``group_us`` and ``backend_us``: the host's time in a call, by the level at which it is entered;
    ``launch_us``: in the driver's launch of an empty kernel; ``operator_us``: in ``torch.ops.symm.all_reduce``.
    """

    graph_us: float | None = None
    eager_us: float | None = None
    host_us: float | None = None
    group_us: float | None = None
    backend_us: float | None = None
    launch_us: float | None = None
    operator_us: float | None = None
    graph_turns: list[float] = field(default_factory=list)
    eager_turns: list[float] = field(default_factory=list)
    note: str | None = None
    overlap: Overlap | None = None

    def us(self, mode: str) -> float | None:
        """The figure of ``mode``: graph, eager or host."""
        return {"graph": self.graph_us, "eager": self.eager_us, "host": self.host_us}[mode]


@dataclass(frozen=True)
class Measured:
    """A finished cell. ``calls``: per graph, and per timed loop."""

    cell: Cell
    calls: int
    figures: dict[str, GpuFigure]

    def best_peer(self, mode: str) -> tuple[str, float] | None:
        """The fastest side that is not ours, and its µs."""
        found = [(us, name) for name, figure in self.figures.items() if name not in OURS and (us := figure.us(mode))]
        return (min(found)[1], min(found)[0]) if found else None

    def ratio(self, side: str, mode: str) -> float | None:
        """Returns the best peer's time divided by the time of ``side``."""
        best, own = self.best_peer(mode), self.figures[side].us(mode) if side in self.figures else None
        return best[1] / own if best and own else None


@dataclass(frozen=True)
class GpuAbsent:
    """A side without times. ``lost``: true if a call timed out or hung, or a process ended; false if it cannot run."""

    side: str
    reason: str
    lost: bool = False

"""A table of the last calls of some ranks: calls, bytes, times, and waits for slow ranks."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch_symm._repr import counted
from torch_symm._trace.dump import Call, Dump
from torch_symm._trace.report import Group, merge

#: Lateness below this does not count as waiting: two clocks of one node differ by up to this much, and a wake-up takes
#: as long.
LATE_NS = 20_000
HEADINGS = ("collective", "bytes", "calls", "total", "µs", "p99", "waiting", "last to start")


@dataclass
class Line:
    """Calls of one operation and size, which is counted like in nccl-tests and rounded up to a power of two.

    ``us``: the time of each call that has ended, of every rank. The other figures are of calls that are known of all
    ranks. ``spent``: the nanoseconds that the ranks spent in these calls; ``waited``: the part of them before the last
    rank had started. ``last``: how often each rank started last, more than ``LATE_NS`` after the first rank.
    """

    op: str
    size: int
    calls: int = 0
    total: int = 0
    us: list[float] = field(default_factory=list)
    waited: int = 0
    spent: int = 0
    compared: int = 0
    last: Counter[int] = field(default_factory=Counter)

    @property
    def waiting(self) -> float | None:
        """The share of the time in calls that ranks waited for the slowest rank; ``None`` if unknown."""
        return self.waited / self.spent if self.spent else None

    @property
    def straggler(self) -> tuple[int, float] | None:
        """Returns the rank that most often started last, and its share of the calls."""
        return (self.last.most_common(1)[0][0], self.last.most_common(1)[0][1] / self.compared) if self.last else None

    def as_json(self) -> dict[str, object]:
        """Returns the figures for programs."""
        return {
            "op": self.op,
            "size": self.size,
            "calls": self.calls,
            "bytes": self.total,
            "median_us": statistics.median(self.us) if self.us else None,
            "p99_us": _p99(self.us) if self.us else None,
            "waiting": self.waiting,
            "straggler": self.straggler and self.straggler[0],
            "last_share": self.straggler and self.straggler[1],
        }


def lines(groups: Iterable[Group]) -> list[Line]:
    """Aggregates the calls of ``groups``, sorted by total time."""
    found: dict[tuple[str, int], Line] = {}
    for group in groups:
        for view in group.views.values():
            for call in view.calls:
                size = _size(call, view.world)
                line = found.setdefault((call.op, size), Line(call.op, size))
                line.calls += 1
                line.total += max(call.bytes_in, call.bytes_out)
                if call.started_ns and call.ended_ns and call.state == "completed":
                    line.us.append((call.ended_ns - call.started_ns) / 1e3)
        for line, calls in _together(group, found):
            _compare(line, calls)
    return sorted(found.values(), key=lambda line: (-sum(line.us), -line.calls))


def _together(group: Group, found: dict[tuple[str, int], Line]) -> Iterable[tuple[Line, dict[int, Call]]]:
    """Returns the collectives that the dumps of all ranks have: the line of each, and its call on each rank."""
    kept: dict[tuple[int, bool], dict[int, Call]] = {}
    for rank, view in group.views.items():
        for call in view.calls:
            if call.sequence and not call.message and call.started_ns:
                kept.setdefault((call.sequence, call.cuda), {})[rank] = call
    members = {member.rank: member.global_rank for member in group.members}
    for calls in kept.values():
        if len(calls) == len(members) > 1:
            first = min(calls)
            line = found[calls[first].op, _size(calls[first], group.views[first].world)]
            yield line, {members[rank]: one for rank, one in calls.items()}


def _compare(line: Line, calls: dict[int, Call]) -> None:
    begun = {rank: call.started_ns or 0 for rank, call in calls.items()}
    rank, last = max(begun.items(), key=lambda one: one[1])
    line.compared += 1
    if last - min(begun.values()) > LATE_NS:
        line.last[rank] += 1
    for call in calls.values():
        if call.started_ns and call.ended_ns:
            line.waited += min(max(0, last - call.started_ns), call.ended_ns - call.started_ns)
            line.spent += call.ended_ns - call.started_ns


def _size(call: Call, world: int) -> int:
    size = call.size(world)
    return 1 << (size - 1).bit_length() if size > 1 else size


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[max(0, -(-99 * len(values) // 100) - 1)]


def render(dumps: Sequence[Dump]) -> str:
    """Renders the table, for human readers."""
    groups = merge(dumps)
    found = lines(groups)
    if not found:
        return "no call has been made"
    *rows, last = zip(HEADINGS, *(_fields(line) for line in found), strict=True)
    text = aligned(list(zip(*rows, strict=True)))
    told = (f"{line}  {straggler}".rstrip() for line, straggler in zip(text, last, strict=True))
    return "\n".join([heading(dumps, groups), *told])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligns columns to equal width: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [f"{row[0]:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]


def heading(dumps: Sequence[Dump], groups: Sequence[Group]) -> str:
    """Returns the number of calls, the processes that made them, and the seconds since the first of them."""
    calls = [call for group in groups for view in group.views.values() for call in view.calls]
    seconds = (max(dump.written_ns for dump in dumps) - min((call.created_ns for call in calls), default=0)) / 1e9
    processes = f"{len(dumps)} processes" if len(dumps) > 1 else "this process"
    return f"the last {counted(len(calls), 'call')} of {processes} on {dumps[0].host}, {seconds:.1f} s"


def _fields(line: Line) -> tuple[str, ...]:
    straggler = line.straggler
    return (
        line.op,
        shown_bytes(line.size),
        str(line.calls),
        shown_bytes(line.total),
        f"{statistics.median(line.us):.1f}" if line.us else "-",
        f"{_p99(line.us):.1f}" if line.us else "-",
        "-" if line.waiting is None else f"{line.waiting:.0%}",
        f"rank {straggler[0]} ({straggler[1]:.0%})" if straggler else "-",
    )


def shown_bytes(count: int) -> str:
    """Returns a number of bytes with its unit, such as ``3.91 KiB``."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"

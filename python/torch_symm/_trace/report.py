"""Combines several ranks' dumps: which ranks are missing, and where."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice

from torch_symm._repr import name_ranks

from .dump import Call, Dump, Member, Peer, Series, View


@dataclass
class Group:
    """A group, as seen by its ranks that wrote dumps."""

    name: str
    #: The ranks in the default group, on all nodes.
    global_ranks: list[int]
    views: dict[int, View]

    @property
    def several(self) -> bool:
        """True if the group spans nodes."""
        return any(view.other_nodes for view in self.views.values())

    @property
    def members(self) -> list[Member]:
        """The ranks of each node that wrote a dump."""
        known = {member.rank: member for view in self.views.values() for member in view.members}
        return [known[rank] for rank in sorted(known)]

    def knows(self, rank: int) -> bool:
        """Returns true if the dumps show the progress of ``rank``."""
        # In a group on several nodes, the ranks of a node publish only the calls inside their node.
        return rank in self.views or not self.several

    def reached(self, rank: int, series: Series) -> int:
        """Returns the number of the last collective that ``rank`` has started, according to all dumps."""
        view, told = self.views.get(rank), not self.several
        known = [self._of(peer, series.cuda) for peer in self.known(rank) if told]
        if view:
            if told:
                known.append((view.launched or 0) if series.cuda else view.begun)
            known += [call.sequence or 0 for call in view.calls if call.series == series and not call.message]
        return max(known, default=0)

    @staticmethod
    def _of(peer: Peer, cuda: bool) -> int:
        return (peer.launched or 0) if cuda else peer.begun

    def known(self, rank: int) -> list[Peer]:
        """Returns the other ranks' knowledge about ``rank``, the latest last."""
        views = sorted(self.views.values(), key=lambda view: view.written_ns)
        return [peer for view in views if view.rank != rank for peer in view.peers if peer.rank == rank]

    def calls(self, number: int, series: Series) -> dict[int, Call]:
        """Returns collective ``number`` of each rank whose dump has it."""
        return {
            rank: call
            for rank, view in sorted(self.views.items())
            for call in view.calls
            if call.sequence == number and call.series == series and not call.message
        }


def merge(dumps: Iterable[Dump]) -> list[Group]:
    """Merges the groups of all dumps, in the order of joining. The later of two dumps of a rank counts."""
    groups: dict[tuple[str, int], Group] = {}
    views = [view for dump in dumps for view in dump.views]
    for view in sorted(views, key=lambda view: view.written_ns):
        group = groups.setdefault(view.key, Group(view.name, view.global_ranks, {}))
        group.views[view.rank] = view
    return sorted(groups.values(), key=lambda group: min(view.joined_ns for view in group.views.values()))


def render(dumps: Sequence[Dump]) -> str:
    """The report, for human readers."""
    groups = merge(dumps)
    if not groups:
        return "no group has been joined"
    return "\n\n".join("\n".join(_lines(group)) for group in groups)


def as_json(dumps: Sequence[Dump]) -> list[dict[str, object]]:
    """The report of each group: its name, its global ranks, the global ranks that wrote a dump, and the text."""
    return [
        {
            "group": group.name,
            "ranks": group.global_ranks,
            "dumps": sorted(view.global_rank for view in group.views.values()),
            "says": [line.strip() for line in _lines(group)],
        }
        for group in merge(dumps)
    ]


def _lines(group: Group) -> Iterator[str]:
    dumped = name_ranks(sorted(group.views))
    yield f'group "{group.name}" of {len(group.global_ranks)} ranks; dumps of {dumped}'
    failures = [(view.failure.seen_ns, rank, view.failure) for rank, view in group.views.items() if view.failure]
    if failures:
        when, _, failure = min(failures, key=lambda seen: seen[:2])
        seen = name_ranks(sorted(rank for _, rank, _ in failures))
        yield f"  failed, as {seen} saw from {_time(when)} on: {failure.kind}: {failure.message}"
    every = [Series(cuda) for cuda in (False, True)]
    some = [series for series in every if any(group.reached(member.rank, series) for member in group.members)]
    for member in group.members:
        yield f"  {_standing(group, member, some or every[:1])}"
    if elsewhere := sorted(set(range(len(group.global_ranks))) - {member.rank for member in group.members}):
        yield f"  {name_ranks(elsewhere)}: no dump of {'its node' if len(elsewhere) == 1 else 'their nodes'}"
    for series in some:
        yield from (f"  {line}" for line in _missing(group, series, bool(failures)))
        yield from (f"  {line}" for line in _mismatch(group, series))
    yield from (f"  {line}" for line in _phases(group))
    yield from (f"  {line}" for line in _messages(group))


def _standing(group: Group, member: Member, some: list[Series]) -> str:
    parts = []
    if group.knows(member.rank):
        reached = ((series, group.reached(member.rank, series)) for series in some)
        parts.append(
            ", ".join(f"{series} #{number} begun" if number else f"no {series} begun" for series, number in reached)
        )
    view = group.views.get(member.rank)
    if view:
        calls = (call for call in reversed(view.calls) if call.sequence and not call.message)
        parts += [f"last {_state(call, view)}" for call in islice(calls, 1)]
    else:
        parts.append("no dump")
        if known := group.known(member.rank):
            parts.append(f"{known[-1].absence or known[-1].process or 'no such process'}, as others saw")
    return f"rank {member.rank} (pid {member.pid}): {'; '.join(parts)}"


def _state(call: Call, view: View) -> str:
    text = f"{call.text} #{call.sequence}"
    seconds = _seconds(call, view)
    if call.state == "completed":
        return f"{text}: completed in {seconds * 1e3:.3f} ms"
    if call.state == "failed":
        return f"{text}: {call.outcome} after {seconds:.1f} s"
    if call.cuda:
        return f"{text}: launched {seconds:.1f} s before the dump"
    return f"{text}: under way for {seconds:.1f} s"


def _seconds(call: Call, view: View) -> float:
    return max(0, (call.ended_ns or view.written_ns) - (call.started_ns or call.created_ns)) / 1e9


def _missing(group: Group, series: Series, failed: bool) -> Iterator[str]:
    """Lists the ranks that have not started a collective in which others wait."""
    known = [member.rank for member in group.members if group.knows(member.rank)]
    reached = {rank: group.reached(rank, series) for rank in known}
    furthest = max(reached.values())
    behind: dict[int, list[int]] = {}
    for rank, number in reached.items():
        if number < furthest:
            behind.setdefault(number, []).append(rank)
    for number, ranks in sorted(behind.items()):
        calls = group.calls(number + 1, series)
        what = next((call.text for call in calls.values()), str(series))
        verb = "never began" if failed else ("has not begun" if len(ranks) == 1 else "have not begun")
        open_calls = {rank: call for rank, call in calls.items() if call.state in ("started", "failed")}
        if not open_calls:
            yield f"{name_ranks(ranks)} {verb} {what} #{number + 1}"
            continue
        seconds = max(_seconds(call, group.views[rank]) for rank, call in open_calls.items())
        did = "launched it" if series.cuda else f"waited {seconds:.1f} s in it"
        yield f"{name_ranks(ranks)} {verb} {what} #{number + 1}; {name_ranks(list(open_calls))} {did}"


def _mismatch(group: Group, series: Series) -> Iterator[str]:
    """Shows the first collective that ranks called differently, side by side."""
    numbers = {
        call.sequence
        for view in group.views.values()
        for call in view.calls
        if call.sequence and call.series == series and not call.message
    }
    for number in sorted(numbers):
        calls = group.calls(number, series)
        if len({call.text for call in calls.values()}) > 1:
            yield f"ranks disagree on {series} #{number}:"
            yield from (f"  rank {rank}: {call.text}" for rank, call in calls.items())
            return


def _phases(group: Group) -> Iterator[str]:
    """Lists multi-node collectives that are in progress or failed, each with its phase."""
    for rank, view in sorted(group.views.items()):
        for call in view.calls:
            if call.phase and call.state in ("started", "failed"):
                now = call.ended_ns or view.written_ns
                seconds = max(0, now - (call.phase_ns or now)) / 1e9
                yield f"rank {rank}: {call.text} #{call.sequence}: {call.phase}, for {seconds:.1f} s"


def _messages(group: Group) -> Iterator[str]:
    """Lists sends and receives that failed or have not ended."""
    for rank, view in sorted(group.views.items()):
        for call in view.calls:
            if not call.message or call.state == "completed" or (call.cuda and call.state == "started"):
                continue
            other = "any rank" if call.peer is None else f"{'global ' if call.internode else ''}rank {call.peer}"
            way = "to" if call.op == "send" else "from"
            how = f"{call.outcome} after" if call.state == "failed" else "under way for"
            yield f"rank {rank}: {call.text} {way} {other}: {how} {_seconds(call, view):.1f} s"


def _time(ns: int) -> str:
    return datetime.fromtimestamp(ns / 1e9).isoformat(sep=" ", timespec="milliseconds")

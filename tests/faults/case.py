"""Cases, their promises, the observations of ranks, and the comparison of both."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

#: Results of a rank other than an exception.
RIGHT, WRONG, CRASH, HANG, GONE = "right", "wrong", "crash", "hang", "gone"


@dataclass
class Saw:
    """What one rank observed: ``right``, ``wrong``, ``crash``, ``hang``, ``gone``, or the exception's type."""

    kind: str
    text: str = ""
    #: Seconds since the fault, or since the start of the call if there is no fault.
    seconds: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)
    #: The resources that the rank still had after it had left the group, in addition to those from before it joined.
    left: dict[str, int] = field(default_factory=dict)
    #: Lines that the rank printed, except the path of its trace.
    log: str = ""

    @property
    def raised(self) -> bool:
        return self.kind not in (RIGHT, WRONG, CRASH, HANG, GONE)


@dataclass
class Outcome:
    """The observations of all ranks except victims, by rank."""

    saw: dict[int, Saw] = field(default_factory=dict)
    #: The process of each rank, which messages name.
    pids: dict[int, int] = field(default_factory=dict)
    #: Processes and files left after all ranks had exited, and leftovers of the ranks themselves.
    left: Counter[str] = field(default_factory=Counter)
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def last(self) -> float:
        """Seconds until the last rank noticed."""
        return max((saw.seconds for saw in self.saw.values()), default=0.0)

    @property
    def verdict(self) -> str:
        """The outcome in one word: the worst of all ranks."""
        kinds = [saw.kind for saw in self.saw.values()]
        for worst in (CRASH, HANG):
            if worst in kinds:
                return worst
        if WRONG in kinds:
            return "silent" if all(kind in (RIGHT, WRONG) for kind in kinds) else "half"
        return RIGHT if all(kind == RIGHT for kind in kinds) else "error"

    def named(self, ranks: tuple[int, ...], pids: bool) -> int:
        """Number of ranks that raised and that name each of ``ranks``, with its process."""
        return sum(all(_names(saw.text, rank, self.pids, pids) for rank in ranks) for saw in self._raised())

    def _raised(self) -> list[Saw]:
        return [saw for saw in self.saw.values() if saw.raised]


def _names(text: str, rank: int, pids: dict[int, int], with_pid: bool) -> bool:
    if not re.search(rf"\branks? (\d+, |\d+ and )*{rank}\b", text):
        return False
    return not with_pid or re.search(rf"\bpid {pids.get(rank, -1)}\b", text) is not None


@dataclass(frozen=True)
class Promise:
    """The promise of symm for a case."""

    #: The results that each rank may see.
    sees: tuple[str, ...] = (RIGHT,)
    #: Ranks that every message names, and whether it also names their processes.
    names: tuple[int, ...] = ()
    pids: bool = True
    #: Expressions that every message matches.
    says: tuple[str, ...] = ()
    #: Maximum seconds until the last rank notices, on an idle node, and minimum seconds before any rank gives up.
    within: float | None = None
    not_before: float = 0.0
    #: Maximum values of figures; a missing figure breaks the promise.
    at_most: Mapping[str, float] = field(default_factory=dict)
    #: Figures that are durations, which may be longer on a busy node.
    stretches: tuple[str, ...] = ()
    nothing_left: bool = True
    #: True if all messages must be the same.
    same: bool = False
    #: True if no rank may print anything.
    quiet: bool = False


@dataclass(frozen=True)
class Case:
    """One fault. Cases with the same ``row`` share a row of the table."""

    name: str
    row: str
    #: Injects the fault on a side (``"gloo"`` or ``"symm"``).
    play: Callable[[str], Outcome]
    promise: Promise
    target: str
    #: How the case differs from the fault that users meet, for example by a shorter timeout.
    note: str = ""
    #: The backends that run it; some faults concern features that only symm has.
    sides: tuple[str, ...] = ("gloo", "symm")
    #: Where the ranks are: "one" is always one node, "both" is two nodes with ``--nodes``; "nodes" has its own layout.
    where: str = "both"


def broken(promise: Promise, outcome: Outcome, patience: float = 1.0) -> list[str]:
    """Differences between outcome and promise; time limits are multiplied by ``patience``."""
    found = []
    for rank, saw in sorted(outcome.saw.items()):
        if saw.kind not in promise.sees:
            found.append(f"rank {rank} saw {saw.kind}: {saw.text[:300]}")
        elif saw.raised:
            missing = [r for r in promise.names if not _names(saw.text, r, outcome.pids, promise.pids)]
            found += [
                f"rank {rank} does not name rank {r} (pid {outcome.pids.get(r)}): {saw.text[:300]}" for r in missing
            ]
            found += [
                f"rank {rank} does not say {what!r}: {saw.text[:300]}"
                for what in promise.says
                if not re.search(what, saw.text)
            ]
        if promise.quiet and saw.log:
            found.append(f"rank {rank} printed {saw.log[-400:]}")
        if saw.seconds < promise.not_before:
            found.append(f"rank {rank} gave up after {saw.seconds:.2f} s, before {promise.not_before} s")
    texts = {saw.text for saw in outcome.saw.values() if saw.raised}
    if promise.same and len(texts) > 1:
        found.append(f"messages differ: {sorted(texts)}")
    if promise.within is not None and outcome.last > promise.within * patience:
        found.append(f"the last rank knew after {outcome.last:.3f} s, not {promise.within} s")
    for name, most in promise.at_most.items():
        figure = outcome.figures.get(name)
        most *= patience if name in promise.stretches else 1.0
        if figure is None or figure > most:
            found.append(f"{name} is {figure}, not at most {most}")
    if promise.nothing_left and outcome.left:
        found.append(f"left over: {dict(outcome.left)}")
    if not outcome.saw and not outcome.figures:
        found.append("nobody saw anything")
    return found


#: Every case by name, in the order of the table.
CASES: dict[str, Case] = {}


def add(case: Case) -> None:
    """Registers a case."""
    if case.name in CASES:
        raise ValueError(f"two cases are called {case.name!r}")
    CASES[case.name] = case

"""The report of a failure: which rank failed, and how."""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Collection, Sequence
from pathlib import Path

from ._rank import Outcome, ours

#: symm's log line with the path of a dump, whose calls the report contains.
DUMPED = re.compile(r"^.*the last calls of this process are in .*\n", re.MULTILINE)
_FRAME = re.compile(r'\s*File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')


@dataclasses.dataclass
class Ending:
    """How one rank ended.

    ``status``: its exit code, or minus a signal; ``None``: it did not end in time. ``calls``: its last calls;
    ``None``: not known, because it ended before it could write them.
    """

    rank: int
    pid: int
    status: int | None
    outcome: Outcome | None
    log: str
    calls: list[str] | None
    stacks: str
    #: Seconds that the case waited for the rank, from the start or from another rank's failure.
    waited: float

    @property
    def failed(self) -> bool:
        """Returns true if the rank neither passed nor skipped."""
        return self.status != 0 or self.outcome is None or self.outcome.kind == "failed"


def describe(endings: Sequence[Ending], bad: Collection[int], expect_killed: Collection[int] = ()) -> str:
    """Reports ranks ``bad``: the first failure and its line; its traceback; the other ranks; the last calls."""
    late = [ending for ending in endings if ending.rank in bad and ending.status is None]
    dead = [ending for ending in endings if ending.rank in bad and ending.status is not None]
    raised = sorted((e for e in dead if e.outcome and e.outcome.kind == "failed"), key=lambda e: e.outcome.when)  # type: ignore[union-attr]
    # If a rank hangs or has died without an exception, it is the reason why other ranks fail.
    silent = [ending for ending in dead if ending not in raised]
    first = [*silent, *late, *raised][0]
    causes = [*silent, *late] or [first]
    lines = ["; ".join(_headline(ending, len(endings), expect_killed) for ending in causes)]
    for ending in raised:
        if ending.outcome and ending.outcome.text:
            lines += ["", f"rank {ending.rank}:", ending.outcome.text.rstrip()]
    for ending in late:
        lines += ["", f"rank {ending.rank}, where it hung:", _trimmed(ending.stacks) or "  no stack"]
    lines.append("")
    lines += [f"rank {ending.rank} (pid {ending.pid}) {_ended(ending, expect_killed)}" for ending in endings]
    if any(ending.calls for ending in endings):
        lines += ["", "last calls:"]
        lines += [f"rank {ending.rank}: {_calls(ending.calls)}" for ending in endings]
    return "\n".join(lines)


def _calls(calls: list[str] | None) -> str:
    return "not known" if calls is None else "; ".join(calls) or "none"


def _headline(ending: Ending, world_size: int, expect_killed: Collection[int]) -> str:
    return f"rank {ending.rank} of {world_size} {_ended(ending, expect_killed)}"


def _ended(ending: Ending, expect_killed: Collection[int]) -> str:
    """Returns ``failed at sums.py:3: ValueError: …`` and the like."""
    if ending.status is None:
        return f"did not end within {ending.waited:.1f} s{_where(ending.stacks)}"
    if ending.status < 0:
        return f"was killed by {_signal(-ending.status)}{_where(ending.stacks)}"
    if ending.outcome is None:
        return f"ended with exit code {ending.status} in the middle of the test"
    if ending.rank in expect_killed:
        return f"should have been killed, it {ending.outcome.kind}"
    if ending.outcome.kind == "failed":
        return f"failed{' at ' if ending.outcome.at else ''}{ending.outcome.at}: {ending.outcome.reason}"
    return ending.outcome.kind


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _where(stacks: str) -> str:
    """Returns where the main thread is, preferably outside torch's and the interpreter's libraries."""
    main = _trimmed(stacks).rpartition("hread 0x")[2]
    frames = [found for line in main.splitlines() if (found := _FRAME.match(line))]
    own = [found for found in frames if "/site-packages/" not in found["file"] and "/lib/python" not in found["file"]]
    for found in (own or frames)[:1]:
        return f", at {Path(found['file']).name}:{found['line']} in {found['name']}"
    return ""


def _trimmed(stacks: str) -> str:
    """Returns ``stacks`` without the frames of the harness below the test in the main thread, whose stack is last."""
    lines: list[str] = []
    hidden = False
    for line in stacks.splitlines():
        found = _FRAME.match(line)
        if found is None:
            hidden = line.startswith("Extension modules")
        elif ours(found["file"]):
            # Below are the frames of the process from which the rank was forked.
            hidden = True
        if not hidden:
            lines.append(line)
    return "\n".join(lines).rstrip()

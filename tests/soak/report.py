"""The results of a run, as text and as JSON."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from draw import Program
from rank import Outcome

#: Maximum growth of a process between its first rounds and the end.
FLAT = {"descriptors": 0, "threads": 0, "mappings of groups": 0, "resident KiB": 40 << 10}
#: Additional growth for each round, of about eight groups: a group may cost 1 KB.
A_ROUND = {"resident KiB": 8}
#: Number of rounds after which a process has loaded everything that it loads only once.
WARM = 4


@dataclass
class Report:
    """Sums over rounds."""

    device: str
    rounds: int = 0
    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    noticed: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    leaving: list[float] = field(default_factory=list)
    rejoining: list[float] = field(default_factory=list)
    #: Resources, after each round, of the process that lives as long as the run.
    held: list[dict[str, int]] = field(default_factory=list)

    def add(self, program: Program, outcomes: dict[int, Outcome]) -> None:
        self.rounds += 1
        self.faults[program.fault.kind] += 1
        for process, outcome in outcomes.items():
            self.calls += outcome.calls
            self.bytes += outcome.bytes
            self.noticed[program.fault.kind] += outcome.noticed
            self.leaving.append(outcome.leaving)
            self.rejoining.append(outcome.rejoining)
            if process == 0:
                self.held.append(outcome.held)

    def leaks(self) -> list[str]:
        """The resources that have grown, one sentence each."""
        if len(self.held) <= WARM:
            return []
        first, last = self.held[WARM], self.held[-1]
        return [
            f"{name}: {first[name]} after round {WARM}, {last[name]} after round {len(self.held)}"
            for name, more in FLAT.items()
            # On GPUs, resident memory also grows by the kernels that each kind of call loads.
            if last[name] > first[name] + more + A_ROUND.get(name, 0) * len(self.held)
            and (name, self.device) != ("resident KiB", "cuda")
        ]

    def record(self) -> dict[str, Any]:
        """Returns the record for JSON; times in milliseconds."""
        return {
            "rounds": self.rounds,
            "calls checked": self.calls,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 1),
            "faults": dict(self.faults.most_common()),
            "noticed ms": {kind: spread(times) for kind, times in sorted(self.noticed.items()) if times},
            "leaving ms": spread(self.leaving),
            "rejoining ms": spread(self.rejoining),
            "held": {"first": self.held[min(WARM, len(self.held) - 1)], "last": self.held[-1]} if self.held else {},
            "resident KiB": [held["resident KiB"] for held in self.held[:: max(1, len(self.held) // 20)]],
            "leaks": self.leaks(),
        }

    def text(self) -> str:
        record = self.record()
        lines = [
            f"{self.rounds} rounds in {self.seconds:.0f} s, {self.calls} calls checked, {self.bytes / 1e9:.2f} GB",
            "faults: " + ", ".join(f"{kind} {number}" for kind, number in record["faults"].items()),
            f"{'noticed within, ms':24}{'number':>8}{'p50':>9}{'p99':>9}{'max':>9}",
        ]
        rows = {**record["noticed ms"], "(leaving)": record["leaving ms"], "(a new group)": record["rejoining ms"]}
        for kind, row in rows.items():
            lines.append(f"{kind:24}{row['number']:>8}{row['p50']:>9}{row['p99']:>9}{row['max']:>9}")
        if self.held:
            lines += [f"{name}: {record['held']['first'][name]} -> {record['held']['last'][name]}" for name in FLAT]
        return "\n".join([*lines, *(f"leak: {leak}" for leak in self.leaks())])


def spread(times: list[float]) -> dict[str, float]:
    """Number, median, 99th percentile and maximum of seconds, in milliseconds."""
    ordered = sorted(times) or [0.0]
    at = {
        name: ordered[min(len(ordered) - 1, int(len(ordered) * part))] for name, part in (("p50", 0.5), ("p99", 0.99))
    }
    return {"number": len(times), **{name: round(1e3 * value, 1) for name, value in {**at, "max": ordered[-1]}.items()}}

"""The outcomes as a line, a table and JSON."""

from __future__ import annotations

import os
import platform
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .case import Case, Outcome

#: Marks of the table's place in a document, for one node and for several.
MARKS = {
    False: ("<!-- fault matrix: begin -->", "<!-- fault matrix: end -->"),
    True: ("<!-- fault matrix over nodes: begin -->", "<!-- fault matrix over nodes: end -->"),
}


@dataclass
class Result:
    """One case on one side."""

    case: Case
    side: str
    outcome: Outcome
    #: Violations of symm's promise.
    broken: list[str]
    took: float


def line(result: Result) -> str:
    """The outcome as a line for the terminal."""
    word = "" if result.side != "symm" else "  BROKEN" if result.broken else "  kept"
    text = f"{result.case.name:32} {result.side:5} {summary([result])}{word} [{result.took:.1f} s]"
    return "\n".join([text, *(f"    {reason}" for reason in result.broken)])


def facts(seconds: float, sides: Sequence[str]) -> dict[str, Any]:
    """Date, hardware and versions of the figures."""
    model = next(
        (
            row.partition(":")[2].strip()
            for row in Path("/proc/cpuinfo").read_text().splitlines()
            if row.startswith("model name")
        ),
        "",
    )
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "load": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "sides": list(sides),
        "seconds": round(seconds),
    }


def seconds(value: float) -> str:
    """A short duration: `0.6 ms`, `0.25 s`, `20 s`."""
    if value < 0.0995:
        return f"{value * 1e3:.2g} ms" if value < 0.00995 else f"{value * 1e3:.0f} ms"
    return f"{value:.2f} s" if value < 9.95 else f"{value:.0f} s"


def summary(results: Sequence[Result]) -> str:
    """A short summary of the results of one or several cases."""
    outcomes = [result.outcome for result in results]
    verdicts = Counter(outcome.verdict for outcome in outcomes)
    words = [
        ", ".join(f"{count} {verdict}" if len(outcomes) > 1 else verdict for verdict, count in verdicts.most_common())
    ]
    kinds = Counter(saw.kind for outcome in outcomes for saw in outcome.saw.values() if saw.raised)
    if kinds:
        words.append("/".join(kind for kind, _ in kinds.most_common(3)))
    wanted = [(result.outcome, result.case.promise) for result in results if result.case.promise.names]
    raised = sum(sum(saw.raised for saw in outcome.saw.values()) for outcome, _ in wanted)
    if raised:
        named = sum(outcome.named(promise.names, promise.pids) for outcome, promise in wanted)
        words.append(f"named {named}/{raised}")
    last = [outcome.last for outcome in outcomes if outcome.last]
    if last:
        words.append(
            seconds(max(last))
            if len(last) == 1 or max(last) < 2 * min(last)
            else f"{seconds(min(last))} to {seconds(max(last))}"
        )
    figures: dict[str, float] = {}
    for outcome in outcomes:
        for name, value in outcome.figures.items():
            figures[name] = max(figures.get(name, value), value)
    words += [_figure(name, value) for name, value in figures.items()]
    left = sum((outcome.left for outcome in outcomes), Counter[str]())
    if left:
        words.append("left: " + ", ".join(f"{count} {what}" for what, count in left.items()))
    return "; ".join(word for word in words if word)


def _figure(name: str, value: float) -> str:
    words = name.replace("_", " ")
    if name.endswith("_s"):
        return f"{words[:-2]} {seconds(value)}"
    if name.endswith("_mb"):
        return f"{words[:-3]} {value:.0f} MB"
    return f"{words} {value:.3g}"


def markdown(results: Sequence[Result], facts: dict[str, Any], nodes: bool = False) -> str:
    """The table, one line for all cases of a row, and the facts above it."""
    rows: dict[str, list[Result]] = {}
    for result in results:
        rows.setdefault(result.case.row, []).append(result)
    head = (
        f"{facts['date']}, {facts['cpu']}, {facts['cores']} cores, load {facts['load'][0]} at the end, "
        f"Linux {facts['kernel']}, torch {facts['torch']}, Python {facts['python']}; `python tests/faults"
        f"{' --nodes' if nodes else ''}`, {facts['seconds']} s. One run of each case."
    )
    lines = [
        textwrap.fill(head, 120, break_on_hyphens=False),
        "",
        "| case | Gloo | symm | promised | kept |",
        "|---|---|---|---|---|",
    ]
    for row, all_results in rows.items():
        sides = {side: [result for result in all_results if result.side == side] for side in ("gloo", "symm")}
        cases = {result.case.name: result.case for result in all_results}
        notes = list(dict.fromkeys(case.note for case in cases.values() if case.note))
        targets = list(dict.fromkeys(case.target for case in cases.values()))
        title = row + (f" ({'; '.join(notes)})" if notes else "")
        kept = len(sides["symm"]) - sum(bool(result.broken) for result in sides["symm"])
        word = "-" if not sides["symm"] else "yes" if kept == len(sides["symm"]) else f"{kept} of {len(sides['symm'])}"
        cells = [
            title,
            *(summary(sides[side]) if sides[side] else "-" for side in ("gloo", "symm")),
            "; ".join(targets),
            word,
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines)


def as_json(results: Sequence[Result], facts: dict[str, Any]) -> dict[str, Any]:
    """All results, with each case and rank separately."""
    return {
        "facts": facts,
        "cases": [
            {
                "case": result.case.name,
                "row": result.case.row,
                "side": result.side,
                "verdict": result.outcome.verdict,
                "seconds_until_the_last_knew": result.outcome.last,
                "ranks": {rank: asdict(saw) for rank, saw in result.outcome.saw.items()},
                "figures": result.outcome.figures,
                "left": dict(result.outcome.left),
                "broken": result.broken,
                "took_seconds": round(result.took, 2),
            }
            for result in results
        ],
    }


def write_into(document: Path, text: str, nodes: bool = False) -> None:
    """Replaces the text between the two markers."""
    first, last = MARKS[nodes]
    before, begin, rest = document.read_text().partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"{document} lacks {first} or {last}")
    document.write_text(f"{before}{first}\n{text}\n{last}{after}")

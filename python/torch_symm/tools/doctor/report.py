"""The findings: sections of values, problems with remedies; as text, or as one JSON object."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch_symm._repr import counted

#: Width of the column of names.
NAMES = 12


@dataclass(frozen=True)
class Problem:
    """A failure (``fatal``) or a possible improvement, and its remedy."""

    text: str
    remedy: str
    fatal: bool = False


@dataclass(frozen=True)
class Section:
    """The findings about a subject: ``found`` for programs, ``lines`` for human readers."""

    name: str
    found: dict[str, Any]
    lines: Sequence[str]
    problems: Sequence[Problem] = field(default=())


def problems(sections: Iterable[Section]) -> list[Problem]:
    """Returns the problems of all sections, the fatal ones first."""
    found = [problem for section in sections for problem in section.problems]
    return sorted(found, key=lambda problem: not problem.fatal)


def render(section: Section) -> str:
    """Returns the section as text."""
    names = [section.name, *[""] * len(section.lines)]
    return "\n".join(f"{name:<{NAMES}} {line}".rstrip() for name, line in zip(names, section.lines, strict=False))


def verdict(found: Sequence[Problem]) -> str:
    """Returns the end of the text: every problem with its remedy, and the number of problems."""
    text = ""
    for problem in found:
        kind = "FAILS" if problem.fatal else "warning"
        text += f"\n{kind}: {problem.text}\n  remedy: {problem.remedy}"
    fatal = sum(problem.fatal for problem in found)
    warnings = len(found) - fatal
    counts = [f"{fatal} would fail" if fatal else "nothing would fail"]
    counts += [counted(warnings, "warning")] if warnings else []
    return f"{text}\n\n{', '.join(counts)}"


def as_json(sections: Sequence[Section]) -> dict[str, Any]:
    """Returns ``ok``, ``problems``, and the findings of each section by its name."""
    found = problems(sections)
    head: dict[str, Any] = {
        "ok": not any(problem.fatal for problem in found),
        "problems": [asdict(one) for one in found],
    }
    return head | {section.name: section.found for section in sections}

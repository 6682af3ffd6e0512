"""All cases, in the order of the table."""

from __future__ import annotations

from importlib import import_module

from .case import CASES, Case

THEMES = (
    *("deaths", "moments", "torchrun", "sigstop", "mismatches", "rejections", "joining", "arguments", "destroy"),
    *("resources", "stores", "programs", "nodes"),
)


def every_case() -> dict[str, Case]:
    """Imports all files of cases, including the cases of several nodes."""
    for theme in THEMES:
        import_module(f"{__package__}.{theme}")
    return CASES


def all_cases() -> list[Case]:
    """The cases of one node."""
    return [case for case in every_case().values() if case.where != "nodes"]

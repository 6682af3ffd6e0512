"""All cases, in the order of the table."""

from __future__ import annotations

from importlib import import_module

from .case import CASES, Case

THEMES = ("deaths", "stops", "mismatches", "joining", "arguments", "endings", "resources", "stores")


def all_cases() -> list[Case]:
    """Loads every theme."""
    for theme in THEMES:
        import_module(f"{__package__}.{theme}")
    return list(CASES.values())

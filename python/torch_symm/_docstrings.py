"""The docstrings of the native part's classes, taken from its stub, for ``help``."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType

_STUB = Path(__file__).with_name("_C.pyi")
_CLASS = re.compile(r'^class (\w+)[^\n]*:\n    """(.*?)"""', re.MULTILINE | re.DOTALL)


def install(native: ModuleType) -> None:
    """Sets each class's docstring from the stub. Without the stub, as in some bundles, they have no docstrings."""
    if _STUB.exists():
        for name, text in _CLASS.findall(_STUB.read_text(encoding="utf-8")):
            if hasattr(native, name):
                getattr(native, name).__doc__ = inspect.cleandoc(text)

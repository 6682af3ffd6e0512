"""Changes modules of torch that may be imported later, without importing them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class ImportHook(MetaPathFinder):
    """Finds no module itself; calls a function with each module of ``changes`` after the module's execution.

    A function may be called twice for one module if another thread imports it meanwhile.
    """

    def __init__(self, changes: Mapping[str, Callable[[ModuleType], object]]) -> None:
        self._changes = changes

    def install(self) -> None:
        """Changes the modules that are imported, and from now on those that are imported later."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        for name, change in self._changes.items():
            if name in sys.modules:
                change(import_module(name))  # If another thread is importing it, this waits for that thread.

    def remove(self) -> None:
        """Leaves modules that are imported later as they are."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._changes:
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            self._change_after(spec)
        return spec

    def _change_after(self, spec: ModuleSpec) -> None:
        """Makes the spec's loader change the module after its execution. The loader serves only this module."""
        loader = spec.loader
        assert loader is not None
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            del loader.exec_module
            if self in sys.meta_path:  # unless removed since
                self._changes[spec.name](module)

        loader.exec_module = exec_module  # type: ignore[method-assign]

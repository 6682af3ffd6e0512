"""Makes DTensor use symm from the first symm group on, or from the import of DTensor if that comes later.

Importing DTensor takes most of a second, so nothing here imports it, and ``import torch`` imports nothing more.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from torch_symm._warnings import SymmFallbackWarning

#: The modules that are changed, and the function of ``torch_symm.dtensor._redistribute`` that changes each.
_CHANGES = {
    "torch.distributed.tensor.placement_types": "replace_method",
    "torch.distributed.tensor.debug._comm_mode": "count_operator",
}

#: Functions that undo the changes made so far, by module.
_undo: dict[str, Callable[[], object]] = {}

_refused = False


def announce() -> None:
    """Called when a symm group is being made. Never raises, because DTensor works without the change."""
    if not _refused:
        _change_all()


def enable_redistribute() -> None:
    """Lets DTensor use :func:`torch_symm.dtensor.shard_dim_alltoall` where a mesh dimension's group is symm.

    The first symm group of a process does so unless :func:`disable_redistribute` was called. Never imports DTensor;
    modules that are imported later are changed on import.
    """
    global _refused
    _refused = False
    _change_all()


def disable_redistribute() -> None:
    """Restores DTensor's own method for all groups, until :func:`enable_redistribute`."""
    global _refused
    _refused = True
    if _watch in sys.meta_path:
        sys.meta_path.remove(_watch)
    for name in list(_undo):
        _undo.pop(name)()


def _change_all() -> None:
    if len(_undo) == len(_CHANGES):
        return
    for name in _CHANGES:
        if name in sys.modules and name not in _undo:
            _change(sys.modules[name])
    if _watch not in sys.meta_path:
        sys.meta_path.insert(0, _watch)


def _change(module: ModuleType) -> None:
    """Changes one module. A name that torch has changed stays as it is, with a warning."""
    try:
        from torch_symm.dtensor import _redistribute

        _undo[module.__name__] = getattr(_redistribute, _CHANGES[module.__name__])(module)
    except (AttributeError, ImportError) as error:
        with suppress(Warning):  # where warnings are errors
            text = f"DTensor does not use symm to move shards: {error}"
            warnings.warn(text, SymmFallbackWarning, stacklevel=2)


class _Watch(MetaPathFinder):
    """Finds no module itself; changes the modules of ``_CHANGES`` after their execution."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _CHANGES:
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            _change_after(spec)
        return spec


def _change_after(spec: ModuleSpec) -> None:
    """Makes the spec's loader change the module after its execution. The loader serves only this module."""
    loader = spec.loader
    assert loader is not None
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        del loader.exec_module
        if _watch in sys.meta_path:  # unless uninstalled since
            _change(module)

    loader.exec_module = exec_module  # type: ignore[method-assign]


_watch = _Watch()

"""Makes DTensor use symm from the first symm group on, or from the import of DTensor if that comes later.

Importing DTensor takes most of a second, so nothing here imports it, and ``import torch`` imports nothing more.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType

from torch_symm._import_hook import ImportHook
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
    _hook.remove()
    for name in list(_undo):
        _undo.pop(name)()


def _change_all() -> None:
    if len(_undo) < len(_CHANGES):
        _hook.install()


def _change(module: ModuleType) -> None:
    """Changes one module, once. A name that torch has changed stays as it is, with a warning."""
    if module.__name__ in _undo:
        return
    try:
        from torch_symm.dtensor import _redistribute

        _undo[module.__name__] = getattr(_redistribute, _CHANGES[module.__name__])(module)
    except (AttributeError, ImportError) as error:
        with suppress(Warning):  # where warnings are errors
            text = f"DTensor does not use symm to move shards: {error}"
            warnings.warn(text, SymmFallbackWarning, stacklevel=2)


_hook = ImportHook(dict.fromkeys(_CHANGES, _change))

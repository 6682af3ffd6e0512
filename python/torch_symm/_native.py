"""Loads the native part, or says in one sentence why it cannot serve this torch."""

from __future__ import annotations

import importlib
from types import ModuleType

from torch_symm._version import TORCH_VERSION


def load() -> ModuleType:
    """Returns ``torch_symm._C``.

    Raises:
        ImportError: torch is of another minor version than the one the native part was built for, or nothing was built.
    """
    import torch

    running = ".".join(torch.__version__.split(".")[:2])
    if running != TORCH_VERSION:
        raise ImportError(
            f"torch_symm was built for torch {TORCH_VERSION} and cannot serve torch {torch.__version__}: "
            f"install torch {TORCH_VERSION}, or a torch_symm that was built for torch {running}"
        )
    return importlib.import_module("torch_symm._C")

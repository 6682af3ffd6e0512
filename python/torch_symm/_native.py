"""Loads the native part, or says in one sentence why it cannot serve this torch."""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import os
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from torch_symm._version import TORCH_VERSION


def load() -> ModuleType:
    """Returns ``torch_symm._C``.

    Raises:
        ImportError: torch is of another minor version than the one the native part was built for, or nothing was built
            for this Python.
    """
    import torch

    running = ".".join(torch.__version__.split(".")[:2])
    if running != TORCH_VERSION:
        raise ImportError(
            f"torch_symm was built for torch {TORCH_VERSION} and cannot serve torch {torch.__version__}: "
            f"install torch {TORCH_VERSION}, or a torch_symm that was built for torch {running}"
        )
    try:
        native = importlib.import_module("torch_symm._C")
    except ModuleNotFoundError as error:
        if error.name != "torch_symm._C":
            raise
        raise ImportError(
            f"torch_symm has no native part for Python {sys.version_info.major}.{sys.version_info.minor} in "
            f"{Path(__file__).parent}: build it with `pip install --no-build-isolation .` in a checkout "
            "(a C++ compiler, cargo, torch and setuptools-rust are needed), or with `make build`"
        ) from error
    _announce(native, torch.version.cuda)
    return native


@cache
def _announce(native: ModuleType, cuda: str | None) -> None:
    """Tells the native part, once, where the compiler of its CUDA kernels and the package's profiles may be."""
    native._cuda_libraries([os.fsencode(folder) for folder in nvrtc_folders(cuda)])
    native._shipped_profiles(os.fsencode(Path(__file__).parent / "profiles"))
    # While the interpreter runs: later a thread that drops a tensor with a Python object would end the process.
    atexit.register(leave_all, native)


def leave_all(native: ModuleType) -> None:
    """Leaves every group of this process, which ends; peers hear of the exception because of which it does."""
    native._leave_all(_farewell())


def _farewell() -> str:
    """The exception with which this process ends, as ``KeyError: 'x'``; empty if there is none, or nobody can say.

    The interpreter keeps the one that ended a script in ``sys.last_value`` before the functions of ``atexit`` run, but
    neither ``SystemExit`` nor, where people type, the last of many that ended nothing. A process of
    ``multiprocessing`` is still handling its own.
    """
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return ""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if isinstance(error, SystemExit):
        if error.code in (None, 0):
            return ""
        # torch.multiprocessing ends a process whose function raised with sys.exit(1).
        error = error.__context__ or error
    if error is None:
        return ""
    try:
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
    except Exception:
        text = type(error).__name__
    return text.encode(errors="replace").decode()


def nvrtc_folders(cuda: str | None) -> list[Path]:
    """Folders of installed packages, as ``nvidia/cu13/lib``, that hold the compiler of the CUDA kernels.

    Those with the compiler of CUDA version ``cuda``, as ``"13.0"``, come first. Imports nothing.
    """
    try:
        spec = importlib.util.find_spec("nvidia")
    except ValueError:  # somebody put a module of that name into sys.modules that was not imported
        return []
    places = (spec and spec.submodule_search_locations) or []
    found = sorted(library for place in places for library in Path(place).glob("*/lib/libnvrtc.so.*"))
    major = (cuda or "").split(".")[0]
    found.sort(key=lambda library: library.name.split(".")[2] != major)
    return list(dict.fromkeys(library.parent for library in found))

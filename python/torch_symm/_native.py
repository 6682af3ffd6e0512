"""Loads the native part, or says in one sentence why it cannot serve this torch."""

from __future__ import annotations

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

"""Loads the native part, or explains in one sentence why it does not support this torch."""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any

from torch_symm import _docstrings, _repr
from torch_symm._version import TORCH_VERSIONS

_FOLDER = Path(__file__).parent
#: The operators of ``torch.ops.symm`` that the native part defines.
OPERATORS = (
    "_all_gather_matmul",
    "_matmul_reduce_scatter",
    "all_reduce",
    "all_reduce_add_rms_norm",
    "all_reduce_add_rms_norm_",
    "all_reduce_add_rms_norm_dynamic_fp8",
    "all_reduce_add_rms_norm_fp8",
)
#: Held while the extension is loaded, once per process.
_lock = RLock()


def load() -> ModuleType:
    """Returns ``torch_symm._C``, the extension for the torch that runs.

    Raises:
        ImportError: this package does not support the version of torch, or was not built for it or for this Python.
    """
    import torch

    running = ".".join(torch.__version__.split(".")[:2])
    file = extension(running)
    if file is None:
        raise ImportError(_why_not(running, torch.__version__))
    with _lock:
        return sys.modules.get("torch_symm._C") or _load(file, torch.version.cuda)


def _load(file: Path, cuda: str | None) -> ModuleType:
    loader = ExtensionFileLoader("torch_symm._C", str(file))
    spec = importlib.util.spec_from_file_location("torch_symm._C", file, loader=loader)
    assert spec is not None
    native = importlib.util.module_from_spec(spec)
    sys.modules["torch_symm._C"] = native
    try:
        loader.exec_module(native)
    except BaseException:
        del sys.modules["torch_symm._C"]
        raise
    sys.modules["torch_symm"]._C = native  # type: ignore[attr-defined]  # as an import does
    _announce(native, cuda)
    return native


def extension(torch_version: str) -> Path | None:
    """Returns the extension's file for torch ``torch_version``, such as ``"2.11"``, and this Python, if it exists."""
    file = _FOLDER / f"_C_torch{torch_version.replace('.', '_')}{EXTENSION_SUFFIXES[0]}"
    return file if file.exists() else None


def core() -> Path:
    """Returns the file of the part that does not depend on torch."""
    return _FOLDER / "libtorch_symm.so"


def built() -> list[str]:
    """Returns the versions of torch, such as ``"2.11"``, for which this package has an extension for this Python."""
    return [version for version in TORCH_VERSIONS if extension(version)]


def _why_not(running: str, full: str) -> str:
    remedy = "build it with `pip install .` in a checkout (a C++ compiler and cargo are needed), or with `make build`"
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    found = built()
    if not found:
        return f"torch_symm has no native part for {python} in {_FOLDER}: {remedy}"
    versions = ", ".join(found)
    if running in TORCH_VERSIONS:
        return f"torch_symm in {_FOLDER} was built for torch {versions} and cannot serve torch {full}: {remedy}"
    return f"torch_symm serves torch {versions}, not torch {full}: install one of these, or for a newer one {remedy}"


def _announce(native: ModuleType, cuda: str | None) -> None:
    """Gives ``native`` what it needs from Python, and announces its operators to Inductor.

    It needs the directories of the kernels' compiler and of the profiles, and the inter-node factory.
    """
    import torch

    from torch_symm import _inductor

    native._cuda_libraries([os.fsencode(folder) for folder in nvrtc_folders(cuda)])
    native._set_bundled_profile_dir(os.fsencode(_FOLDER / "profiles"))
    native._set_backend_factory(_make_backend, _find_backends)
    _repr.install(native)
    _docstrings.install(native)
    _inductor.add_collectives(getattr(torch.ops.symm, name) for name in OPERATORS)
    # In this order: the last registered function runs first, and leaving the groups logs lines.
    atexit.register(_end_logging)
    # Leave before the interpreter ends: later, a thread that drops a tensor with a Python object would end the process.
    atexit.register(leave_all, native)


def _end_logging() -> None:
    """Delivers the log's lines, if Python's logging receives them."""
    if logs := sys.modules.get("torch_symm._logging"):
        logs.end()


def _make_backend(*described: Any) -> Any:
    """Makes a backend between the nodes of a group; imports the code when a group first spans nodes."""
    from torch_symm import _backends

    return _backends.make(*described)


def _find_backends(choice: str) -> tuple[str, str]:
    """Returns the backends of torch that a choice selects; imports the code on first use."""
    from torch_symm import _backends

    return _backends.find(choice)


def leave_all(native: ModuleType) -> None:
    """Leaves every group of this process, which is ending; peers receive the exception that ends it."""
    native._destroy_all(_exit_reason())


def _exit_reason() -> str:
    """Returns the exception with which this process ends, such as ``KeyError: 'x'``; empty if unknown or absent.

    Before the functions of ``atexit`` run, the interpreter stores the exception that ended a script in
    ``sys.last_value``. It does not store ``SystemExit``; in an interactive session, the last exception did not end
    anything. A process of ``multiprocessing`` is still handling its exception.
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
    """Returns directories of installed packages, such as ``nvidia/cu13/lib``, that contain the CUDA kernels' compiler.

    Directories with the compiler of CUDA version ``cuda``, such as ``"13.0"``, come first. Imports nothing.
    """
    try:
        spec = importlib.util.find_spec("nvidia")
    except ValueError:  # sys.modules has a module of that name that was not imported
        return []
    places = (spec and spec.submodule_search_locations) or []
    found = sorted(library for place in places for library in Path(place).glob("*/lib/libnvrtc.so.*"))
    major = (cuda or "").split(".")[0]
    found.sort(key=lambda library: library.name.split(".")[2] != major)
    return list(dict.fromkeys(library.parent for library in found))

"""Queries and tries the GPUs of this process. Runs in a child, because CUDA may hang or end its process."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path
from typing import Any

import torch

from torch_symm._native import nvrtc_folders
from torch_symm.launch.messages import sentence

#: Names of NVIDIA's run-time compiler, newest first, as in `src/kernels/cuda/nvrtc/find.rs`.
NVRTC = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2")
#: Number of elements of a tensor that is copied between two GPUs.
COPIED = 1 << 20


def driver() -> dict[str, Any]:
    """Returns the versions of the driver and of its CUDA; empty without a driver. Initialises nothing."""
    found: dict[str, Any] = {}
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
        found["version"] = match[1] if (match := re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)) else "unknown"
    except OSError:
        pass
    try:
        library, number = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        if library.cuDriverGetVersion(ctypes.byref(number)) == 0:
            found["cuda"] = [number.value // 1000, number.value % 1000 // 10]
    except (OSError, AttributeError):
        pass
    return found


def devices() -> list[dict[str, Any]]:
    """Describes each GPU that torch shows, in torch's order; makes a context on each."""
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found.append(
            {
                "name": properties.name,
                "capability": [properties.major, properties.minor],
                "uuid": str(properties.uuid),
                "free_bytes": free,
                "total_bytes": total,
            }
        )
    return found


def peers(count: int) -> list[dict[str, Any]]:
    """Returns, for each pair of GPUs, whether the driver reports access, and whether a copy succeeds."""
    return [_pair(one, other) for one in range(count) for other in range(count) if one != other]


def _pair(one: int, other: int) -> dict[str, Any]:
    found: dict[str, Any] = {"from": one, "to": other, "access": None, "copied": False, "error": ""}
    try:
        found["access"] = torch.cuda.can_device_access_peer(one, other)
        source = torch.arange(COPIED, dtype=torch.int32, device=f"cuda:{one}")
        copied = source.to(f"cuda:{other}").cpu()
        found["copied"] = torch.equal(copied, torch.arange(COPIED, dtype=torch.int32))
        if not found["copied"]:
            found["error"] = f"a copy of {copied.nbytes} bytes arrived with other values"
    except RuntimeError as error:
        found["error"] = sentence(error)
    return found


def nvrtc() -> dict[str, Any]:
    """Opens the compiler of the CUDA kernels that will be used, in the native part's search order.

    Raises:
        OSError: no compiler was found.
    """
    named = os.environ.get("SYMM_NVRTC_PATH", "").strip()
    if named and not Path(named).is_dir():
        return _opened(named)
    folders = [Path(named)] if named else nvrtc_folders(torch.version.cuda)
    for folder in folders:
        for name in NVRTC:
            if (folder / name).exists():
                return _opened(str(folder / name))
    for name in () if named else NVRTC:
        try:
            return _opened(name)
        except OSError:
            continue
    where = (
        f"SYMM_NVRTC_PATH={named}"
        if named
        else f"{len(folders)} folders of Python's packages or by the system's linker"
    )
    raise OSError(f"none of {', '.join(NVRTC)} is found in {where}")


def _opened(path: str) -> dict[str, Any]:
    library, major, minor = ctypes.CDLL(path), ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return {"path": path, "version": [major.value, minor.value]}

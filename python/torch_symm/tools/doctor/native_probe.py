"""The child that loads torch and the native part: ``python -m torch_symm.tools.doctor.native_probe RANKS``.

Each step starts with a message, so that the parent knows in which step the process ended.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from torch_symm.launch.messages import send, sentence

from .limits import CPU_RANKS, GPU_RANKS

#: Sizes of tensors whose algorithms are shown.
SIZES = (8, 64 << 10, 1 << 20, 64 << 20)


def main(ranks: int) -> None:
    """Sends the findings of each step; with ``ranks`` 0, for as many ranks as GPUs, and at least 2."""
    if not _step("torch", _torch) or not _step("native", _native):
        return
    # This import loads torch and the native part.
    from . import gpus as tried

    _step("driver", tried.driver)
    found = _step("gpus", lambda: {"devices": tried.devices()})
    gpus = len(found["devices"]) if found else 0
    if gpus:
        _step("nvrtc", tried.nvrtc)
    if gpus or os.environ.get("SYMM_TOPOLOGY_FILE", "").strip():
        _step("links", _links)
    _step("peers", lambda: {"pairs": tried.peers(gpus)})
    ranks = ranks or max(2, gpus)
    if ranks <= CPU_RANKS:
        _step("cpu", lambda: _collectives("cpu", ranks))
    if gpus and ranks <= GPU_RANKS:
        _step("cuda", lambda: _collectives("cuda", ranks))


def _step(name: str, step: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    send({"begins": name})
    try:
        found = step()
    except Exception as error:
        send({"step": name, "error": sentence(error)})
        return None
    send({"step": name, "found": found})
    return found


def _torch() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from torch_symm import _autoload

    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "distributed": dist.is_available(),
        "unregistered": _autoload.failure,
        "found_by_torch": _found_by_torch(),
    }


def _found_by_torch() -> bool:
    """Returns true if ``import torch`` registers the backend, without an import of this package."""
    points = entry_points(group="torch.backends")
    installed = any(point.value.partition(":")[0] == "torch_symm._autoload" for point in points)
    return installed and os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1"


def _native() -> dict[str, Any]:
    from torch_symm._native import load

    native = load()
    cache = os.path.dirname(os.fsdecode(native._user_profile_dir()))
    return {"file": native.__file__, "version": native.__version__, "cache": cache}


def _links() -> dict[str, Any]:
    from torch_symm._topology import detect_dma_connectivity, topology

    return {"table": topology(), "nvlinks": detect_dma_connectivity("cuda", "nvlink").matrix}


def _collectives(device: str, ranks: int) -> dict[str, Any]:
    """Returns the algorithm of each collective and size that the native part would choose for ordinary tensors."""
    from torch_symm.tools.tune import profile
    from torch_symm.tools.tune.measurement_points import OPS

    prices = profile.prices(device, ranks, ranks, "measured") or profile.prices(device, ranks, ranks, "links")
    algorithms = {op: {str(size): prices.price(op, size, 0)[1] for size in SIZES} for op in OPS}
    return {"ranks": ranks, "costs": prices.origin, "algorithms": algorithms}


if __name__ == "__main__":
    main(int(sys.argv[1]))

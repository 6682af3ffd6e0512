"""The devices that the backend serves here. Imported at every ``import torch``."""

from __future__ import annotations

import os

#: What the drivers of NVIDIA's GPUs make: on Linux, under Windows' subsystem for it, on Tegra.
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-gpu")


def devices() -> list[str]:
    """What ``init_process_group("symm")`` serves here: ``"cpu"``, and ``"cuda"`` where this process can have a GPU.

    torch's clients take a backend that names CUDA to have GPUs (``ShardedTensor.gather`` then makes its tensors there).
    Opens nothing: looks for a torch built for CUDA, the driver's device file, and a ``CUDA_VISIBLE_DEVICES`` that hides
    all GPUs. ``"cuda:symm"`` asks for GPUs wherever it is written.
    """
    import torch

    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    usable = torch.version.cuda is not None and not hidden and any(map(os.path.exists, _DRIVERS))
    return ["cpu", "cuda"] if usable else ["cpu"]

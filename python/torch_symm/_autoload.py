"""Makes the name ``symm`` and the schemes ``symm://`` and ``symm+file://`` known to torch.

Runs at every ``import torch``: imports nothing heavy and never raises.
"""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_symm._C import ProcessGroupSymm


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


def autoload() -> None:
    """Registers backend ``symm`` for :func:`devices`, and its rendezvous, with ``torch.distributed``, once per process.

    Entry point of the groups ``torch.backends`` and ``torch.distributed.backends``. A failure becomes a warning, since
    an exception here would make ``import torch`` fail; where warnings are errors, it is silent.
    """
    try:
        import torch.distributed as dist

        if not dist.is_available():
            return
        if "symm" not in dist.Backend.backend_list:
            dist.Backend.register_backend("symm", create, extended_api=True, devices=devices())
        from torch_symm._rendezvous import register

        register()
    except Exception as error:
        with suppress(Warning):  # where warnings are errors
            warnings.warn(f"backend symm could not be registered: {error}", stacklevel=2)


def create(options: object, group_options: object) -> ProcessGroupSymm:
    """Makes the group that torch asks for; called by ``torch.distributed``.

    ``options`` is torch's ``_DistributedBackendOptions``; ``group_options`` a ``torch_symm.Options`` or ``None``.
    """
    from torch_symm._group import create_group

    group: ProcessGroupSymm = create_group(options, group_options)
    return group

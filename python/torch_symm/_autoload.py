"""Makes the name ``symm`` and the schemes ``symm://`` and ``symm+file://`` known to torch.

Runs at every ``import torch``: imports nothing but torch and this file (before 2.15 also ``_torch_compat``), writes
nothing and never raises.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_symm._C import ProcessGroupSymm


#: Files of NVIDIA's GPU drivers: on Linux, under Windows' subsystem for it, on Tegra.
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-gpu")
#: Rendezvous schemes, and the functions of ``_rendezvous`` that serve them.
_SCHEMES = {"symm": "by_tcp", "symm+file": "by_file"}
#: Why the last :func:`autoload` could not register everything; ``python -m torch_symm doctor`` shows it.
failure: str | None = None


def devices() -> list[str]:
    """Returns the devices that symm serves here: ``"cpu"``, and ``"cuda"`` if this process can have a GPU.

    torch's clients assume that a backend which names CUDA has GPUs (``ShardedTensor.gather`` then makes its tensors
    there). Opens nothing: checks for a torch built for CUDA, the driver's device file, and a ``CUDA_VISIBLE_DEVICES``
    that hides all GPUs. ``"cuda:symm"`` always requests GPUs.
    """
    import torch

    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    usable = torch.version.cuda is not None and not hidden and any(map(os.path.exists, _DRIVERS))
    return ["cpu", "cuda"] if usable else ["cpu"]


def autoload() -> None:
    """Registers backend ``symm`` for :func:`devices`, and its rendezvous, with ``torch.distributed``, once per process.

    Entry point of the groups ``torch.backends`` and ``torch.distributed.backends``. A failure is kept in ``failure``:
    an exception here would make ``import torch`` fail, and a warning would appear in programs that do not use this
    package.
    """
    global failure
    failure = None
    try:
        import torch.distributed as dist

        if not dist.is_available():
            return
        if "symm" not in dist.Backend.backend_list:
            register: Any = dist.Backend.register_backend
            register("symm", create, extended_api=True, devices=devices())
        if not hasattr(dist.distributed_c10d, "_get_backend_name_for_device"):  # before 2.15
            import_module("torch_symm._torch_compat").compare_split_sources()
        # Not `dist.rendezvous`, which may be the function of that name.
        rendezvous = import_module("torch.distributed.rendezvous")
        for scheme, function in _SCHEMES.items():
            if scheme not in rendezvous._rendezvous_handlers:
                rendezvous.register_rendezvous_handler(scheme, partial(_meet, function))
        # The native part, which reads the settings, reports any other word.
        if os.environ.get("SYMM_REPLACE_GLOO", "").strip() == "1":
            import_module("torch_symm._replace_gloo").replace_gloo()
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"


def _meet(function: str, url: str, **given: Any) -> Iterator[Any]:
    """Runs ``function`` of ``_rendezvous``, which is imported on the first rendezvous of this kind."""
    meeting: Iterator[Any] = getattr(import_module("torch_symm._rendezvous"), function)(url, **given)
    return meeting


def create(options: object, group_options: object) -> ProcessGroupSymm:
    """Makes the group that torch requests; called by ``torch.distributed``.

    ``options`` is torch's ``_DistributedBackendOptions``; ``group_options`` a ``torch_symm.Options`` or ``None``.
    """
    from torch_symm._group import create_group

    group: ProcessGroupSymm = create_group(options, group_options)
    return group

"""Makes the name ``symm`` and the schemes ``symm://`` and ``symm+file://`` known to torch.

Runs at every ``import torch``: imports nothing heavy and never raises.
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_symm._C import ProcessGroupSymm


def autoload() -> None:
    """Registers backend ``symm`` for CPU and CUDA, and its rendezvous, with ``torch.distributed``, once per process.

    Entry point of the groups ``torch.backends`` and ``torch.distributed.backends``. A failure becomes a warning, since
    an exception here would make ``import torch`` fail; where warnings are errors, it is silent.
    """
    try:
        import torch.distributed as dist

        if not dist.is_available():
            return
        if "symm" not in dist.Backend.backend_list:
            dist.Backend.register_backend("symm", create, extended_api=True, devices=["cpu", "cuda"])
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

"""Makes the name ``symm`` and the schemes ``symm://`` and ``symm+file://`` known to torch.

Runs at every ``import torch``: imports nothing but torch, this file and `_devices`, writes nothing and never raises.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch_symm._devices import devices

if TYPE_CHECKING:
    from torch_symm._C import ProcessGroupSymm


#: Schemes of rendezvous, and the functions of ``_rendezvous`` that serve them.
_SCHEMES = {"symm": "by_tcp", "symm+file": "by_file"}
#: Why the last :func:`autoload` could not register everything; ``python -m torch_symm doctor`` shows it.
failure: str | None = None


def autoload() -> None:
    """Registers backend ``symm`` for :func:`devices`, and its rendezvous, with ``torch.distributed``, once per process.

    Entry point of the groups ``torch.backends`` and ``torch.distributed.backends``. A failure is kept in ``failure``:
    an exception here would make ``import torch`` fail, and a warning would meet programs that do without this package.
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
        # The package may also name the function `rendezvous`.
        rendezvous = import_module("torch.distributed.rendezvous")
        for scheme, function in _SCHEMES.items():
            if scheme not in rendezvous._rendezvous_handlers:
                rendezvous.register_rendezvous_handler(scheme, partial(_meet, function))
        # The native part, which reads the settings, says so if it is another word.
        if os.environ.get("SYMM_REPLACES", "").strip() == "gloo":
            import_module("torch_symm._replace").replace("gloo")
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"


def _meet(function: str, url: str, **given: Any) -> Iterator[Any]:
    """What ``function`` of ``_rendezvous`` gives, which is imported when somebody first meets so."""
    meeting: Iterator[Any] = getattr(import_module("torch_symm._rendezvous"), function)(url, **given)
    return meeting


def create(options: object, group_options: object) -> ProcessGroupSymm:
    """Makes the group that torch asks for; called by ``torch.distributed``.

    ``options`` is torch's ``_DistributedBackendOptions``; ``group_options`` a ``torch_symm.Options`` or ``None``.
    """
    from torch_symm._group import create_group

    group: ProcessGroupSymm = create_group(options, group_options)
    return group

"""torch-symm: the PyTorch distributed backend ``symm`` for the ranks of one host.

``dist.init_process_group("symm")`` works without importing this module, and so do
``init_method="symm://host:port"`` and ``"symm+file:///path"``. It holds the exceptions, the options, the stores and the
version. The native part is loaded when one of them is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch_symm._autoload import autoload
from torch_symm._version import __version__

if TYPE_CHECKING:
    from torch_symm._C import (
        FileStore,
        MemoryStore,
        Options,
        ProcessGroupSymm,
        SymmAborted,
        SymmConfigError,
        SymmMismatch,
        SymmPeerError,
        SymmTimeout,
        TCPStore,
    )

__all__ = [
    "FileStore",
    "MemoryStore",
    "Options",
    "ProcessGroupSymm",
    "SymmAborted",
    "SymmConfigError",
    "SymmMismatch",
    "SymmPeerError",
    "SymmTimeout",
    "TCPStore",
    "__version__",
]

autoload()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'torch_symm' has no attribute {name!r}")
    return getattr(import_module("torch_symm._native").load(), name)

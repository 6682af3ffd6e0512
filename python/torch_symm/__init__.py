"""torch-symm: the PyTorch distributed backend ``symm`` for CPU and CUDA tensors, on one node or several.

``dist.init_process_group("symm")`` works without importing this module, and so do
``init_method="symm://host:port"`` and ``"symm+file:///path"``. This module holds the exceptions, the options, the
stores, the GPU topology, categories of warnings, :func:`describe`, :func:`log_to_python`, :func:`replace_gloo`,
:func:`stats`, :func:`trace` and the version. The native part is loaded on the first access to one of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch_symm._autoload import autoload

if TYPE_CHECKING:
    from torch_symm import compile as compile
    from torch_symm import dtensor as dtensor
    from torch_symm import fsdp as fsdp
    from torch_symm import symm_mem as symm_mem
    from torch_symm._C import (
        FileStore,
        MemoryStore,
        Options,
        ProcessGroupSymm,
        SymmAbortedError,
        SymmConfigError,
        SymmMismatchError,
        SymmPeerError,
        SymmTimeoutError,
        TCPStore,
    )
    from torch_symm._describe import describe
    from torch_symm._intra_node import intra_node_group
    from torch_symm._logging import log_to_python
    from torch_symm._memory import mem_allocator
    from torch_symm._replace_gloo import replace_gloo
    from torch_symm._stats import stats
    from torch_symm._topology import DMAConnectivity, detect_dma_connectivity, topology
    from torch_symm._trace import annotate_profiler_trace, dump_trace, trace
    from torch_symm._version import __version__
    from torch_symm._warnings import SymmFallbackWarning, SymmWarning

__all__ = [
    "DMAConnectivity",
    "FileStore",
    "MemoryStore",
    "Options",
    "ProcessGroupSymm",
    "SymmAbortedError",
    "SymmConfigError",
    "SymmFallbackWarning",
    "SymmMismatchError",
    "SymmPeerError",
    "SymmTimeoutError",
    "SymmWarning",
    "TCPStore",
    "__version__",
    "annotate_profiler_trace",
    "describe",
    "detect_dma_connectivity",
    "dump_trace",
    "intra_node_group",
    "log_to_python",
    "mem_allocator",
    "replace_gloo",
    "stats",
    "topology",
    "trace",
]

#: The module of each public name that is written in Python.
_MODULES = {
    "DMAConnectivity": "_topology",
    "SymmFallbackWarning": "_warnings",
    "SymmWarning": "_warnings",
    "__version__": "_version",
    "annotate_profiler_trace": "_trace",
    "describe": "_describe",
    "detect_dma_connectivity": "_topology",
    "dump_trace": "_trace",
    "intra_node_group": "_intra_node",
    "log_to_python": "_logging",
    "mem_allocator": "_memory",
    "replace_gloo": "_replace_gloo",
    "stats": "_stats",
    "topology": "_topology",
    "trace": "_trace",
}

autoload()


if not TYPE_CHECKING:  # otherwise type checkers would accept misspelt names

    def __getattr__(name: str) -> Any:
        if name in ("compile", "dtensor", "fsdp", "symm_mem"):
            return import_module(f"torch_symm.{name}")
        if name not in __all__:
            raise AttributeError(f"module 'torch_symm' has no attribute {name!r}")
        if name in _MODULES:
            return getattr(import_module(f"torch_symm.{_MODULES[name]}"), name)
        return getattr(import_module("torch_symm._native").load(), name)


def __dir__() -> list[str]:
    """Returns the names that ``help`` and completion show, including those that are loaded on access."""
    return sorted({*globals(), *__all__})

"""Tensors in symmetric memory, which the kernels of peers load and store directly."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from threading import RLock
from typing import Any

import torch

from torch_symm._native import core, load


def mem_allocator() -> Any:
    """Returns the allocator of symmetric memory, the same at every call, for ``torch.cuda.MemPool``.

    Groups of this process exchange tensors without staging if the tensors are made under
    ``torch.cuda.use_mem_pool(torch.cuda.MemPool(torch_symm.mem_allocator()))``. The ``mem_allocator`` of each group is
    the same object.

    Raises:
        NotImplementedError: no CUDA device of this process can have such memory.
        ImportError: the native part cannot serve this torch.
    """
    native = load()
    count = torch.cuda.device_count()
    current = torch.cuda.current_device() if count else 0
    # The current device first, because querying another device would create a context on it.
    if not any(
        native._supports_symm_mem(device) for device in sorted(range(count), key=lambda device: device != current)
    ):
        raise NotImplementedError(
            f"mem_allocator: none of {count} CUDA devices can have symmetric memory (it needs a driver that shares "
            "memory as file descriptors, and SYMM_P2P must not be 0)"
        )
    return _allocator()


@cache
def _allocator() -> Any:
    allocator: Any = torch.cuda.memory.CUDAPluggableAllocator(str(core()), "symm_alloc", "symm_free")
    return allocator.allocator()


@dataclass
class _Pool:
    """The pool of one device, and the groups that have allocated from it."""

    memory: torch.cuda.MemPool
    holders: set[int] = field(default_factory=set)


#: The pools, by device index.
_pools: dict[int, _Pool] = {}
#: Re-entrant: the garbage collector may end a group in the middle of `allocate`.
_lock = RLock()


def allocate(holder: int, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns ``count`` uninitialised elements of the pool of ``device``, which now lives until ``holder`` releases it.

    Raises:
        torch.OutOfMemoryError: not enough memory is available.
    """
    with _lock:
        pool = _pools.get(device.index)
        if pool is None:
            with torch.cuda.device(device):  # a pool belongs to the current device
                pool = _pools[device.index] = _Pool(torch.cuda.MemPool(mem_allocator()))
        pool.holders.add(holder)
        # One thread at a time: torch rejects a second thread in the same pool.
        with torch.cuda.use_mem_pool(pool.memory, device):
            return torch.empty(count, dtype=dtype, device=device)


def let_go(holder: int) -> None:
    """Releases the pools that have no holder besides ``holder``; their tensors stay valid."""
    with _lock:
        for index, pool in list(_pools.items()):
            pool.holders.discard(holder)
            if not pool.holders:
                del _pools[index]

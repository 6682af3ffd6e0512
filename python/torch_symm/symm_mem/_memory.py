"""Allocation, rendezvous, settings, and signals that accompany data."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from math import prod
from typing import Any

import torch
import torch.distributed._symmetric_memory as torchs
from torch._C._distributed_c10d import ProcessGroup, _SymmetricMemory
from torch._prims_common import make_contiguous_strides_for
from torch.distributed.distributed_c10d import GroupName

from torch_symm._memory import mem_allocator

#: The name in torch of this package's symmetric-memory backend.
BACKEND = "SYMM"

#: torch's initial choice on CUDA.
_TORCHS_DEFAULT = "CUDA"

#: Maximum number of bytes that torch can count.
_MOST_BYTES = 2**63 - 1

_chosen_by_user = False

_pools: dict[torch.device, torch.cuda.MemPool] = {}


def empty(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    alloc_id: int | None = None,
) -> torch.Tensor:
    """Returns an uninitialised contiguous tensor that :func:`rendezvous` accepts.

    On CUDA, the first call chooses the backend ``"SYMM"`` unless another one was chosen or is in use.

    Args:
        size: the shape, as numbers or as one sequence.
        dtype, device: torch's defaults if not given. The CPU has symmetric memory, too.
        alloc_id: makes the tensor persistent: the same ``alloc_id`` gives the same address again, once the earlier
            tensor is freed.

    Raises:
        RuntimeError: a tensor with this ``alloc_id`` is alive; there is no allocator for the device.
        ValueError: a size is negative, or the tensor would have more bytes than can be addressed.
        SymmConfigError: not enough memory is available.
    """
    shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else size
    place = torch.get_default_device() if device is None else torch.device(device)
    return allocate(shape, dtype or torch.get_default_dtype(), place, alloc_id=alloc_id)


def allocate(
    shape: Sequence[Any],
    dtype: torch.dtype,
    device: torch.device,
    group_name: str | None = None,
    alloc_id: int | None = None,
) -> torch.Tensor:
    """Allocates like :func:`empty`; ``group_name`` is for backends that need it at allocation."""
    if device.type == "cuda":
        _prefer_ours(device)
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
    # torch does not check the number of bytes for overflow, and may end the process if it is too large.
    if any(size < 0 for size in shape):
        raise ValueError(f"a tensor cannot have the shape {tuple(shape)}")
    if prod(shape) * dtype.itemsize > _MOST_BYTES:
        raise ValueError(
            f"{prod(shape)} elements of {dtype} are {prod(shape) * dtype.itemsize} bytes, more than can be addressed"
        )
    strides = make_contiguous_strides_for(tuple(shape))
    return _SymmetricMemory.empty_strided_p2p(tuple(shape), strides, dtype, device, group_name, alloc_id)


def _prefer_ours(device: torch.device) -> None:
    if not _chosen_by_user and get_backend(device) == _TORCHS_DEFAULT:
        with suppress(RuntimeError):  # torch's backend is in use and can no longer be changed
            _SymmetricMemory.set_backend(BACKEND)


def rendezvous(tensor: torch.Tensor, group: str | ProcessGroup) -> _SymmetricMemory:
    """Returns the window on the tensors of all ranks of ``group``. Collective; cached per allocation and group.

    All ranks pass tensors of equal allocations, in the same order.

    Raises:
        TypeError: ``group`` is neither a group nor the name of one.
        RuntimeError: ``tensor`` is not in symmetric memory.
        SymmMismatchError: the ranks' allocations differ; the message shows both sides.
        SymmTimeoutError, SymmPeerError: ranks did not arrive, or exited; the message names them.
    """
    if isinstance(group, str):
        name = GroupName(group)
    elif isinstance(group, ProcessGroup):
        name = group.group_name
    else:
        raise TypeError(f"rendezvous: unsupported group type: {type(group)}")
    window = _SymmetricMemory.rendezvous(tensor, name)
    if window is None:  # as backends return for memory that is not theirs
        raise RuntimeError("rendezvous: the tensor is not in symmetric memory; make it with symm_mem.empty")
    return window


def set_backend(name: str) -> None:
    """Chooses where CUDA tensors of :func:`empty` come from: ``"SYMM"``, or one of torch's (``"NVSHMEM"``, ``"NCCL"``).

    ``name`` selects a backend for the whole process.

    Raises:
        RuntimeError: no backend has this name, or a backend is already in use.
    """
    global _chosen_by_user
    _SymmetricMemory.set_backend(name)
    _chosen_by_user = True


def get_backend(device: torch.device | str) -> str | None:
    """Returns the backend that serves ``device``; ``None`` if no backend does."""
    return _SymmetricMemory.get_backend(torch.device(device))


def is_nvshmem_available() -> bool:
    """Returns true if torch was built with NVSHMEM and finds it. This package does not need NVSHMEM."""
    return torchs.is_nvshmem_available()


def get_mempool_allocator(device: torch.device | str) -> Any:
    """Returns the allocator of symmetric memory of ``device`` for ``torch.cuda.MemPool``.

    Raises:
        NotImplementedError: the device cannot have such memory.
    """
    place = _pool_device(device, "get_mempool_allocator")
    _prefer_ours(place)
    return mem_allocator() if get_backend(place) == BACKEND else torchs.get_mempool_allocator(place)


def _pool_device(device: torch.device | str, function: str) -> torch.device:
    place = torch.device(device)
    if place.type != "cuda":
        raise NotImplementedError(f"{function}: torch has pools only for CUDA devices, not for {place}")
    return place


def get_mem_pool(device: torch.device | str) -> torch.cuda.MemPool:
    """Returns the pool of symmetric memory of ``device``, the same at every call.

    Tensors made under ``torch.cuda.use_mem_pool`` of this pool are symmetric if all ranks make the same tensors in the
    same order.

    Raises:
        NotImplementedError: the device cannot have such memory.
    """
    place = _pool_device(device, "get_mem_pool")
    if place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    if place not in _pools:
        allocator = get_mempool_allocator(place)
        # The pool serves no other tensors when memory runs low, and is not split: either would make ranks differ.
        _pools[place] = torch.cuda.MemPool(allocator, use_on_oom=False, no_split=True)
    return _pools[place]


def set_signal_pad_size(size: int) -> None:
    """Sets the size of the signal pads of later allocations in bytes. A channel takes 4 bytes per rank.

    Raises:
        ValueError: ``size`` is not positive.
    """
    if size <= 0:
        raise ValueError(f"a signal pad of {size} bytes holds no channel")
    _SymmetricMemory.signal_pad_size = size


def get_signal_pad_size() -> int:
    """Returns the size of the signal pads of later allocations in bytes."""
    return _SymmetricMemory.signal_pad_size


def put_signal(src: torch.Tensor, hdl: _SymmetricMemory, peer: int, *, channel: int = 0, timeout_ms: int = 0) -> None:
    """Copies ``src`` to the start of the tensor that ``peer`` passed to the rendezvous, then signals ``peer``.

    torch has this only for NCCL's memory, and without the keywords.

    Args:
        src: contiguous, of any shape; at most as many bytes as the tensor of ``peer``.
        hdl: the window that :func:`rendezvous` returned.
        peer: rank in the window's group.
        channel: of the signal, from 0 on; signals of different channels are independent.
        timeout_ms: milliseconds; 0: the group's timeout.

    Raises:
        RuntimeError: ``src`` does not fit.
        SymmTimeoutError: ``peer`` did not consume the previous signal in time.
    """
    if get_backend(src.device) != BACKEND:
        torchs.put_signal(src, hdl, peer)
        return
    hdl.get_remote_tensor(peer, src.shape, src.dtype).copy_(src)
    hdl.put_signal(peer, channel, timeout_ms)


def wait_signal(hdl: _SymmetricMemory, peer: int, *, channel: int = 0, timeout_ms: int = 0) -> None:
    """Waits, on CUDA in the current stream, until ``peer`` has signalled; earlier writes of ``peer`` are then visible.

    ``hdl``, ``peer``, ``channel`` and ``timeout_ms`` (milliseconds; 0: the group's timeout) are as in
    :func:`put_signal`.

    Raises:
        SymmTimeoutError, SymmPeerError: ``peer`` did not signal in time, or exited.
    """
    if get_backend(hdl.device) != BACKEND:
        torchs.wait_signal(hdl, peer)
        return
    hdl.wait_signal(peer, channel, timeout_ms)

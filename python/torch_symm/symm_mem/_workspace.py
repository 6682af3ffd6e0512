"""Memory of each group for operators whose inputs are not symmetric."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import finalize, ref

import torch
from torch._C._distributed_c10d import _SymmetricMemory

from torch_symm.symm_mem._groups import resolve
from torch_symm.symm_mem._memory import allocate, rendezvous


@dataclass
class _Workspace:
    """The memory, its window, and the group for which it was made; another group may get the same name later."""

    group: ref[Any]
    tensor: torch.Tensor
    window: _SymmetricMemory


#: The workspaces, by group and device.
_workspaces: dict[tuple[str, torch.device], _Workspace] = {}


def get_symm_mem_workspace(group_name: str, min_size: int, *, device: torch.device | None = None) -> _SymmetricMemory:
    """Returns the window on the workspace of a group, at least ``min_size`` bytes on every rank.

    Collective and slow when the workspace grows. Each user ends with ``barrier(channel=0)``, so that the next user, or
    the end of the group, does not take memory that peers still read. The workspace ends with the group.

    Args:
        group_name: a group in which symmetric memory can be used.
        min_size: bytes, the same on all ranks.
        device: by default the current CUDA device if the group serves CUDA and one exists, otherwise the CPU.

    Raises:
        RuntimeError: the workspace would have to grow while a CUDA graph is captured.
        SymmMismatchError: the workspace grows on all ranks, but to different sizes. If it grows on some ranks only,
            these wait until their deadline.
    """
    group = resolve(group_name)
    device = _device_of(group) if device is None else device
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    key = (group_name, device)
    found = _workspaces.get(key)
    if found is not None and found.group() is not group:
        del _workspaces[key]
        found = None
    size = found.tensor.numel() if found is not None else 0
    if found is None or size < min_size:
        found = _grown(group, group_name, device, size, min_size)
        finalize(group, partial(_drop, key, ref(found)))
        _workspaces[key] = found
    return found.window


@contextmanager
def used(group_name: str, size: int, device: torch.device) -> Iterator[_SymmetricMemory]:
    """Yields the workspace to one operator. Drops it if the operator fails, because signals may then still be set."""
    try:
        yield get_symm_mem_workspace(group_name, size, device=device)
    except BaseException:
        _workspaces.pop((group_name, device), None)
        raise


def _grown(group: Any, group_name: str, device: torch.device, size: int, min_size: int) -> _Workspace:
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"get_symm_mem_workspace(): the requested size ({min_size} bytes) is greater than the size of the "
                f"currently allocated workspace ({size} bytes), which cannot grow during graph capture. Call "
                f'get_symm_mem_workspace(group_name="{group_name}", min_size={min_size}) before the capture.'
            )
        # All ranks wait for their devices before they meet, so that no kernel uses the smaller workspace when it is
        # freed.
        torch.cuda.synchronize(device)
    tensor = allocate((max(size, min_size, 1),), torch.uint8, device, group_name)
    return _Workspace(ref(group), tensor, rendezvous(tensor, group_name))


def _drop(key: tuple[str, torch.device], workspace: ref[_Workspace]) -> None:
    """Removes ``workspace`` when its group has ended."""
    if key in _workspaces and _workspaces[key] is workspace():
        del _workspaces[key]


def _device_of(group: Any) -> torch.device:
    if torch.cuda.is_available() and torch.device("cuda") in group._device_types:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")

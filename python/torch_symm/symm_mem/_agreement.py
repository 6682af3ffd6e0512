"""The comparison of the ranks' calls, and the report of calls that only this rank rejects; both for CPU tensors.

On GPUs the calls are enqueued, and a comparison on the host would have to wait for all ranks in every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType

import torch

from torch_symm._native import load


def compare(group_name: str, device: torch.device, call: str) -> None:
    """Returns once all ranks have made this ``call``, which no rank may answer with memory of another before.

    Returns at once for tensors on GPUs.

    Raises:
        SymmMismatchError: on all ranks, if their calls differ; the group continues.
    """
    if device.type == "cpu":
        _native()._compare_operators(group_name, call)


class rejecting:
    """A context that notifies the ranks that wait for this one if the checks of its arguments fail."""

    def __init__(self, group_name: str, device: torch.device) -> None:
        self._group_name, self._device = group_name, device

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            reject(self._group_name, self._device, error)


def reject(group_name: str, device: torch.device, error: Exception) -> None:
    """Notifies the ranks that wait for this one in an operator that it has rejected its arguments."""
    if device.type == "cpu":
        _native()._reject_operator(group_name, str(error))


def described(shape: Sequence[int], dtype: torch.dtype) -> str:
    """Returns a tensor's shape and dtype in words."""
    return f"{tuple(shape)} of {dtype}"


@cache
def _native() -> ModuleType:
    # `load` takes several microseconds.
    return load()

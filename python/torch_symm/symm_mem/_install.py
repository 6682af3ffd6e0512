"""Installs the fused operators in place of torch's operators, and restores torch's operators."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.compiler.config
import torch.distributed._symmetric_memory as torchs

from torch_symm._inductor import add_collectives
from torch_symm.symm_mem import _groups
from torch_symm.symm_mem._operators import OPERATORS

#: A part of the key of cached code: code that was compiled without our groups has no fused operators, and vice versa.
_CACHE_TAG = "+torch_symm.symm_mem"


#: The kernels, while they are installed.
_kernels: Any = None


def enable_fused_ops() -> None:
    """From now on, ``torch.ops.symm_mem.fused_*`` use our symmetric memory for symm groups, on CUDA and on CPU.

    Other groups use torch's functions as before, and on the CPU, where torch has no implementation, its fallbacks.
    Inductor's async tensor parallelism (``torch._inductor.config._micro_pipeline_tp``) treats symm groups as enabled;
    call this function before compiling. May be called again; :func:`disable_fused_ops` undoes it.
    """
    global _kernels
    if _kernels is not None:
        return
    library: Any = torch.library.Library("symm_mem", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that its kernel is overridden
        for operator in OPERATORS:
            name = operator.name
            theirs, fallback = getattr(torchs, f"_{name}"), getattr(torchs, f"_{name}_fallback")
            library.impl(name, _for_symm_groups(operator.run, theirs, "cuda"), "CUDA", allow_override=True)
            library.impl(name, _for_symm_groups(operator.run, fallback, "cpu"), "CPU")
    add_collectives(getattr(torch.ops.symm_mem, operator.name) for operator in OPERATORS)
    torchs.is_symm_mem_enabled_for_group = _groups.is_symm_mem_enabled_for_group
    torch.compiler.config.cache_key_tag += _CACHE_TAG
    _kernels = library


def disable_fused_ops() -> None:
    """Restores torch's own operators. May be called again."""
    global _kernels
    if _kernels is None:
        return
    _kernels._destroy()
    if torchs.is_symm_mem_enabled_for_group is _groups.is_symm_mem_enabled_for_group:
        torchs.is_symm_mem_enabled_for_group = _groups._enabled_in_torch
    tag = torch.compiler.config.cache_key_tag
    torch.compiler.config.cache_key_tag = tag.replace(_CACHE_TAG, "")
    _kernels = None


def _for_symm_groups(ours: Callable[..., Any], theirs: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """Uses ``ours`` for symm groups and ``theirs`` for others. The last string argument is the group's name."""

    def choose(*args: Any, **kwargs: Any) -> Any:
        name = next(value for value in reversed(args) if isinstance(value, str))
        group = _groups.resolve(name)
        return (ours if _groups.is_symm(group, device_type) else theirs)(*args, **kwargs)

    return choose

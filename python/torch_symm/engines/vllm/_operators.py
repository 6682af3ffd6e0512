"""The fused operators that replace nodes of vLLM's graphs, as ``torch.ops.symm_vllm``.

The operators take vLLM's name of a group, such as ``tp:0``, and look up the symm group when they run. A graph that
vLLM compiled and cached in an earlier run is therefore still valid if the symm group has another name, or does not
exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: The name of each symm group. The key is vLLM's name of the group.
GROUPS: dict[str, str] = {}
#: For each group, a function that returns once the first calls of its kernels have ended. The key is vLLM's name of the
#: group.
WARMING: dict[str, Callable[[], None]] = {}

LARGEST = 448.0
FP8 = torch.float8_e4m3fn

_library: Any = torch.library.Library("symm_vllm", "FRAGMENT")  # type: ignore[no-untyped-call]


def _ready(group_name: str) -> str | None:
    """Returns the name of the symm group once the first calls of its kernels have ended."""
    if wait := WARMING.pop(group_name, None):
        wait()
    return GROUPS.get(group_name)


def _normed(input: Tensor, residual: Tensor, weight: Tensor, eps: float, group: str) -> tuple[Tensor, Tensor]:
    """Computes the steps separately, for a group that symm does not serve."""
    vllm: Any = torch.ops.vllm
    added = vllm.all_reduce(input, group_name=group) + residual
    wide = added.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(added.dtype), added


def _plain(input: Tensor, residual: Tensor, weight: Tensor, eps: float, group_name: str) -> Any:
    if group := _ready(group_name):
        return torch.ops.symm.all_reduce_add_rms_norm(input, residual, weight, eps, group)
    return _normed(input, residual, weight, eps, group_name)


def _fp8(input: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: Tensor, group_name: str) -> Any:
    if group := _ready(group_name):
        return torch.ops.symm.all_reduce_add_rms_norm_fp8(input, residual, weight, eps, scale, group)
    normed, added = _normed(input, residual, weight, eps, group_name)
    return (normed.float() * scale.reciprocal()).clamp(-LARGEST, LARGEST).to(FP8), added


def _dynamic_fp8(input: Tensor, residual: Tensor, weight: Tensor, eps: float, group_name: str) -> Any:
    if group := _ready(group_name):
        return torch.ops.symm.all_reduce_add_rms_norm_dynamic_fp8(input, residual, weight, eps, group)
    normed, added = _normed(input, residual, weight, eps, group_name)
    scales = (normed.float().abs().amax(-1, keepdim=True) / LARGEST).clamp(min=1 / (LARGEST * 512))
    return (normed.float() / scales).clamp(-LARGEST, LARGEST).to(FP8), added, scales


def _define(suffix: str, function: Any, scale: str, results: int) -> None:
    name = f"all_reduce_add_rms_norm{suffix}"
    head = f"{name}(Tensor input, Tensor residual, Tensor weight, float eps, {scale}str group_name)"
    returned = ", ".join(["Tensor"] * results)
    _library.define(f"{head} -> ({returned})", tags=(torch.Tag.needs_fixed_stride_order,))
    _library.impl(name, function, "CompositeExplicitAutograd")

    def shapes(input: Tensor, *others: Any) -> tuple[Tensor, ...]:
        rows = torch.empty_like(input, dtype=FP8 if suffix else input.dtype, memory_format=torch.contiguous_format)
        added = torch.empty_like(input, memory_format=torch.contiguous_format)
        scales = input.new_empty((*input.shape[:-1], 1), dtype=torch.float32)
        return (rows, added, scales)[:results]

    torch.library.register_fake(f"symm_vllm::{name}", shapes, lib=_library)


_define("", _plain, "", 2)
_define("_fp8", _fp8, "Tensor scale, ", 2)
_define("_dynamic_fp8", _dynamic_fp8, "", 3)

"""The plug-in for SGLang: collectives of its tensor-parallel groups on symm.

SGLang calls :func:`register` in each of its processes, by the entry point ``sglang.srt.plugins``. It has no effect
unless ``SYMM_SGLANG`` is ``1``. ``docs/guide/serving-sglang.md`` describes its use.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from torch_symm.engines import _common

__all__ = ["register"]

#: A child of SGLang's logger, whose handlers and level it uses.
log = logging.getLogger("sglang.srt.plugins.symm")
#: The class whose methods are replaced.
_CLASS = "sglang.srt.distributed.parallel_state.GroupCoordinator"
_SIGNATURES: _common.Expected = {
    "__init__": (
        "group_ranks",
        "local_rank",
        "torch_distributed_backend",
        "use_pynccl",
        "use_mscclpp",
        "use_custom_allreduce",
        "use_torch_symm_mem_all_reduce",
        "use_hpu_communicator",
        "use_xpu_communicator",
        "use_message_queue_broadcaster",
        "group_name",
        "gloo_timeout",
        "recovered_rank",
        "rank_offset",
        "max_world_size",
    ),
    "all_reduce": ("input_",),
    "_all_gather_into_tensor": ("output", "input"),
    "_reduce_scatter_tensor": ("output", "input"),
    "destroy": (),
}
#: Names of the groups that symm serves, without the number that SGLang appends.
_KINDS = ("tp", "attention_tp", "shared_experts_tp", "moe_tp", "pdmux_prefill_tp")
#: Types that symm sums.
_SUMMED = (torch.bfloat16, torch.float16, torch.float32)
#: The attribute of a coordinator that holds its symm group.
_GROUP = "_torch_symm_group"

_told: set[str] = set()


def register() -> None:
    """Makes symm serve SGLang's tensor-parallel groups in this process; called by SGLang.

    If the methods of this SGLang differ from the tested methods, nothing is changed, and the log says so.
    """
    if os.environ.get("SYMM_SGLANG", "").strip() != "1":
        return
    module, _, name = _CLASS.rpartition(".")
    owner = getattr(import_module(module), name, None)
    problem = _common.problem(owner, _SIGNATURES) if owner else f"there is no class {name}"
    if problem:
        log.warning("symm is off, and SGLang uses its own collectives: %s", problem)
        return
    hooks: Any = import_module("sglang.srt.plugins.hook_registry")
    for method, hook in {
        "__init__": _initialize,
        "all_reduce": _all_reduce,
        "_all_gather_into_tensor": _all_gather,
        "_reduce_scatter_tensor": _reduce_scatter,
        "destroy": _destroy,
    }.items():
        hooks.HookRegistry.register(f"{_CLASS}.{method}", hook, hooks.HookType.AROUND)


def _initialize(usual: Callable[..., None], self: Any, *given: Any, **named: Any) -> None:
    usual(self, *given, **named)
    setattr(self, _GROUP, None)
    if self.world_size < 2 or self.unique_name.partition(":")[0] not in _KINDS:
        return
    if problem := _elastic(named):
        log.warning("symm does not serve group %s, SGLang does: %s", self.unique_name, problem)
        return
    setattr(self, _GROUP, _common.join(log, "SGLang", self, one_node=True))


def _destroy(usual: Callable[[Any], None], self: Any) -> None:
    _common.leave(getattr(self, _GROUP, None))
    setattr(self, _GROUP, None)
    usual(self)


def _elastic(named: dict[str, Any]) -> str:
    """Returns why a group is not served because its ranks do not start it together; empty if they do."""
    if "mooncake" in str(named.get("torch_distributed_backend")):
        return "its members may change"
    return "its ranks join at different times" if named.get("recovered_rank") or named.get("rank_offset") else ""


def _all_reduce(usual: Callable[..., torch.Tensor], self: Any, input_: torch.Tensor) -> torch.Tensor:
    group = _group_for(self, input_)
    if group is None:
        return usual(self, input_)
    if input_.is_cpu:
        dist.all_reduce(input_, group=group)
        return input_
    reduced: torch.Tensor = torch.ops.symm.all_reduce(input_, "sum", group.group_name)
    return reduced


def _all_gather(usual: Callable[..., None], self: Any, output: torch.Tensor, input: torch.Tensor) -> None:
    group = _group_for(self, input, output, summed=False)
    if group is None:
        usual(self, output, input)
    else:
        dist.all_gather_into_tensor(output, input, group=group)


def _reduce_scatter(
    usual: Callable[..., torch.Tensor], self: Any, output: torch.Tensor, input: torch.Tensor
) -> torch.Tensor:
    group = _group_for(self, input, output)
    if group is None:
        return usual(self, output, input)
    dist.reduce_scatter_tensor(output, input, group=group)
    return output


def _group_for(coordinator: Any, *tensors: torch.Tensor, summed: bool = True) -> Any:
    """Returns the symm group for a call with these tensors; ``None`` if SGLang makes the call itself."""
    group = getattr(coordinator, _GROUP, None)
    if group is None:
        return None
    reason = next(filter(None, (_unfit(tensor, summed=summed) for tensor in tensors)), "")
    if not reason:
        return group
    if not torch.compiler.is_compiling() and reason not in _told:
        _told.add(reason)
        log.info("SGLang itself makes calls of group %s with %s", coordinator.unique_name, reason)
    return None


def _unfit(tensor: torch.Tensor, *, summed: bool) -> str:
    """Returns why symm cannot serve a call with this tensor; empty if it can. All ranks find the same reason."""
    if summed and tensor.dtype not in _SUMMED:
        return f"sums of type {tensor.dtype}"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"tensors on {tensor.device.type}"
    return "" if tensor.is_contiguous() else "tensors that are not contiguous"

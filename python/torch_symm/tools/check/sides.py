"""The implementations whose sums are compared: symm, torch's other backend, and kernels of an inference engine."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torch_symm._native import load
from torch_symm._torch_compat import new_group
from torch_symm.launch.messages import in_a_line

#: Names of the sides, in the order of the table.
SYMM, TREE = "symm", "symm, tree"
VLLM = "vLLM custom"
VLLM_MODULE = "vllm.distributed.device_communicators.custom_all_reduce"

_Reduced = Callable[[torch.Tensor], torch.Tensor | None]


@dataclass(frozen=True)
class Side:
    """``all_reduce`` and ``reduce_scatter`` return the sum over ranks, or ``None`` where the side cannot serve it."""

    name: str
    all_reduce: _Reduced
    reduce_scatter: _Reduced


def of_group(name: str, group: dist.ProcessGroup) -> Side:
    """Returns the side of the collectives of ``group``."""

    def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
        result = tensor.clone()
        dist.all_reduce(result, group=group)
        return result

    def reduce_scatter(tensor: torch.Tensor) -> torch.Tensor | None:
        result = tensor.new_empty(tensor.numel() // group.size())
        try:
            dist.reduce_scatter_tensor(result, tensor, group=group)
        except (RuntimeError, ValueError, TypeError, NotImplementedError):  # not for this type or this version
            return None
        return result

    return Side(name, all_reduce, reduce_scatter)


def of_vllm(made: Any) -> Side:
    """Returns the side of a ``CustomAllreduce`` of vLLM."""

    def all_reduce(tensor: torch.Tensor) -> torch.Tensor | None:
        served = made.should_custom_ar(tensor)
        result: torch.Tensor | None = made.custom_all_reduce(tensor) if served else None
        return result

    return Side(VLLM, all_reduce, lambda tensor: None)


def sides(world: int, rank: int, device: torch.device) -> tuple[list[Side], dist.ProcessGroup, dict[str, str]]:
    """Returns the sides of a group of the first ``world`` ranks, symm's group, and why others are missing.

    All ranks call it.
    """
    members, missing = list(range(world)), dict[str, str]()
    options = load().Options
    group = new_group(members, backend="symm", pg_options=options(order="rank"))
    found = [
        of_group(SYMM, group),
        of_group(TREE, new_group(members, backend="symm", pg_options=options(order="tree"))),
    ]
    other = "nccl" if device.type == "cuda" else "gloo"
    if dist.is_backend_available(other):
        found.append(of_group(other, new_group(members, backend=other)))
    else:
        missing[other] = "this torch has no such backend"
    if device.type == "cuda":
        # vLLM's all-reduce needs a group whose backend is not NCCL.
        own, reason = _vllm(
            new_group(members, backend="gloo") if dist.is_gloo_available() else None, rank < world, device
        )
        reasons: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, reason)
        if first := next((each for each in reasons[:world] if each), ""):
            missing[VLLM] = first
        elif own is not None:
            found.append(own)
    return found, group, missing


def _vllm(group: dist.ProcessGroup | None, member: bool, device: torch.device) -> tuple[Side | None, str]:
    """Returns vLLM's side on a member, or why it cannot run."""
    if not member:
        return None, ""
    try:
        made = importlib.import_module(VLLM_MODULE).CustomAllreduce(group, device)
    except ImportError:
        return None, "not installed"
    except Exception as error:
        return None, in_a_line(error)
    return (None, "disabled here by vLLM") if made.disabled else (of_vllm(made), "")

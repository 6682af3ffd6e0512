"""The all-reduces of inference engines as sides: the kernels of vLLM and FlashInfer, where they are installed."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from torch_symm._torch_compat import new_group

from .contenders import GROUP_TIMEOUT, ONE_SHOT_LIMIT, GpuSide, Maker, UnavailableError, gpu_sides
from .inputs import POISON, GpuCall, Place, Setting
from .norm import EPS, HIDDEN, add_rms_norm

#: The largest message for which the engines use these kernels, on two H100.
LIMIT = 64 << 20
#: Types that these kernels sum.
SUMMED = (torch.bfloat16, torch.float16, torch.float32)


def vllm(device: torch.device, size: int) -> GpuSide:
    """vLLM's custom all-reduce: ``CustomAllreduce``, as its engine calls it."""
    # Skips vLLM's check of peer access, which would start processes. The GPUs are assumed to have peer access.
    os.environ.setdefault("VLLM_SKIP_P2P_CHECK", "1")
    module = _imported("vllm.distributed.device_communicators.custom_all_reduce", "vllm")
    make = _attribute(module, "CustomAllreduce", "vllm")
    size = min(size, LIMIT)
    group = new_group(backend="gloo", timeout=GROUP_TIMEOUT)
    # The kernel takes only tensors that are smaller than its buffer.
    made = make(group=group, device=device, max_size=size + 16)
    if made.disabled:
        raise UnavailableError("vLLM's custom all-reduce disables itself here; its log has the reason")
    builders = {"all_reduce": _out_of_place(made.custom_all_reduce)}
    return GpuSide(
        "vllm", group, _room(device, size), builders=builders, limit=size, keep=[made], capturing=made.capture
    )


def flashinfer(name: str, *, one_shot: bool | None, limit: int = LIMIT) -> Maker:
    """Makes a side for FlashInfer's TensorRT-LLM kernels.

    If ``one_shot`` is ``None``, FlashInfer chooses the algorithm.
    """

    def make(device: torch.device, size: int) -> GpuSide:
        module = _imported("flashinfer.comm", "flashinfer-python")
        reduce, patterns, create = (
            _attribute(module, each, "flashinfer-python")
            for each in ("allreduce_fusion", "AllReduceFusionPattern", "create_allreduce_fusion_workspace")
        )
        size = min(size, limit)
        group = new_group(backend="nccl", timeout=GROUP_TIMEOUT)
        workspaces: dict[torch.dtype, Any] = {}

        def workspace(dtype: torch.dtype) -> Any:
            if dtype not in workspaces:
                workspaces[dtype] = create(
                    backend="trtllm",
                    world_size=group.size(),
                    rank=group.rank(),
                    max_token_num=max(1, size // (HIDDEN * dtype.itemsize)),
                    hidden_dim=HIDDEN,
                    dtype=dtype,
                    group=group,
                )
            return workspaces[dtype]

        def call(rows: torch.Tensor, pattern: int, **tensors: Any) -> None:
            how = {"launch_with_pdl": True, "trigger_completion_at_end": True, "use_oneshot": one_shot}
            reduce(input=rows, workspace=workspace(rows.dtype), pattern=pattern, **how, **tensors)

        def summed(tensor: torch.Tensor) -> torch.Tensor:
            rows = _in_rows(tensor)
            output = torch.empty_like(rows)
            call(rows, patterns.kAllReduce, output=output)
            return output.view(-1)

        def normed(
            rows: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            norm, added = torch.empty_like(rows), torch.empty_like(rows)
            outputs = {"norm_out": norm, "residual_out": added}
            inputs = {"residual_in": residual, "rms_gamma": weight, "rms_eps": EPS}
            call(rows, patterns.kARResidualRMSNorm, **outputs, **inputs)
            return norm, added

        builders = {
            "all_reduce": _out_of_place(summed),
            "all_reduce_add_rms_norm": lambda at: add_rms_norm(at, normed),
        }
        return GpuSide(name, group, _room(device, size), builders=builders, limit=size, keep=[workspaces])

    return make


def all_sides() -> dict[str, Maker]:
    """Returns the sides on GPUs in the order of measurement, the engines last."""
    return {
        **gpu_sides(),
        "vllm": vllm,
        "flashinfer": flashinfer("flashinfer", one_shot=None),
        "flashinfer one-shot": flashinfer("flashinfer one-shot", one_shot=True, limit=ONE_SHOT_LIMIT),
    }


def _imported(name: str, package: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name.partition(".")[0]:
            raise UnavailableError(f"{package} is not installed") from error
        raise UnavailableError(f"{package} cannot be imported: {error}") from error
    except Exception as error:
        raise UnavailableError(f"{package} cannot be imported: {error}") from error


def _attribute(module: Any, name: str, package: str) -> Any:
    if not hasattr(module, name):
        raise UnavailableError(f"this version of {package} has no {module.__name__}.{name}")
    return getattr(module, name)


def _room(device: torch.device, size: int) -> Place:
    return Place(*(torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)))


def _in_rows(tensor: torch.Tensor) -> torch.Tensor:
    hidden = min(HIDDEN, tensor.numel())
    if tensor.numel() % hidden:
        raise NotImplementedError(f"{tensor.numel()} elements are not rows of {hidden}")
    return tensor.view(-1, hidden)


def _out_of_place(reduce: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Setting], GpuCall]:
    """Returns the builder for a function whose result is a new tensor, or ``None`` if it does not take the input."""

    def build(at: Setting) -> GpuCall:
        if at.inputs.dtype not in SUMMED:
            raise NotImplementedError(f"it does not sum {at.inputs.dtype}")
        tensor = at.given(at.inputs.count)
        results: list[torch.Tensor] = []

        def reset() -> None:
            tensor.copy_(at.pristine)
            for result in results:
                result.fill_(POISON)

        def run() -> None:
            result = reduce(tensor)
            if result is None:
                raise NotImplementedError(f"it does not take {tensor.numel() * tensor.itemsize} bytes")
            results[:] = [result]

        return GpuCall(reset, run, lambda _calls: at.inputs.compare_sum(results[0]))

    return build

"""All-reduce, residual and RMSNorm: by one operator on symm groups, in separate steps on others."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from .inputs import PIECE, POISON, GpuCall, Setting

#: Number of elements of a row, if there are enough; the size determines the number of rows.
HIDDEN = 8192
EPS = 1e-6

Rows: TypeAlias = tuple[torch.Tensor, torch.Tensor]
Kernel: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Rows]


def _steps(summed: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    added = summed + residual
    return torch.nn.functional.rms_norm(added, (added.shape[-1],), weight, EPS), added


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(_steps)


def _operator(group: str, tensor: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Rows:
    normed: Rows = torch.ops.symm.all_reduce_add_rms_norm(tensor, residual, weight, EPS, group)
    return normed


def _rows(at: Setting) -> tuple[int, int]:
    hidden = min(HIDDEN, at.inputs.count // 8 * 8)
    return at.inputs.count // hidden, hidden


def _beside(at: Setting, *size: int, seed: int) -> torch.Tensor:
    """Returns a random tensor that is the same on all ranks."""
    generator = torch.Generator(at.inputs.device).manual_seed(at.inputs.seed * 31 + seed)
    values = torch.empty(size, dtype=torch.float32, device=at.inputs.device)
    return values.uniform_(-1.0, 1.0, generator=generator).to(at.inputs.dtype)


def add_rms_norm(at: Setting, kernel: Kernel | None = None) -> GpuCall:
    """Builds the call: ``kernel``, the operator on a group of symm, or an all-reduce and Inductor's code.

    ``kernel`` takes input, residual and weight, and returns the norm and the new residual.
    """
    rows, hidden = _rows(at)
    tensor = at.given(rows * hidden).view(rows, hidden)
    residual, weight = _beside(at, rows, hidden, seed=1), _beside(at, hidden, seed=2)
    results: list[torch.Tensor] = []
    if kernel is None and dist.get_backend(at.group) == "symm":
        kernel = partial(_operator, at.group.group_name)
    steps = _compiled() if at.inputs.device.type == "cuda" else _steps
    if kernel is None:
        steps(tensor, residual, weight)

    def reset() -> None:
        tensor.copy_(at.pristine[: rows * hidden].view(rows, hidden))
        for result in results:
            result.fill_(POISON)

    def run() -> None:
        if kernel is not None:
            results[:] = kernel(tensor, residual, weight)
        else:
            dist.all_reduce(tensor, group=at.group)
            results[:] = steps(tensor, residual, weight)

    def check(calls: int) -> str | None:
        # In separate steps, the sum replaces the input, so further calls sum it again.
        scale = 1.0 if kernel else float(at.world) ** (calls - 1)
        few = min(rows, PIECE // hidden)
        wanted = torch.zeros(few * hidden, dtype=torch.float64, device=at.inputs.device)
        for rank in range(at.world):
            wanted += at.inputs.piece(rank, 0)[: few * hidden]
        added = wanted.view(few, hidden) * scale + residual[:few]
        normed = added / (added.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
        bound = torch.finfo(at.inputs.dtype).eps * 4 * (at.world + calls)
        for name, got, right in (("normed", results[0], normed), ("residual", results[1], added)):
            # Written so that NaN counts as wrong.
            wrong = ~((got[:few].double() - right).abs() <= bound * right.abs().amax(-1, keepdim=True))
            if bool(wrong.any()):
                return f"{int(wrong.sum())} elements of {name} are wrong"
        return None

    return GpuCall(reset, run, check)

"""All-reduce, residual and RMSNorm in separate steps of torch, with the operator's order of squares."""

from __future__ import annotations

import torch
from expected import bits

#: Number of accumulators for groups of eight squares, and number of accumulators in a block.
LANES, BLOCK = 1024, 32
LARGEST = 448.0
LEAST_SCALE = torch.tensor(1 / (LARGEST * 512), dtype=torch.float32)


def _in_halves(values: torch.Tensor) -> torch.Tensor:
    """Sums the last dimension, a power of two: adds its second half to its first until one element is left."""
    while values.shape[-1] > 1:
        first, second = values.chunk(2, dim=-1)
        values = first + second
    return values.squeeze(-1)


def divided(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The quotient of two float32, rounded once, because torch's quotients and roots are sometimes slightly wrong."""
    return (one.double() / other.double()).float()


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of the last dimension, in float32 and rounded once."""
    hidden = rows.shape[-1]
    wide = rows.float()
    groups = _in_halves((wide * wide).unflatten(-1, (hidden // 8, 8)))
    lanes = torch.nn.functional.pad(groups, (0, 2 * LANES - groups.shape[-1])).unflatten(-1, (2, LANES))
    blocks = (lanes[..., 0, :] + lanes[..., 1, :]).unflatten(-1, (LANES // BLOCK, BLOCK))
    total = _in_halves(_in_halves(blocks))
    mean = divided(total, torch.tensor(float(hidden)))
    root = (mean + torch.tensor(eps, dtype=torch.float32)).double().sqrt().float()
    inverse = divided(torch.ones(()), root)
    return (wide * inverse[..., None] * weight.float()).to(rows.dtype)


def reference(
    inputs: list[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator's results for the inputs of all ranks."""
    total = inputs[0].float()
    for other in inputs[1:]:
        total = total + other.float()
    added = total.to(residual.dtype) + residual
    return rms_norm(added, weight, eps), added


def to_fp8(normed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Divides by one scale."""
    return (normed.float() * divided(torch.ones(()), scale)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def to_dynamic_fp8(normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Divides each row by a separate scale."""
    largest = normed.float().abs().amax(dim=-1, keepdim=True)
    scales = torch.maximum(divided(largest, torch.tensor(LARGEST)), LEAST_SCALE)
    return divided(normed.float(), scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


def numbers(seed: int, *size: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Random numbers, the same on all ranks for the same ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator).to(dtype).to(device)


def same_bits(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Returns true if two tensors have the same type, shape and bits."""
    alike = got.dtype == wanted.dtype and got.shape == wanted.shape
    return alike and torch.equal(bits(got), bits(wanted))

"""All-reduce, residual and RMSNorm in separate steps of torch, with the operator's order of squares; and its calls."""

from __future__ import annotations

from typing import Any

import torch
from expected import bits

EPS = 1e-5
#: The dtypes that the operator serves.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CPU = torch.device("cpu")

#: Number of accumulators for groups of eight squares, and number of accumulators in a block.
LANES, BLOCK = 1024, 32
LARGEST = 448.0
LEAST_SCALE = torch.tensor(1 / (LARGEST * 512), dtype=torch.float32)

ops: Any = torch.ops.symm


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


class Rows:
    """This rank's input, a residual and a weight, made from a seed on the CPU, as are the expected rows."""

    def __init__(
        self,
        rank: int,
        world: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        seed: int = 0,
        device: torch.device = CPU,
    ) -> None:
        self.about = (shape, dtype, seed)
        #: The inputs of all ranks.
        self.all = [numbers(1000 * seed + other, *shape, dtype=dtype) for other in range(world)]
        self._residual = numbers(1000 * seed + 100, *shape, dtype=dtype)
        self._weight = numbers(1000 * seed + 101, shape[-1], dtype=dtype)
        given = self.all[rank], self._residual, self._weight
        self.own, self.residual, self.weight = (each.to(device, copy=True) for each in given)

    def wanted(self) -> tuple[torch.Tensor, torch.Tensor]:
        return reference(self.all, self._residual, self._weight, EPS)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.own, self.residual, self.weight

    def check(self, got: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...] = ()) -> None:
        for place, (tensor, right) in enumerate(zip(got, wanted or self.wanted(), strict=True)):
            assert same_bits(tensor.cpu(), right), (*self.about, place)


def every_form(rows: Rows, group: str) -> None:
    """All forms of the operator have the bits of the reference, and change no input unless they are in place."""
    wanted, added = rows.wanted()
    kept = tuple(each.clone().cpu() for each in rows.tensors())
    scale = torch.tensor([0.02], device=rows.own.device)
    rows.check(ops.all_reduce_add_rms_norm(*rows.tensors(), EPS, group), (wanted, added))
    got = ops.all_reduce_add_rms_norm_fp8(*rows.tensors(), EPS, scale, group)
    rows.check(got, (to_fp8(wanted, scale.cpu()), added))
    codes, scales = to_dynamic_fp8(wanted)
    rows.check(ops.all_reduce_add_rms_norm_dynamic_fp8(*rows.tensors(), EPS, group), (codes, added, scales))
    rows.check(rows.tensors(), kept)
    normed, total = rows.own.clone(), rows.residual.clone()
    assert ops.all_reduce_add_rms_norm_(normed, total, rows.weight, EPS, group) is None
    rows.check((normed, total), (wanted, added))


def batches(rank: int, world: int, group: str, hidden: int, dtype: torch.dtype, device: torch.device = CPU) -> None:
    """The first row has the same bits in batches of 1 to 64 rows."""
    rows = Rows(rank, world, (64, hidden), dtype, device=device)
    first = tuple(tensor[0] for tensor in rows.wanted())
    for batch in range(1, 65):
        got = ops.all_reduce_add_rms_norm(rows.own[:batch], rows.residual[:batch], rows.weight, EPS, group)
        rows.check(tuple(each[0] for each in got), first)

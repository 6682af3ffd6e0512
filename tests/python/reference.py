"""What a reduction must give: ranks in order, the documented accumulation type, one rounding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, *FLOAT8)
SIGNED = (torch.int64, torch.int32, torch.int16, torch.int8)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
INTEGERS = (*SIGNED, *UNSIGNED)
COMPLEX = (torch.complex64, torch.complex128)
ALL = (*FLOATS, *INTEGERS, torch.bool, *COMPLEX)

NUMPY = {
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.int16: np.int16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.uint16: np.uint16,
    torch.uint32: np.uint32,
    torch.uint64: np.uint64,
}

SUM, AVG, PRODUCT = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT
MIN, MAX = dist.ReduceOp.MIN, dist.ReduceOp.MAX
BAND, BOR, BXOR = dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR

ARRAY_OPS = {
    SUM: np.add,
    PRODUCT: np.multiply,
    MIN: np.minimum,
    MAX: np.maximum,
    BAND: np.bitwise_and,
    BOR: np.bitwise_or,
    BXOR: np.bitwise_xor,
}


def lesser(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a`` unless ``b`` is strictly less; any NaN wins."""
    return torch.where((b < a) | b.isnan(), b, a)


def greater(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a`` unless ``b`` is strictly greater; any NaN wins."""
    return torch.where((b > a) | b.isnan(), b, a)


TENSOR_OPS = {SUM: torch.add, AVG: torch.add, PRODUCT: torch.mul, MIN: lesser, MAX: greater}
BOOL_OPS = {SUM: "or", MAX: "or", BOR: "or", PRODUCT: "and", MIN: "and", BAND: "and", BXOR: "xor"}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements' bytes, in logical order."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def nan_mask(tensor: torch.Tensor) -> torch.Tensor:
    """Which elements (a complex one counts as two) are NaN."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if not flat.is_floating_point():
        return torch.zeros(flat.numel(), dtype=torch.bool)
    return torch.isnan(flat.to(torch.float64))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, except that any NaN equals any NaN."""
    if a.dtype != b.dtype or a.numel() != b.numel():
        return False
    if a.numel() == 0 or torch.equal(as_bytes(a), as_bytes(b)):
        return True
    nans_a, nans_b = nan_mask(a), nan_mask(b)
    if not torch.equal(nans_a, nans_b):
        return False
    keep = ~nans_a
    bytes_a, bytes_b = as_bytes(a).view(keep.numel(), -1), as_bytes(b).view(keep.numel(), -1)
    return torch.equal(bytes_a[keep], bytes_b[keep])


def from_numpy(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array).view(np.uint8)).view(dtype)


def reduced(
    inputs: Sequence[torch.Tensor], op: dist.ReduceOp.RedOpType, factors: Sequence[float] | None = None
) -> torch.Tensor:
    """The reduction of one flat tensor per rank. ``factors`` makes it PREMUL_SUM."""
    dtype = inputs[0].dtype
    if dtype.is_complex:
        real = [torch.view_as_real(each).reshape(-1) for each in inputs]
        return torch.view_as_complex(reduced(real, op, factors).view(-1, 2))
    if dtype == torch.bool:
        return _reduced_bool(inputs, op)
    if dtype in NUMPY:
        arrays = [as_bytes(each).numpy().view(NUMPY[dtype]) for each in inputs]
        total = arrays[0].copy()
        with np.errstate(over="ignore"):
            for array in arrays[1:]:
                total = ARRAY_OPS[op](total, array)
        return from_numpy(total, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    combine = torch.add if factors is not None else TENSOR_OPS[op]
    lifted = [each.to(wide) for each in inputs]
    if factors is not None:
        lifted = [each * torch.tensor(factor, dtype=wide) for each, factor in zip(lifted, factors, strict=True)]
    total = lifted[0]
    for each in lifted[1:]:
        total = combine(total, each)
    if op == AVG and factors is None:
        total = total / torch.tensor(len(inputs), dtype=wide)
    return total.to(dtype)


def _reduced_bool(inputs: Sequence[torch.Tensor], op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    stacked = torch.stack(list(inputs))
    kind = BOOL_OPS[op]
    if kind == "or":
        return stacked.any(0)
    if kind == "and":
        return stacked.all(0)
    return stacked.sum(0) % 2 == 1


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

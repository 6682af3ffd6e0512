"""The expected results of collectives, with torch and numpy: rank order, float32 for narrower floats, one rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import numpy as np
import torch
from torch.distributed import ReduceOp
from torch_symm.tools.check.reference import BITWISE as BITWISE
from torch_symm.tools.check.reference import COMPLEX, FLOAT8, FLOATS, INTEGERS, REDOPS
from torch_symm.tools.check.reference import DTYPES as DTYPES
from torch_symm.tools.check.reference import served as served

OPS = REDOPS
NARROW = (torch.float16, torch.bfloat16, *FLOAT8)


def name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def seeded(dtype: torch.dtype, shape: Sequence[int], seed: int) -> torch.Tensor:
    """Random values that fill the dtype's range without leaving it: full range for integers, around 0 for floats."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator, dtype=torch.uint8).to(torch.bool)
    if dtype in INTEGERS:
        count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8).view(dtype).reshape(tuple(shape))
    if dtype in COMPLEX:
        return torch.randn(tuple(shape), generator=generator, dtype=dtype)
    return (torch.randn(tuple(shape), generator=generator, dtype=torch.float64) * 4).to(dtype)


def reduced(
    op: str, inputs: Sequence[torch.Tensor], factors: Sequence[float] = (), fold: Callable[..., torch.Tensor] = reduce
) -> torch.Tensor:
    """The reduction of every rank's input, in rank order. ``factors``: of each rank, for PREMUL_SUM."""
    dtype = inputs[0].dtype
    if dtype in COMPLEX:
        return torch.view_as_complex(reduced(op, [torch.view_as_real(x.contiguous()) for x in inputs], factors, fold))
    if dtype == torch.bool:
        return reduce(_BOOLS[op], inputs)
    if dtype in INTEGERS:
        return _reduced_integers(op, inputs)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    values = [x.to(wide) for x in inputs]
    if op == "PREMUL_SUM":
        values = [x * torch.tensor(factor, dtype=wide) for x, factor in zip(values, factors, strict=True)]
    combine = {
        "SUM": torch.add,
        "AVG": torch.add,
        "PREMUL_SUM": torch.add,
        "PRODUCT": torch.mul,
        "MIN": lambda a, b: torch.where((b < a) | b.isnan(), b, a),
        "MAX": lambda a, b: torch.where((b > a) | b.isnan(), b, a),
    }[op]
    result = fold(combine, values)
    if op == "AVG":
        result = result / torch.tensor(len(inputs), dtype=wide)
    return rounded(result, dtype)


def in_halves(op: str, inputs: Sequence[torch.Tensor], factors: Sequence[float] = ()) -> torch.Tensor:
    """The definition of ``order="tree"``: combines the results of both halves of the ranks; divides and rounds once."""
    return reduced(op, inputs, factors, reduce if op in ("MIN", "MAX") else _halves)


def _halves(both: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], parts: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    half = max(power for power in (1, 2, 4, 8, 16) if power < len(parts))
    return both(_halves(both, parts[:half]), _halves(both, parts[half:]))


def two_level(op: str, inputs: Sequence[torch.Tensor], factors: Sequence[float], nodes: Sequence[int]) -> torch.Tensor:
    """The ranks of each node in order, rounded once, then the nodes in order, rounded once; ``nodes``: of each rank."""
    n = len(inputs)
    if op == "AVG" and inputs[0].dtype in INTEGERS:
        return reduced(op, inputs)
    groups = [[rank for rank in range(n) if nodes[rank] == node] for node in sorted(set(nodes))]
    parts = [reduced(op, [inputs[r] for r in group], [factors[r] for r in group]) for group in groups]
    if op == "AVG" and len({len(group) for group in groups}) > 1:
        return reduced("PREMUL_SUM", parts, [len(group) / n for group in groups])
    return reduced("SUM" if op == "PREMUL_SUM" else op, parts)


def rounded(wide: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``wide``, of float32 or float64, in ``dtype``."""
    if dtype == torch.float8_e4m3fn:
        # Float8 overflow is NaN; torch 2.13 and later convert to 448 instead. 464 is half-way to the number after 448.
        wide = torch.where(wide.abs() > 464, torch.copysign(torch.tensor(torch.nan), wide), wide)
    return wide.to(dtype)


_BOOLS = {
    **dict.fromkeys(("SUM", "MAX", "BOR"), torch.logical_or),
    **dict.fromkeys(("PRODUCT", "MIN", "BAND"), torch.logical_and),
    "BXOR": torch.logical_xor,
}


def _reduced_integers(op: str, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    combine = {
        "SUM": np.add,
        "AVG": np.add,
        "PRODUCT": np.multiply,
        "MIN": np.minimum,
        "MAX": np.maximum,
        "BAND": np.bitwise_and,
        "BOR": np.bitwise_or,
        "BXOR": np.bitwise_xor,
    }[op]
    with np.errstate(over="ignore"):
        result = np.asarray(reduce(combine, [x.contiguous().numpy() for x in inputs]))
    if op == "AVG":
        # Rounds toward zero, while numpy's // rounds down.
        down = result // np.array(len(inputs), result.dtype)
        exact = down * np.array(len(inputs), result.dtype) == result
        result = np.where((result < 0) & ~exact, down + np.array(1, result.dtype), down).astype(result.dtype)
    return torch.from_numpy(result.copy())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements' bytes in logical order, without a copy if they are consecutive."""
    flat = tensor.detach().reshape(-1)
    if flat.stride() != (1,):
        flat = torch.empty(flat.numel(), dtype=flat.dtype).copy_(flat)
    if flat.dtype in COMPLEX:
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(torch.uint8)


def assert_same_bits(got: torch.Tensor, wanted: torch.Tensor, about: object) -> None:
    """Fails with the first difference."""
    assert got.shape == wanted.shape and got.dtype == wanted.dtype, f"{about}: {got.shape} {got.dtype}, {wanted.shape}"
    a, b = bits(got), bits(wanted)
    if torch.equal(a, b):
        return
    first = int((a != b).nonzero()[0]) // got.element_size()
    values = [x.detach().contiguous().reshape(-1)[first] for x in (got, wanted)]
    raise AssertionError(f"{about}: element {first} of {got.numel()} is {values[0]}, should be {values[1]}")


def assert_same(got: torch.Tensor, wanted: torch.Tensor, about: object) -> None:
    """Bit for bit, except that a NaN from the CPU and one from the GPU may differ in their bits."""
    if wanted.dtype in FLOATS and bool((both := got.float().isnan() & wanted.float().isnan()).any()):
        zero = torch.zeros((), dtype=wanted.dtype)
        got, wanted = torch.where(both, zero, got), torch.where(both, zero, wanted)
    assert_same_bits(got, wanted, about)


def op_of(op: str, factor: float = 1.0) -> ReduceOp:
    """torch's reduce op with this name."""
    if op == "PREMUL_SUM":
        return torch.distributed._make_nccl_premul_sum(factor)
    return getattr(ReduceOp, op)

"""The right results: in rank order, float32 for narrower floats, one rounding at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, reduce

import torch

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, *FLOAT8)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, *UNSIGNED)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*FLOATS, *INTEGERS, torch.bool, *COMPLEX)
BITWISE = ("BAND", "BOR", "BXOR")
REDOPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", *BITWISE, "PREMUL_SUM")
#: The factor of PREMUL_SUM.
FACTOR = 2.0
#: A prime, so that a part at the wrong offset is noticed.
_PERIOD = 251


def served(redop: str, dtype: torch.dtype) -> bool:
    """Returns true if the reduction is defined for the type; others are rejected."""
    if dtype in FLOATS:
        return redop not in BITWISE
    if dtype in INTEGERS:
        return redop != "PREMUL_SUM"
    if dtype in COMPLEX:
        return redop in ("SUM", "AVG", "PREMUL_SUM")
    return redop not in ("AVG", "PREMUL_SUM")


@lru_cache(maxsize=512)
def values(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    """Returns the values of a rank, the same in every process: halves, or small integers. Not to be changed."""
    index = torch.arange(count, dtype=torch.int64) % _PERIOD
    # Knuth's multiplicative hash: no reduction of many ranks' values is the same for all elements.
    mixed = ((index + seed * _PERIOD) * 2654435761 % (1 << 32)) >> 9
    if dtype == torch.bool:
        return mixed % 2 == 0
    if dtype in INTEGERS:
        return (mixed % 4 if dtype in UNSIGNED else mixed % 7 - 3).to(dtype)
    if dtype in COMPLEX:
        return torch.complex(_halves(mixed), _halves(mixed + 1)).to(dtype)
    return _halves(mixed).to(dtype)


def _halves(mixed: torch.Tensor) -> torch.Tensor:
    """Returns -1.5, -1, -0.5, 0.5, 1 and 1.5, without zero, whose sign would depend on the order."""
    step = mixed % 6 - 3
    return (step + (step >= 0).to(torch.int64)).to(torch.float64) / 2


def reduced(redop: str, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The reduction of all ranks' ``inputs``."""
    dtype = inputs[0].dtype
    if dtype in COMPLEX:
        parts = [torch.view_as_real(one.contiguous()) for one in inputs]
        return torch.view_as_complex(reduced(redop, parts).contiguous())
    if dtype == torch.bool:
        return reduce(_BOOLS[redop], inputs)
    if dtype in INTEGERS:
        # The values are small, so signed 64 bits represent the result of any integer type.
        total = reduce(_INTEGERS[redop], [one.to(torch.int64) for one in inputs])
        total = torch.div(total, len(inputs), rounding_mode="trunc") if redop == "AVG" else total
        return total.to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scale = FACTOR if redop == "PREMUL_SUM" else 1.0
    total = reduce(_FLOATS[redop], [one.to(wide) * scale for one in inputs])
    total = total / torch.tensor(len(inputs), dtype=wide) if redop == "AVG" else total
    return total.to(dtype)


_Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_FLOATS: dict[str, _Combine] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PREMUL_SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}
_INTEGERS: dict[str, _Combine] = {
    **_FLOATS,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_BOOLS: dict[str, _Combine] = {
    **dict.fromkeys(("SUM", "MAX", "BOR"), torch.logical_or),
    **dict.fromkeys(("PRODUCT", "MIN", "BAND"), torch.logical_and),
    "BXOR": torch.logical_xor,
}


def difference(got: torch.Tensor, wanted: torch.Tensor) -> str | None:
    """Returns the first element whose bits differ; ``None`` if all are equal."""
    a, b = (one.detach().cpu().contiguous().reshape(-1) for one in (got, wanted))
    if torch.equal(_bytes(a), _bytes(b)):
        return None
    where = int((_bytes(a) != _bytes(b)).nonzero()[0]) // a.element_size()
    return f"element {where} of {a.numel()} is {a[where].item()}, should be {b[where].item()}"


def _bytes(flat: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(flat).reshape(-1) if flat.dtype in COMPLEX else flat).view(torch.uint8)

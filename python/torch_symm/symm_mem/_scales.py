"""Matrix products of 8-bit floats with scales."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch


class ScaleMode(Enum):
    """The rows to which a scale of ``A`` applies."""

    #: All of ``A``; the same on all ranks.
    TENSOR = "tensor"
    #: The rows of this rank's shard.
    SHARDED_ROWS = "sharded rows"
    #: The rows of all shards.
    ALL_ROWS = "all rows"


def gather_mode(A_shard: torch.Tensor, A_scale: torch.Tensor, gather_dim: int, ranks: int) -> ScaleMode:
    """Returns the rows to which ``A_scale`` applies, according to its shape.

    Raises:
        ValueError: the shape fits none of the modes.
    """
    whole = list(A_shard.shape)
    whole[gather_dim] *= ranks
    # Checked first, as in torch, because a scale with one element can fit two modes.
    if A_scale.shape[:-1] == A_shard.shape[:-1] and A_scale.shape[-1] == 1:
        return ScaleMode.SHARDED_ROWS
    if A_scale.numel() == 1:
        return ScaleMode.TENSOR
    if list(A_scale.shape) == [*whole[:-1], 1]:
        return ScaleMode.ALL_ROWS
    raise ValueError(
        f"Invalid scale shape for fp8 all-gather (shard shape: {A_shard.shape}, scale shape: {A_scale.shape})"
    )


@dataclass(frozen=True)
class ScaledMatmul:
    """The arguments of ``torch._scaled_mm`` without ``A`` and its scale."""

    B: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None
    result_scale: torch.Tensor | None
    out_dtype: torch.dtype | None
    use_fast_accum: bool

    def __call__(self, A: torch.Tensor, A_scale: torch.Tensor) -> torch.Tensor:
        """Returns the product of the matrix ``A``, whose scale is one number or one per row."""
        product: torch.Tensor = torch.ops.aten._scaled_mm(
            A,
            self.B,
            A_scale,
            self.scale,
            self.bias,
            self.result_scale,
            out_dtype=self.out_dtype,
            use_fast_accum=self.use_fast_accum,
        )
        return product

    def check(self, A: torch.Tensor, A_scale: torch.Tensor) -> None:
        """Raises what products of ``A`` would raise, unless ``A`` is on a GPU."""
        if A.device.type != "cpu":
            return
        if A_scale.numel() == 1:
            self(A.new_empty(1, A.shape[-1]), A_scale)
        else:
            # Two rows, because torch takes a scale with one element for the scale of the whole matrix.
            self(A.new_empty(2, A.shape[-1]), A_scale.new_ones(2, 1))

    def into(self, A: torch.Tensor, A_scale: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the product to ``out``."""
        if A_scale.data_ptr() % 16:  # a slice of a longer tensor; cuBLAS requires 16-byte alignment
            A_scale = A_scale.clone()
        torch.ops.aten._scaled_mm.out(
            A,
            self.B,
            A_scale,
            self.scale,
            self.bias,
            self.result_scale,
            out_dtype=self.out_dtype,
            use_fast_accum=self.use_fast_accum,
            out=out,
        )

    def result_dtype(self, A: torch.Tensor) -> torch.dtype:
        """The dtype of the product."""
        return A.dtype if self.out_dtype is None else self.out_dtype


#: Codes of ``c10::ScalarType``: a kernel written in Python gets a list of dtypes as a list of these numbers.
_DTYPES = {
    5: torch.float16,
    6: torch.float32,
    7: torch.float64,
    15: torch.bfloat16,
    23: torch.float8_e5m2,
    24: torch.float8_e4m3fn,
    25: torch.float8_e5m2fnuz,
    26: torch.float8_e4m3fnuz,
}


def dtype_of(code: torch.dtype | int | None) -> torch.dtype | None:
    """Returns the dtype with this code.

    Raises:
        ValueError: no product can have this dtype.
    """
    if code is None or isinstance(code, torch.dtype):
        return code
    if code not in _DTYPES:
        raise ValueError(f"a scaled matrix product cannot have scalar type {code}")
    return _DTYPES[code]

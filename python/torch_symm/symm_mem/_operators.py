"""The fused operators as functions and as ``torch.ops.symm.*``, with torch's schemas."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torch_symm._inductor import add_collectives
from torch_symm.symm_mem import _all_gather_matmul, _matmul_reduce_scatter
from torch_symm.symm_mem._agreement import reject
from torch_symm.symm_mem._groups import in_test_mode


class Operator(NamedTuple):
    """One fused operator: its arguments, and the functions that compute it."""

    name: str
    arguments: str
    fused: Callable[..., Any]
    fallback: Callable[..., Any]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the operator; under ``_test_mode()``, its fallback."""
        self._check_devices(args, kwargs)
        return (self.fallback if in_test_mode() else self.fused)(*args, **kwargs)

    def shapes(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the operator's results for tensors without memory."""
        self._check_devices(args, kwargs)
        return self.fallback(*args, **kwargs)

    def _check_devices(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raises ``ValueError`` for tensors on several devices, because torch would run the kernel of one of them."""
        first: tuple[str, torch.device] | None = None
        for name, value in (*zip(_names(self.arguments), args, strict=False), *kwargs.items()):
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if not isinstance(tensor, torch.Tensor):
                    continue
                first = first or (name, tensor.device)
                if tensor.device != first[1]:
                    error = ValueError(
                        f"{self.name}: {name} is on {tensor.device}, {first[0]} on {first[1]}; move them to one device"
                    )
                    given = {**dict(zip(_names(self.arguments), args, strict=False)), **kwargs}
                    reject(given["group_name"], first[1], error)
                    raise error


@functools.cache
def _names(arguments: str) -> list[str]:
    return [argument.name for argument in torch._C.parse_schema(f"_{arguments}").arguments]


OPERATORS = (
    Operator(
        "fused_all_gather_matmul",
        "(Tensor A, Tensor[] Bs, int gather_dim, str group_name, *, bool return_A=True) -> (Tensor?, Tensor[])",
        _all_gather_matmul.fused,
        _all_gather_matmul.fallback,
    ),
    Operator(
        "fused_all_gather_scaled_matmul",
        "(Tensor A, Tensor[] Bs, Tensor A_scale, Tensor[] B_scales, int gather_dim, str group_name, "
        "Tensor?[] biases, Tensor?[] result_scales, ScalarType?[] out_dtypes, bool[] use_fast_accum) "
        "-> (Tensor, Tensor[])",
        _all_gather_matmul.fused_scaled,
        _all_gather_matmul.fallback_scaled,
    ),
    Operator(
        "fused_matmul_reduce_scatter",
        "(Tensor A, Tensor B, str reduce_op, int scatter_dim, str group_name) -> Tensor",
        _matmul_reduce_scatter.fused,
        _matmul_reduce_scatter.fallback,
    ),
    Operator(
        "fused_scaled_matmul_reduce_scatter",
        "(Tensor A, Tensor B, Tensor A_scale, Tensor B_scale, str reduce_op, int orig_scatter_dim, "
        "int scatter_dim_after_maybe_reshape, str group_name, SymInt[]? output_shape, Tensor? bias=None, "
        "Tensor? result_scale=None, ScalarType? out_dtype=None, bool use_fast_accum=False) -> Tensor",
        _matmul_reduce_scatter.fused_scaled,
        _matmul_reduce_scatter.fallback_scaled,
    ),
)

# A fragment, because the native operators are in this namespace, too.
_library = torch.library.Library("symm", "FRAGMENT")  # type: ignore[no-untyped-call]
for _operator in OPERATORS:
    # Inputs keep their memory order, which decides whether they must be copied.
    _library.define(_operator.name + _operator.arguments, tags=[torch.Tag.needs_fixed_stride_order])  # type: ignore[no-untyped-call]
    _library.impl(_operator.name, _operator.run, "CPU")  # type: ignore[no-untyped-call]
    _library.impl(_operator.name, _operator.run, "CUDA")  # type: ignore[no-untyped-call]
    _library.impl(_operator.name, _operator.shapes, "Meta")  # type: ignore[no-untyped-call]
add_collectives(getattr(torch.ops.symm, operator.name) for operator in OPERATORS)


def fused_all_gather_matmul(
    A_shard: torch.Tensor, Bs: Sequence[torch.Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Returns ``A``, all ranks' ``A_shard`` concatenated along ``gather_dim``, and ``A @ B`` for each of ``Bs``.

    Shards are multiplied while others are in transit. Nothing is copied in advance if ``gather_dim`` is outermost in
    memory (:func:`restride_A_shard_for_fused_all_gather_matmul`), and it is outermost in the results. With the last
    dimension as ``gather_dim``, the results are contiguous. Not differentiable.

    Args:
        A_shard: at least two-dimensional, of equal shape and dtype on all ranks.
        Bs: matrices with as many rows as ``A_shard`` has in its last dimension.
        gather_dim: from 0 on.
        group_name: the group of the ranks.
        return_A: if false, ``None`` replaces ``A``.

    Raises:
        ValueError: shapes or ``gather_dim`` do not fit.
        SymmTimeoutError, SymmPeerError: ranks are late, or have ended.
        SymmMismatchError: on CPU tensors, ranks called another operator, or with other shapes, dtypes or dimensions, or
            a rank rejected its arguments. On CUDA tensors the ranks' calls are not compared; if they differ, results
            are wrong, or the ranks wait until their deadline.
    """
    result: tuple[torch.Tensor | None, list[torch.Tensor]] = torch.ops.symm.fused_all_gather_matmul(
        A_shard, list(Bs), gather_dim, group_name, return_A=return_A
    )
    return result


def fused_all_gather_scaled_matmul(
    A_shard: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    A_scale: torch.Tensor,
    B_scales: Sequence[torch.Tensor],
    gather_dim: int,
    group_name: str,
    biases: Sequence[torch.Tensor | None],
    result_scales: Sequence[torch.Tensor | None],
    out_dtypes: Sequence[torch.dtype | None],
    use_fast_accum: Sequence[bool],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Like :func:`fused_all_gather_matmul` with ``torch._scaled_mm``; not along the last dimension.

    Args:
        A_shard, Bs, gather_dim, group_name: as in :func:`fused_all_gather_matmul`.
        A_scale: one number, one per row of ``A_shard`` (the scales are then gathered as well), or one per row of ``A``.
        B_scales, biases, result_scales, out_dtypes, use_fast_accum: arguments of ``torch._scaled_mm`` with each of
        ``Bs``.

    Returns:
        The gathered ``A``, and a product for each of ``Bs``.

    Raises:
        ValueError: shapes, ``gather_dim`` or the lists' lengths do not fit.
        SymmTimeoutError, SymmPeerError, SymmMismatchError: as in :func:`fused_all_gather_matmul`.
    """
    lists = (list(biases), list(result_scales), list(out_dtypes), list(use_fast_accum))
    result: tuple[torch.Tensor, list[torch.Tensor]] = torch.ops.symm.fused_all_gather_scaled_matmul(
        A_shard, list(Bs), A_scale, list(B_scales), gather_dim, group_name, *lists
    )
    return result


def fused_matmul_reduce_scatter(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> torch.Tensor:
    """Returns this rank's piece along ``scatter_dim`` of the sum of all ranks' ``A @ B``; contiguous.

    Blocks are sent while others are multiplied. Each rank's product has the dtype of ``A``; the products are summed in
    fp32 (fp64 in fp64) in rank order and rounded once. Nothing is copied in advance if ``scatter_dim`` is outermost in
    memory (:func:`restride_A_for_fused_matmul_reduce_scatter`). Not differentiable.

    Args:
        A, B: matrices, ``A`` with leading dimensions or without; the products of all ranks have equal shapes.
        reduce_op: ``"sum"`` or ``"avg"``.
        group_name: the group of the ranks.
        scatter_dim: of the product, from 0 on; the ranks must divide it.

    Raises:
        ValueError: shapes, ``scatter_dim`` or ``reduce_op`` do not fit.
        SymmTimeoutError, SymmPeerError, SymmMismatchError: as in :func:`fused_all_gather_matmul`. The ranks also
            compare ``reduce_op``.
    """
    result: torch.Tensor = torch.ops.symm.fused_matmul_reduce_scatter(A, B, reduce_op, scatter_dim, group_name)
    return result


def fused_scaled_matmul_reduce_scatter(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: Sequence[int] | None,
    bias: torch.Tensor | None = None,
    result_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Like :func:`fused_matmul_reduce_scatter` with ``torch._scaled_mm``; not along the last dimension.

    Args:
        A, B, reduce_op, group_name: as in :func:`fused_matmul_reduce_scatter`.
        A_scale: one number, or one per row of ``A``.
        B_scale, bias, result_scale, out_dtype, use_fast_accum: arguments of ``torch._scaled_mm``.
        orig_scatter_dim: the dimension of ``output_shape`` that is scattered.
        scatter_dim_after_maybe_reshape: that dimension in ``A``, whose leading dimensions may have been flattened.
        output_shape: the shape of the product before it is scattered; by default the shape of ``A @ B``.

    Returns:
        This rank's piece, contiguous.

    Raises:
        ValueError: shapes, dimensions or ``reduce_op`` do not fit.
        SymmTimeoutError, SymmPeerError, SymmMismatchError: as in :func:`fused_matmul_reduce_scatter`.
    """
    shape = None if output_shape is None else list(output_shape)
    dims = (orig_scatter_dim, scatter_dim_after_maybe_reshape)
    options = (bias, result_scale, out_dtype, use_fast_accum)
    result: torch.Tensor = torch.ops.symm.fused_scaled_matmul_reduce_scatter(
        A, B, A_scale, B_scale, reduce_op, *dims, group_name, shape, *options
    )
    return result

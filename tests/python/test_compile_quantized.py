"""torch_symm.compile: quantization to float8_e4m3fn becomes a part of the operator, if the results are the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
import torch_symm
from norm_reference import numbers, same_bits
from programs import QUIET, needs_compiler
from ranks import run_ranks
from torch_symm.compile._pass import SymmPass

EPS, FP8, LEAST = 1e-5, torch.float8_e4m3fn, 1 / (448 * 512)
PLAIN, STATIC, DYNAMIC = "all_reduce_add_rms_norm", "all_reduce_add_rms_norm_fp8", "all_reduce_add_rms_norm_dynamic_fp8"

#: (normed rows, scale) -> results.
Quantize = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]


def divided(normed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return ((normed.float() / scale).clamp(-448, 448).to(FP8),)


def promoted(normed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return ((normed / scale).clamp(max=448.0).clamp(min=-448.0).to(FP8),)


def multiplied(normed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return ((scale.reciprocal() * normed.to(torch.float32)).clamp(-448.0, 448.0).to(FP8),)


def by_row(normed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    scales = (normed.float().abs().amax(-1, keepdim=True) / 448.0).clamp(min=LEAST)
    return (normed.float() / scales).clamp(-448, 448).to(FP8), scales


def by_row_unlimited(normed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    scales = (normed.abs().amax(1, True).float() / 448.0).clamp(min=LEAST)
    return (normed / scales).to(FP8), scales * 2


def by_row_as_vllm(normed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    largest, _ = normed.abs().max(dim=-1)
    scales = (largest.unsqueeze(-1).to(torch.float32) / 448.0).clamp(min=LEAST)
    return (normed.to(torch.float32) * scales.reciprocal()).clamp(-448, 448).to(FP8), scales


def unlimited(normed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return ((normed.float() / scale).to(FP8),)


def otherwise_limited(normed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return ((normed.float() / scale).clamp(-240, 448).to(FP8),)


def of_another_type(normed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return ((normed.float() / scale).clamp(-448, 448).to(torch.float8_e5m2),)


def by_column(normed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return ((normed.float() / scale.expand(64)).clamp(-448, 448).to(FP8),)


def by_float64(normed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return ((normed.float() / scale.double()).clamp(-448, 448).to(FP8),)


def of_itself(normed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return ((normed.float() / normed.float()[:1, :1]).clamp(-448, 448).to(FP8),)


def kept(normed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return *divided(normed, scale), normed * 2


def with_zeros(normed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    scales = normed.float().abs().amax(-1, keepdim=True) / 448.0
    return ((normed.float() / scales).clamp(-448, 448).to(FP8),)


def by_rows_of_all(normed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    scales = (normed.float().abs().amax(0, keepdim=True) / 448.0).clamp(min=LEAST)
    return ((normed.float() / scales).clamp(-448, 448).to(FP8),)


def largest_kept(normed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    largest = normed.float().abs().amax(-1, keepdim=True)
    return (normed.float() / (largest / 448.0).clamp(min=LEAST)).to(FP8), largest


SERVED: dict[Quantize, str] = {
    divided: STATIC,
    promoted: STATIC,
    multiplied: STATIC,
    by_row: DYNAMIC,
    by_row_unlimited: DYNAMIC,
    by_row_as_vllm: DYNAMIC,
}
LEFT: tuple[Quantize, ...] = (
    unlimited, otherwise_limited, of_another_type, by_column, by_float64, of_itself, kept, with_zeros, by_rows_of_all,
    largest_kept,
)  # fmt: skip


def layer_of(quantize: Quantize, group: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    collectives = torch.ops._c10d_functional

    def layer(own: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> Any:
        added = residual + collectives.wait_tensor(collectives.all_reduce(own, "sum", group))
        wide = added.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        return *quantize(weight * wide.to(added.dtype), scale), added

    return layer


def given(rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    own, residual = (numbers(seed, 4, 64, dtype=dtype) for seed in (rank, 10))
    own[2], residual[2] = 0, 0  # A row of zeros has the least scale
    return own, residual, numbers(11, 64, dtype=dtype), torch.tensor([0.013])


def wanted(quantize: Quantize, tensors: tuple[torch.Tensor, ...], group: str) -> tuple[torch.Tensor, ...]:
    """The expected results, from eager calls of the operators."""
    own, residual, weight, scale = tensors
    ops = torch.ops.symm
    if SERVED.get(quantize) == STATIC:
        rows, added = ops.all_reduce_add_rms_norm_fp8(own, residual, weight, EPS, scale, group)
        return rows, added
    if SERVED.get(quantize) == DYNAMIC:
        rows, added, scales = ops.all_reduce_add_rms_norm_dynamic_fp8(own, residual, weight, EPS, group)
        return rows, scales * 2 if quantize is by_row_unlimited else scales, added
    normed, added = ops.all_reduce_add_rms_norm(own, residual, weight, EPS, group)
    return *quantize(normed, scale), added


def operators(graph: torch.fx.Graph) -> list[str]:
    """The forms of the operator in the graph."""
    found = [node.target.__name__ for node in graph.nodes if str(node.target).startswith("symm.")]
    return [name.removesuffix(".default") for name in found]


def graphs(rank: int, world: int) -> None:
    """Tests of graphs, without a compiler."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    torch_symm.stats()
    name = dist.group.WORLD.group_name
    table = select_decomp_table()
    for dtype in (torch.bfloat16, torch.float32):
        tensors = given(rank, dtype)
        for quantize in (*SERVED, *LEFT) if dtype == torch.bfloat16 else SERVED:
            graph = make_fx(layer_of(quantize, name), decomposition_table=table, tracing_mode="fake")(*tensors)
            graph.graph.eliminate_dead_code()  # As Inductor does
            SymmPass()(graph.graph)
            graph.graph.lint()
            graph.recompile()
            assert operators(graph.graph) == [SERVED.get(quantize, PLAIN)], (quantize, dtype, graph.code)
            for got, right in zip(graph(*tensors), wanted(quantize, tensors, name), strict=True):
                assert same_bits(got, right), (quantize, dtype)


def test_graphs_get_the_form_that_gives_the_same() -> None:
    run_ranks(graphs, 2)


def without_rounding(rank: int, world: int) -> None:
    """The pattern that Inductor of torch 2.11 leaves for rows that are rounded and widened again."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    torch_symm.stats()
    name = dist.group.WORLD.group_name
    collectives = torch.ops._c10d_functional
    for quantize in SERVED:

        def layer(quantize: Quantize, own: Any, residual: Any, weight: Any, scale: Any) -> Any:
            added = residual + collectives.wait_tensor(collectives.all_reduce(own, "sum", name))
            wide = added.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * weight
            rows, *rest = quantize(wide, scale)
            return rows, *rest, added

        tensors = given(rank, torch.bfloat16)
        graph = make_fx(partial(layer, quantize), decomposition_table=select_decomp_table(), tracing_mode="fake")(
            *tensors
        )
        graph.graph.eliminate_dead_code()
        SymmPass()(graph.graph)
        graph.recompile()
        assert operators(graph.graph) == [SERVED[quantize]], (quantize, graph.code)
        for got, right in zip(graph(*tensors), wanted(quantize, tensors, name), strict=True):
            assert same_bits(got, right), quantize


def test_rows_that_were_not_rounded_before_are_rounded() -> None:
    run_ranks(without_rounding, 2)


def compiled(rank: int, world: int) -> None:
    torch_symm.stats()
    name = dist.group.WORLD.group_name
    seen: list[list[str]] = []

    class Seen(SymmPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            super().__call__(graph)
            seen.append(operators(graph))

        def uuid(self) -> Any:
            return None

    tensors = given(rank, torch.bfloat16)
    for quantize in (divided, by_row_as_vllm):
        with torch.no_grad(), torch._inductor.config.patch(post_grad_custom_pre_pass=Seen()):
            results = torch.compile(layer_of(quantize, name), fullgraph=True)(*tensors)
        assert seen.pop() == [SERVED[quantize]], quantize
        for got, right in zip(results, wanted(quantize, tensors, name), strict=True):
            assert same_bits(got, right), quantize
        torch._dynamo.reset()


@needs_compiler
@pytest.mark.slow
def test_compiled_layers_have_the_operators_bits() -> None:
    run_ranks(compiled, 2, timeout=220, env=QUIET)

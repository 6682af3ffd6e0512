"""The operators that torch_symm.engines.vllm puts into vLLM's graphs, with duck types of vLLM's operators."""

from __future__ import annotations

import logging
import operator
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import vllm_doubles
from norm_reference import numbers, reference, same_bits, to_dynamic_fp8, to_fp8
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from vllm_doubles import EPS, communicator, vllm_package  # noqa: F401

pytestmark = pytest.mark.usefixtures("vllm_package")


def quantized_by_vllm(op: Any, place: dict[str, int], **given: Any) -> list[torch.Tensor]:
    results = auto_functionalized(op, **given)
    return [results[index] for index in place.values()]


def layers(static: bool, dynamic: bool) -> dict[str, Any]:
    """Functions of input, residual, weight and scale, as vLLM writes what follows an all-reduce."""
    ops: Any = torch.ops

    def reduced(x: Any, group: str = "tp:0") -> Any:
        return ops.vllm.all_reduce(x, group_name=group)

    def norm(x: Any, r: Any, w: Any, **more: Any) -> Any:
        return ops.vllm_ir.fused_add_rms_norm(reduced(x), r, w, EPS, **more)

    def empty(x: Any) -> Any:
        return torch.empty_like(x, dtype=torch.float8_e4m3fn)

    def narrow(values: Any, scale: Any) -> Any:
        return (values.float() * scale.reciprocal()).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)

    def by_rows(normed: Any, added: Any, largest: Any) -> Any:
        scales = (largest.unsqueeze(-1).to(torch.float32) / 448.0).clamp(min=1 / (448 * 512))
        return narrow(normed, scales), added, scales

    def by_torch(x: Any, r: Any, w: Any, s: Any) -> Any:
        normed, added = norm(x, r, w)
        return narrow(normed, s), added

    def by_vllm(x: Any, r: Any, w: Any, s: Any) -> Any:
        normed, added = norm(x, r, w)
        op = ops._C.static_scaled_fp8_quant.default
        return *quantized_by_vllm(op, {"result": 1}, result=empty(x), input=normed, scale=s, group_shape=None), added

    def with_norm(x: Any, r: Any, w: Any, s: Any) -> Any:
        op = ops._C.fused_add_rms_norm_static_fp8_quant.default
        given = {"result": empty(x), "input": reduced(x), "residual": r, "weight": w, "scale": s, "epsilon": EPS}
        return quantized_by_vllm(op, {"result": 1, "residual": 2}, **given)

    def rows_by_torch(x: Any, r: Any, w: Any, s: Any) -> Any:
        normed, added = norm(x, r, w)
        return by_rows(normed, added, normed.abs().max(-1)[0])

    def rows_by_newer_torch(x: Any, r: Any, w: Any, s: Any) -> Any:
        normed, added = norm(x, r, w)
        return by_rows(normed, added, normed.abs().amax(dim=-1))

    def rows_by_vllm(x: Any, r: Any, w: Any, s: Any) -> Any:
        normed, added = norm(x, r, w)
        scales = torch.empty(x.shape[0], 1)
        op = ops._C.dynamic_per_token_scaled_fp8_quant.default
        given = {"result": empty(x), "input": normed, "scale": scales, "scale_ub": None}
        rows, scales = quantized_by_vllm(op, {"result": 1, "scale": 2}, **given)
        return rows, added, scales

    def rows_with_norm(x: Any, r: Any, w: Any, s: Any) -> Any:
        op = ops._C.rms_norm_dynamic_per_token_quant.default
        given = {"result": empty(x), "input": reduced(x), "weight": w, "scale": torch.empty(x.shape[0], 1)}
        place = {"result": 1, "residual": 3, "scale": 2}
        return quantized_by_vllm(op, place, **given, epsilon=EPS, scale_ub=None, residual=r)

    def quantized_and_used(x: Any, r: Any, w: Any, s: Any) -> Any:
        normed, added = norm(x, r, w)
        return normed, added, narrow(normed, s)

    def used_twice(x: Any, r: Any, w: Any, s: Any) -> Any:
        total = reduced(x)
        return *ops.vllm_ir.fused_add_rms_norm(total, r, w, EPS), total

    if static:
        return {each.__name__: each for each in (by_torch, by_vllm, with_norm)}
    if dynamic:
        return {each.__name__: each for each in (rows_by_torch, rows_by_newer_torch, rows_by_vllm, rows_with_norm)}
    return {
        "both": lambda x, r, w, s: norm(x, r, w),
        "normed": lambda x, r, w, s: (norm(x, r, w)[0],),
        "added": lambda x, r, w, s: (norm(x, r, w)[1],),
        "quantized and used": quantized_and_used,
        "used twice": used_twice,
        "part of the row": lambda x, r, w, s: norm(x, r, w, variance_size=8),
        "another group": lambda x, r, w, s: ops.vllm_ir.fused_add_rms_norm(reduced(x, "ep:0"), r, w, EPS),
        "wide weight": lambda x, r, w, s: norm(x, r, w.double()),
        "odd rows": lambda x, r, w, s: norm(x[:, :12].contiguous(), r[:, :12].contiguous(), w[:12].contiguous()),
    }


def of_any_rows(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors without memory, and input and residual with a symbol for the number of rows, as in vLLM's graphs."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    rows = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    return [
        mode.from_tensor(each, symbolic_context=rows) if each.dim() == 2 else mode.from_tensor(each, static_shapes=True)
        for each in given
    ]


@pytest.mark.ranks(2, backend="gloo")
def test_graphs_of_vllm_become_fused_operators(rank: int) -> None:
    vllm_doubles.operators()
    com = communicator([[0, 1]])
    from torch_symm.engines.vllm._fusion import SymmFusionPass, log

    logged = vllm_doubles.lines()
    log.setLevel(logging.DEBUG)
    operators, table = torch.ops.symm_vllm, select_decomp_table()
    for dtype in (torch.bfloat16, torch.float32):
        inputs = [numbers(each, 4, 64, dtype=dtype) for each in range(2)]
        residual, weight = numbers(10, 4, 64, dtype=dtype), numbers(11, 64, dtype=dtype)
        given = inputs[rank], residual, weight, torch.tensor(0.02)
        normed, added = reference(inputs, residual, weight, EPS)
        rows, scales = to_dynamic_fp8(normed)
        kinds = [
            ("all_reduce_add_rms_norm", layers(False, False), [normed, added]),
            ("all_reduce_add_rms_norm_fp8", layers(True, False), [to_fp8(normed, given[3]), added]),
            ("all_reduce_add_rms_norm_dynamic_fp8", layers(False, True), [rows, added, scales]),
        ]
        for name, written, wanted in kinds:
            few = None if dtype == torch.bfloat16 else 1
            for layer, function in list(written.items())[:few]:
                graph = make_fx(function, decomposition_table=table, tracing_mode="symbolic")(*of_any_rows(given))
                before = graph(*given)
                graph.graph.eliminate_dead_code()
                SymmFusionPass()(graph.graph)
                graph.graph.lint()
                graph.recompile()
                found = graph.graph.find_nodes(op="call_function", target=getattr(operators, name).default)
                left = graph.graph.find_nodes(op="call_function", target=torch.ops.vllm.all_reduce.default)
                quantizes = name.endswith("fp8")
                is_fused = quantizes or layer in ("both", "normed", "added", "quantized and used")
                assert (len(found), len(left)) == (is_fused, not is_fused), (layer, graph.code)
                more = ", 1 of them with quantization" * quantizes
                assert logged[-1] == f"symm fuses {is_fused:d} all-reduces of a graph with the norm{more}"
                for node in graph.graph.find_nodes(op="call_function", target=operator.getitem) if is_fused else []:
                    index = node.args[1]
                    if node.args[0] in found and isinstance(index, int):
                        traced, value = node.meta["val"], wanted[index]
                        assert (traced.dtype, traced.shape) == (value.dtype, value.shape)
                kept = given[1].clone()
                after = graph(*given)
                assert torch.equal(given[1], kept)
                if is_fused:
                    others = {"normed": [normed], "added": [added]}
                    others["quantized and used"] = [normed, added, to_fp8(normed, given[3])]
                    assert all(map(same_bits, after, others.get(layer, wanted))), layer
                for one, other in zip(after, before, strict=True):
                    rtol = 0.13 if one.dtype.itemsize == 1 else 0.02
                    assert torch.allclose(one.float(), other.float(), rtol=rtol, atol=1e-5), layer
    assert com.served == []


@pytest.mark.ranks(2, backend="gloo", timeout=200)
def test_compiled_layers_have_no_copies_and_no_other_kernels(rank: int) -> None:
    vllm_doubles.operators()
    communicator([[0, 1]])
    from torch_symm.engines.vllm._fusion import SymmFusionPass

    def model(x: torch.Tensor, residual: torch.Tensor, weights: list[torch.Tensor], scales: list[torch.Tensor]) -> Any:
        reduced = torch.ops.vllm.all_reduce
        for weight, scale in zip(weights, scales, strict=True):
            x, residual = torch.ops.vllm_ir.fused_add_rms_norm(reduced(x @ weight, "tp:0"), residual, scale, EPS)
        return x, residual

    config.post_grad_custom_post_pass, config.force_disable_caches = SymmFusionPass(), True
    x, residual = (numbers(each, 4, 64, dtype=torch.bfloat16) for each in (rank, 9))
    for tensor in (x, residual):
        torch._dynamo.mark_dynamic(tensor, 0)
    weights, scales = (
        [numbers(each, *shape, dtype=torch.bfloat16) for each in range(6)] for shape in ((64, 64), (64,))
    )
    with torch.no_grad():
        _, codes = run_and_get_code(torch.compile(model, fullgraph=True), x, residual, weights, scales)
    (code,) = codes
    calls = re.findall(r"(?:torch\.ops|extern_kernels|cpp_fused|aten)[\w.]*(?=\()", code[code.index("def call(") :])
    assert calls == ["extern_kernels.mm", "torch.ops.symm_vllm.all_reduce_add_rms_norm.default"] * 6, calls


@pytest.mark.ranks(2, backend="gloo")
def test_a_cached_graph_still_runs_if_symm_does_not_serve_the_group(rank: int) -> None:
    vllm_doubles.operators()
    from torch_symm.engines.vllm import _operators

    assert _operators.GROUPS == {}
    operators: Any = torch.ops.symm_vllm
    *inputs, residual = (numbers(each, 4, 64, dtype=torch.bfloat16) for each in (0, 1, 10))
    weight, scale = numbers(11, 64, dtype=torch.bfloat16), torch.tensor(0.02)
    wanted, added = reference(inputs, residual, weight, EPS)
    given = inputs[rank], residual, weight, EPS
    normed, sum_ = operators.all_reduce_add_rms_norm(*given, "tp:0")
    assert torch.equal(sum_, added) and torch.allclose(normed, wanted, rtol=0.02)
    rows, _ = operators.all_reduce_add_rms_norm_fp8(*given, scale, "tp:0")
    assert torch.allclose(rows.float(), to_fp8(wanted, scale).float(), rtol=0.13)
    rows, _, scales = operators.all_reduce_add_rms_norm_dynamic_fp8(*given, "tp:0")
    rows_, scales_ = to_dynamic_fp8(wanted)
    assert torch.allclose(rows.float(), rows_.float(), rtol=0.13) and torch.allclose(scales, scales_, rtol=0.02)

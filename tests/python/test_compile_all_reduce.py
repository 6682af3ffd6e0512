"""torch_symm.compile: an all-reduce makes no copy, whether its input is needed afterwards or not."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch_symm
from norm_reference import numbers, same_bits
from programs import QUIET, needs_compiler
from ranks import run_ranks
from torch_symm.compile._pass import Following, SymmPass, disable, enable

ops: Any = torch.ops
collectives = ops._c10d_functional


def operator(rank: int, world: int) -> None:
    torch_symm.stats()
    name = dist.group.WORLD.group_name
    for dtype in (torch.bfloat16, torch.float32, torch.int32):
        for size in ((3,), (7, 5), (300, 1000), (0, 4)):
            own = (numbers(rank, *size, dtype=torch.float32) * 9).to(dtype)
            for reduction, redop in (
                ("sum", dist.ReduceOp.SUM),
                ("max", dist.ReduceOp.MAX),
                ("avg", dist.ReduceOp.AVG),
            ):
                wanted, before = own.clone(), own.clone()
                dist.all_reduce(wanted, redop)
                assert same_bits(ops.symm.all_reduce(own, reduction, name), wanted), (dtype, size, reduction)
                assert same_bits(own, before)
    columns = numbers(rank, 6, 4, dtype=torch.float32).t()
    total = ops.symm.all_reduce(columns, "sum", name)
    assert total.is_contiguous() and torch.equal(total, ops.symm.all_reduce(columns.contiguous(), "sum", name))
    shape = ops.symm.all_reduce(columns.to("meta"), "sum", name)
    assert (shape.shape, shape.device.type, shape.is_contiguous()) == (columns.shape, "meta", True)
    gloo = dist.new_group(backend="gloo").group_name
    with pytest.raises(ValueError, match='no reduction "mean"'):
        ops.symm.all_reduce(columns, "mean", name)
    with pytest.raises(ValueError, match="has backend gloo for cpu, not symm"):
        ops.symm.all_reduce(columns, "sum", gloo)
    with pytest.raises(NotImplementedError, match="input requires a gradient"):
        ops.symm.all_reduce(columns.contiguous().requires_grad_(), "sum", name)


def test_the_operator_reduces_out_of_place() -> None:
    run_ranks(operator, 2)


def graphs(rank: int, world: int) -> None:
    """Tests of graphs, without a compiler."""
    from torch.fx.experimental.proxy_tensor import make_fx

    torch_symm.stats()
    name, gloo = dist.group.WORLD.group_name, dist.new_group(backend="gloo").group_name

    def reduced(tensor: torch.Tensor, group: str = name) -> Any:
        return collectives.wait_tensor(collectives.all_reduce(tensor, "sum", group))

    def needed(x: torch.Tensor, w: torch.Tensor) -> Any:
        product = x @ w
        return reduced(product) + product

    def given(x: torch.Tensor, w: torch.Tensor) -> Any:
        return reduced(x) @ w

    def a_view_needed(x: torch.Tensor, w: torch.Tensor) -> Any:
        product = x @ w
        return reduced(product.view(-1)), product * 2

    def dying(x: torch.Tensor, w: torch.Tensor) -> Any:
        return reduced(x @ w) + 1

    def others(x: torch.Tensor, w: torch.Tensor) -> Any:
        return reduced(x, gloo)

    def beside(x: torch.Tensor, w: torch.Tensor) -> Any:
        started = collectives.all_reduce(x, "sum", name)
        product = x @ w
        return collectives.wait_tensor(started) + product

    def written(x: torch.Tensor, w: torch.Tensor) -> Any:
        total = reduced(x)
        return total @ w, x.copy_(total)

    def columns(x: torch.Tensor, w: torch.Tensor) -> Any:
        return reduced(x.t()), x

    replaced = {needed: 1, given: 1, a_view_needed: 1, dying: 0, others: 0, beside: 0, written: 0, columns: 0}
    for layer, count in replaced.items():
        tensors = numbers(rank, 4, 4, dtype=torch.float32), numbers(9, 4, 4, dtype=torch.float32)
        graph = make_fx(layer, tracing_mode="fake")(*tensors)
        wanted = graph(*(tensor.clone() for tensor in tensors))
        SymmPass()(graph.graph)
        graph.graph.lint()
        graph.recompile()
        found = graph.graph.find_nodes(op="call_function", target=ops.symm.all_reduce.default)
        left = graph.graph.find_nodes(op="call_function", target=collectives.all_reduce.default)
        assert (len(found), len(left)) == (count, 1 - count), (layer, graph.code)
        got = graph(*tensors)
        for one, other in zip(*((each if isinstance(each, tuple) else (each,)) for each in (got, wanted)), strict=True):
            assert same_bits(one, other), layer


def test_only_what_inductor_would_copy_is_replaced() -> None:
    run_ranks(graphs, 2)


def copies(code: str) -> int:
    """Number of copies that precede reductions in place."""
    found = 0
    for reduced in re.finditer(r"all_reduce_\.default\((?:reinterpret_tensor\()?(\w+)", code):
        before = code[: reduced.start()]
        found += re.search(rf"cpp_fused\w*\([^)]*\b{reduced[1]}\b", before) is not None
    return found


def compiled(rank: int, world: int) -> None:
    from torch._inductor.utils import run_and_get_code

    name = dist.group.WORLD.group_name

    def dying(x: torch.Tensor, w: torch.Tensor) -> Any:
        functional = funcol.all_reduce(torch.nn.functional.linear(x, w), "sum", name)
        in_place = torch.nn.functional.linear(functional, w)
        dist.all_reduce(in_place)
        return functional + 1, in_place + 1

    def needed(x: torch.Tensor, w: torch.Tensor) -> Any:
        product = torch.nn.functional.linear(funcol.all_reduce(x, "sum", name), w)
        return funcol.all_reduce(product, "sum", name) + product, x * 2  # The copy of x may share a kernel with this

    tensors = numbers(rank, 2, 3, 64, dtype=torch.float32), numbers(9, 64, 64, dtype=torch.float32)
    layers: list[tuple[Callable[..., Any], int, int]] = [(dying, 0, 0), (needed, 2, 0)]
    for layer, without, with_pass in layers:
        with torch.no_grad():
            wanted = [tensor.clone() for tensor in layer(*tensors)]
            for switch, count in ((disable, without), (enable, with_pass)):
                switch()
                torch._dynamo.reset()
                got, (code, *_) = run_and_get_code(torch.compile(layer, fullgraph=True), *tensors)
                assert copies(code) == count, code
                for one, other in zip(got, wanted, strict=True):
                    assert torch.allclose(one, other, rtol=1e-4, atol=1e-4)


@needs_compiler
@pytest.mark.slow
def test_compiled_code_copies_nothing() -> None:
    run_ranks(compiled, 2, timeout=220, env=QUIET)


def test_torch_that_takes_one_pass_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    config = torch._inductor.config
    ran: list[str] = []
    monkeypatch.setattr("torch_symm.compile._pass._takes_several", lambda: False)
    own: Callable[[Any], None] = lambda graph: ran.append("own")  # noqa: E731 - as users write it
    with config.patch(post_grad_custom_pre_pass=own):
        enable()
        enable()
        both: Any = config.post_grad_custom_pre_pass
        assert isinstance(both, Following) and both.uuid() is None
        both(torch.fx.Graph())
        assert ran == ["own"]
        disable()
        assert config.post_grad_custom_pre_pass is own

"""torch_symm.compile: all-reduce, addition, RMSNorm and quantization become one operator in Inductor's graphs.

An all-reduce makes no copy, whether its input is needed afterwards or not.
"""

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
from norm_reference import numbers, reference, same_bits
from programs import needs_compiler
from torch_symm.compile import disable, enable
from torch_symm.compile._pass import Following, SymmPass

EPS, FP8, LEAST = 1e-5, torch.float8_e4m3fn, 1 / (448 * 512)
PLAIN, STATIC, DYNAMIC = "all_reduce_add_rms_norm", "all_reduce_add_rms_norm_fp8", "all_reduce_add_rms_norm_dynamic_fp8"

ops: Any = torch.ops
collectives = ops._c10d_functional


def torchs(added: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(added, weight.shape, weight, EPS)


def by_hand(added: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A norm as in Llama."""
    wide = added.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * wide.to(added.dtype)


def not_rounded(added: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The pattern that Inductor of torch 2.11 leaves for rows that are rounded and widened again."""
    wide = added.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * weight


#: (normed rows, scale) -> results.
Quantize = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]


def limited(rows: torch.Tensor) -> torch.Tensor:
    return rows.clamp(-448, 448).to(FP8)


def by_row(normed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    scales = (normed.float().abs().amax(-1, keepdim=True) / 448.0).clamp(min=LEAST)
    return limited(normed.float() / scales), scales


def by_row_unlimited(normed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    scales = (normed.abs().amax(1, True).float() / 448.0).clamp(min=LEAST)
    return (normed / scales).to(FP8), scales * 2


def by_row_as_vllm(normed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    largest, _ = normed.abs().max(dim=-1)
    scales = (largest.unsqueeze(-1).to(torch.float32) / 448.0).clamp(min=LEAST)
    return limited(normed.to(torch.float32) * scales.reciprocal()), scales


def largest_kept(normed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    largest = normed.float().abs().amax(-1, keepdim=True)
    return (normed.float() / (largest / 448.0).clamp(min=LEAST)).to(FP8), largest


#: Each quantization, and the operator's form that computes it; ``PLAIN`` if no form does.
FORMS: dict[str, tuple[Quantize, str]] = {
    "divided": (lambda n, s: (limited(n.float() / s),), STATIC),
    "promoted": (lambda n, s: ((n / s).clamp(max=448.0).clamp(min=-448.0).to(FP8),), STATIC),
    "multiplied": (lambda n, s: (limited(s.reciprocal() * n.to(torch.float32)),), STATIC),
    "by row": (by_row, DYNAMIC),
    "by row, unlimited": (by_row_unlimited, DYNAMIC),
    "by row as vLLM": (by_row_as_vllm, DYNAMIC),
    "unlimited": (lambda n, s: ((n.float() / s).to(FP8),), PLAIN),
    "otherwise limited": (lambda n, s: ((n.float() / s).clamp(-240, 448).to(FP8),), PLAIN),
    "of another type": (lambda n, s: ((n.float() / s).clamp(-448, 448).to(torch.float8_e5m2),), PLAIN),
    "by column": (lambda n, s: (limited(n.float() / s.expand(64)),), PLAIN),
    "by float64": (lambda n, s: (limited(n.float() / s.double()),), PLAIN),
    "of itself": (lambda n, s: (limited(n.float() / n.float()[:1, :1]),), PLAIN),
    "rows kept": (lambda n, s: (limited(n.float() / s), n * 2), PLAIN),
    "with zeros": (lambda n, s: (limited(n.float() / (n.float().abs().amax(-1, keepdim=True) / 448.0)),), PLAIN),
    "by rows of all": (
        lambda n, s: (limited(n.float() / (n.float().abs().amax(0, keepdim=True) / 448.0).clamp(min=LEAST)),),
        PLAIN,
    ),
    "largest kept": (largest_kept, PLAIN),
}
SERVED = [name for name, (_, form) in FORMS.items() if form != PLAIN]


def layer_of(
    quantize: Quantize, group: str, norm: Callable[..., torch.Tensor] = by_hand
) -> Callable[..., tuple[torch.Tensor, ...]]:
    def layer(own: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> Any:
        added = residual + collectives.wait_tensor(collectives.all_reduce(own, "sum", group))
        return *quantize(norm(added, weight), scale), added

    return layer


def given(rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    own, residual = (numbers(seed, 4, 64, dtype=dtype) for seed in (rank, 10))
    own[2], residual[2] = 0, 0  # A row of zeros has the least scale
    return own, residual, numbers(11, 64, dtype=dtype), torch.tensor([0.013])


def wanted(kind: str, tensors: tuple[torch.Tensor, ...], group: str) -> tuple[torch.Tensor, ...]:
    """The expected results, from eager calls of the operators."""
    own, residual, weight, scale = tensors
    ops = torch.ops.symm
    quantize, form = FORMS[kind]
    if form == STATIC:
        rows, added = ops.all_reduce_add_rms_norm_fp8(own, residual, weight, EPS, scale, group)
        return rows, added
    if form == DYNAMIC:
        rows, added, scales = ops.all_reduce_add_rms_norm_dynamic_fp8(own, residual, weight, EPS, group)
        return rows, scales * 2 if quantize is by_row_unlimited else scales, added
    normed, added = ops.all_reduce_add_rms_norm(own, residual, weight, EPS, group)
    return *quantize(normed, scale), added


def operators(graph: torch.fx.Graph) -> list[str]:
    """The forms of the operator in the graph."""
    found = [node.target.__name__ for node in graph.nodes if str(node.target).startswith("symm.")]
    return [name.removesuffix(".default") for name in found]


class Seen(SymmPass):
    """Notes the operators of each graph after the pass, and the number of its all-reduces."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[str], int]] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        super().__call__(graph)
        reduces = graph.find_nodes(op="call_function", target=collectives.all_reduce.default)
        self.seen.append((operators(graph), len(reduces)))

    def uuid(self) -> Any:
        return None


def changed(layer: Callable[..., Any], *tensors: torch.Tensor, table: Any = None) -> torch.fx.GraphModule:
    """The layer's graph after the pass, without a compiler. ``table``: the decompositions."""
    from torch.fx.experimental.proxy_tensor import make_fx

    torch_symm.stats()
    made = make_fx(layer, decomposition_table=table, tracing_mode="fake")(*tensors)
    made.graph.eliminate_dead_code()  # As Inductor does
    SymmPass()(made.graph)
    made.graph.lint()
    made.recompile()
    return made


@pytest.mark.ranks(2)
def test_graphs_get_the_form_that_gives_the_same(rank: int) -> None:
    from torch._inductor.decomposition import select_decomp_table

    name, table = dist.group.WORLD.group_name, select_decomp_table()
    half, single = torch.bfloat16, torch.float32
    for dtype, norm, kinds in ((half, by_hand, FORMS), (single, by_hand, SERVED), (half, not_rounded, SERVED)):
        tensors = given(rank, dtype)
        for kind in kinds:
            quantize, form = FORMS[kind]
            graph = changed(layer_of(quantize, name, norm), *tensors, table=table)
            assert operators(graph.graph) == [form], (kind, dtype, norm, graph.code)
            for got, right in zip(graph(*tensors), wanted(kind, tensors, name), strict=True):
                assert same_bits(got, right), (kind, dtype, norm)


@pytest.mark.ranks(2)
def test_what_computes_something_else_is_left_alone(rank: int) -> None:
    """Graphs that compute something other than the operator; each differs in one argument of one node."""
    name = dist.group.WORLD.group_name

    def summed(x: torch.Tensor, operation: str = "sum") -> torch.Tensor:
        result: torch.Tensor = collectives.wait_tensor(collectives.all_reduce(x, operation, name))
        return result

    def mean(a: torch.Tensor) -> torch.Tensor:
        return a.pow(2).mean(-1, keepdim=True)

    def normed(a: torch.Tensor, under_root: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (a * torch.rsqrt(under_root) * w).to(a.dtype), a

    def of(under_root: Any, add: Any = lambda x, r: summed(x) + r) -> Any:
        def layer(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            a = add(x, r)
            return normed(a, under_root(a), w)

        return layer

    wide = torch.float64
    cases: dict[str, tuple[Any, int]] = {
        "the pattern": (of(lambda a: mean(a) + EPS), 1),
        "alpha of eps": (of(lambda a: torch.add(mean(a), 0.5, alpha=4)), 0),
        "alpha of eps, by position": (of(lambda a: torch.ops.aten.add.Scalar(mean(a), 0.5, 4)), 0),
        "dtype of the mean": (of(lambda a: a.pow(2).mean(-1, keepdim=True, dtype=wide) + 1e-50), 0),
        "another dimension": (of(lambda a: a.pow(2).mean(0, keepdim=True) + EPS), 0),
        "all dimensions": (of(lambda a: a.pow(2).mean((0, 1), keepdim=True) + EPS), 0),
        "no dimension kept": (of(lambda a: a.pow(2).mean(-1) + EPS), 0),
        "another power": (of(lambda a: a.pow(4).mean(-1, keepdim=True) + EPS), 0),
        "alpha of the residual": (of(lambda a: mean(a) + EPS, lambda x, r: torch.add(summed(x), r, alpha=2)), 0),
        "another reduction": (of(lambda a: mean(a) + EPS, lambda x, r: summed(x, "max") + r), 0),
    }
    single = torch.float32
    given = (numbers(rank, 64, 64, dtype=single), numbers(10, 64, 64, dtype=single), numbers(11, 64, dtype=single))
    odd = given[0][:, :12].contiguous(), given[1][:, :12].contiguous(), given[2][:12]
    for case, (layer, count, tensors) in {
        **{case: (*row, given) for case, row in cases.items()},
        "rows that the operator does not serve": (cases["the pattern"][0], 0, odd),
    }.items():
        graph = changed(layer, *tensors)
        assert operators(graph.graph).count(PLAIN) == count, (case, graph.code)
        for one, other in zip(graph(*tensors), layer(*tensors), strict=True):
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-5), case


@needs_compiler
@pytest.mark.slow
@pytest.mark.usefixtures("inductor")
@pytest.mark.ranks(2, timeout=220)
def test_compiled_layers_have_the_operators_bits(rank: int, world_size: int) -> None:
    torch_symm.stats()
    name, gloo = dist.group.WORLD.group_name, dist.new_group(backend="gloo").group_name
    seen = Seen()

    def compiled(layer: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        torch._dynamo.reset()
        with torch.no_grad(), torch._inductor.config.patch(post_grad_custom_pre_pass=seen):
            return torch.compile(layer, fullgraph=True)(*tensors)

    for kind in ("divided", "by row as vLLM"):
        quantize, form = FORMS[kind]
        tensors = given(rank, torch.bfloat16)
        results = compiled(layer_of(quantize, name), *tensors)
        assert seen.seen.pop() == ([form], 0), kind
        for got, right in zip(results, wanted(kind, tensors, name), strict=True):
            assert same_bits(got, right), kind
    for dtype in (torch.bfloat16, torch.float32):
        own, residual, weight, scale = given(rank, dtype)
        normed, added = reference([given(r, dtype)[0] for r in range(world_size)], residual, weight, EPS)
        for norm in (torchs, by_hand):
            got, total = compiled(layer_of(lambda normed, scale: (normed,), name, norm), own, residual, weight, scale)
            assert seen.seen.pop() == ([PLAIN], 0), (norm, dtype)
            assert torch.equal(total, added)
            assert torch.allclose(got, normed, rtol=0.02 if dtype == torch.bfloat16 else 1e-5)
    compiled(layer_of(lambda normed, scale: (normed,), gloo), own, residual, weight, scale)
    assert seen.seen.pop() == ([], 1)


@pytest.mark.ranks(2)
def test_cached_code_is_for_groups_of_the_same_backends() -> None:
    keys = [SymmPass().uuid()]
    for backend in ("gloo", "symm", "gloo"):
        group = dist.new_group(backend=backend)
        keys.append(SymmPass().uuid())
        name = group.group_name
        dist.destroy_process_group(group)
        assert SymmPass().uuid() == keys[0], name
    assert len(set(keys)) == 4


def test_it_is_enabled_beside_passes_of_the_user_and_disabled_alone() -> None:
    config = torch._inductor.config
    assert config.post_grad_custom_pre_pass is None
    enable()
    enable()
    assert isinstance(config.post_grad_custom_pre_pass, SymmPass)
    disable()
    disable()
    assert config.post_grad_custom_pre_pass is None
    own = Seen()
    with config.patch(post_grad_custom_pre_pass=own):
        enable()
        assert next(iter(config.post_grad_custom_pre_pass)) is own and len(config.post_grad_custom_pre_pass) == 2
        disable()
        assert config.post_grad_custom_pre_pass is own


@pytest.mark.ranks(2)
def test_the_operator_reduces_out_of_place(rank: int) -> None:
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
    with pytest.raises(ValueError, match=r'all_reduce: reduce_op="mean" is not one of "sum", .*, "bxor"$'):
        ops.symm.all_reduce(columns, "mean", name)
    with pytest.raises(ValueError, match="has backend gloo for cpu, not symm"):
        ops.symm.all_reduce(columns, "sum", gloo)
    with pytest.raises(NotImplementedError, match="input requires a gradient"):
        ops.symm.all_reduce(columns.contiguous().requires_grad_(), "sum", name)


@pytest.mark.ranks(2)
def test_only_what_inductor_would_copy_is_replaced(rank: int) -> None:
    """Tests of graphs, without a compiler."""
    torch_symm.stats()
    name, gloo = dist.group.WORLD.group_name, dist.new_group(backend="gloo").group_name

    def reduced(tensor: torch.Tensor, group: str = name) -> Any:
        return collectives.wait_tensor(collectives.all_reduce(tensor, "sum", group))

    def needed(x: torch.Tensor, w: torch.Tensor) -> Any:
        product = x @ w
        return reduced(product) + product

    def a_view_needed(x: torch.Tensor, w: torch.Tensor) -> Any:
        product = x @ w
        return reduced(product.view(-1)), product * 2

    def beside(x: torch.Tensor, w: torch.Tensor) -> Any:
        started = collectives.all_reduce(x, "sum", name)
        product = x @ w
        return collectives.wait_tensor(started) + product

    def written(x: torch.Tensor, w: torch.Tensor) -> Any:
        total = reduced(x)
        return total @ w, x.copy_(total)

    cases: dict[str, tuple[Callable[..., Any], int]] = {
        "needed": (needed, 1),
        "given": (lambda x, w: reduced(x) @ w, 1),
        "a view needed": (a_view_needed, 1),
        "dying": (lambda x, w: reduced(x @ w) + 1, 0),
        "of another backend": (lambda x, w: reduced(x, gloo), 0),
        "beside a product": (beside, 0),
        "written": (written, 0),
        "columns": (lambda x, w: (reduced(x.t()), x), 0),
    }
    for case, (layer, count) in cases.items():
        tensors = numbers(rank, 4, 4, dtype=torch.float32), numbers(9, 4, 4, dtype=torch.float32)
        wanted = layer(*(tensor.clone() for tensor in tensors))
        graph = changed(layer, *tensors)
        found = graph.graph.find_nodes(op="call_function", target=ops.symm.all_reduce.default)
        left = graph.graph.find_nodes(op="call_function", target=collectives.all_reduce.default)
        assert (len(found), len(left)) == (count, 1 - count), (case, graph.code)
        got = graph(*tensors)
        for one, other in zip(*((each if isinstance(each, tuple) else (each,)) for each in (got, wanted)), strict=True):
            assert same_bits(one, other), case


def copies(code: str) -> int:
    """Number of copies that precede reductions in place."""
    found = 0
    for reduced in re.finditer(r"all_reduce_\.default\((?:reinterpret_tensor\()?(\w+)", code):
        before = code[: reduced.start()]
        found += re.search(rf"cpp_fused\w*\([^)]*\b{reduced[1]}\b", before) is not None
    return found


@needs_compiler
@pytest.mark.slow
@pytest.mark.usefixtures("inductor")
@pytest.mark.ranks(2, timeout=220)
def test_compiled_code_copies_nothing(rank: int) -> None:
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

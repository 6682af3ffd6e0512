"""torch_symm.compile: all-reduce, addition and RMSNorm become one operator in Inductor's graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch_symm
from norm_reference import numbers, reference
from programs import QUIET, needs_compiler
from ranks import run_ranks
from torch_symm.compile import disable, enable
from torch_symm.compile._pass import SymmPass

EPS = 1e-5


def torchs(added: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(added, weight.shape, weight, EPS)


def by_hand(added: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """An all-reduce and a norm as in Llama."""
    wide = added.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * wide.to(added.dtype)


class Counted(SymmPass):
    """Counts the nodes of each graph after the pass."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        super().__call__(graph)
        ops = torch.ops
        targets = (ops.symm.all_reduce_add_rms_norm.default, ops._c10d_functional.all_reduce.default)
        of_each = [len(graph.find_nodes(op="call_function", target=target)) for target in targets]
        self.seen.append((of_each[0], of_each[1]))

    def uuid(self) -> Any:
        return None


def patterns(rank: int, world: int) -> None:
    torch_symm.stats()
    name = dist.group.WORLD.group_name
    gloo = dist.new_group(backend="gloo").group_name
    counted = Counted()
    for dtype in (torch.bfloat16, torch.float32):
        own, residual = numbers(rank, 4, 64, dtype=dtype), numbers(10, 4, 64, dtype=dtype)
        weight = numbers(11, 64, dtype=dtype)
        wanted, added = reference([numbers(r, 4, 64, dtype=dtype) for r in range(world)], residual, weight, EPS)
        for norm in (torchs, by_hand):

            def layer(
                own: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, norm: Any = norm, group: str = name
            ) -> tuple[torch.Tensor, torch.Tensor]:
                summed = funcol.all_reduce(own, "sum", group)
                added = residual + summed
                return norm(added, weight), added * 2

            with torch.no_grad(), torch._inductor.config.patch(post_grad_custom_pre_pass=counted):
                normed, doubled = torch.compile(layer, fullgraph=True)(own, residual, weight)
                assert counted.seen.pop() == (1, 0), (norm, dtype)
                assert torch.equal(doubled, added * 2)
                assert torch.allclose(normed, wanted, rtol=0.02 if dtype == torch.bfloat16 else 1e-5)
                torch._dynamo.reset()
    with torch.no_grad(), torch._inductor.config.patch(post_grad_custom_pre_pass=counted):
        layer_of_gloo = torch.compile(lambda *given: layer(*given, group=gloo), fullgraph=True)
        layer_of_gloo(own, residual, weight)
        assert counted.seen.pop() == (0, 1)


@needs_compiler
@pytest.mark.slow
def test_both_spellings_become_one_operator() -> None:
    run_ranks(patterns, 2, timeout=220, env=QUIET)


def traced(rank: int, world: int) -> None:
    """Tests of the graph, without a compiler."""
    from torch.fx.experimental.proxy_tensor import make_fx

    torch_symm.stats()
    name = dist.group.WORLD.group_name

    def layer(own: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        added = (
            torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(own, "sum", name)) + residual
        )
        return by_hand(added, weight), added

    given = (
        numbers(rank, 4, 64, dtype=torch.bfloat16),
        numbers(10, 4, 64, dtype=torch.bfloat16),
        torch.ones(64).bfloat16(),
    )
    for odd in (False, True):
        if odd:
            # Rows that the operator does not support.
            given = given[0][:, :12].contiguous(), given[1][:, :12].contiguous(), given[2][:12]
        graph = make_fx(layer, tracing_mode="fake")(*given)
        before = graph(*given)
        SymmPass()(graph.graph)
        graph.recompile()
        calls = graph.graph.find_nodes(op="call_function", target=torch.ops.symm.all_reduce_add_rms_norm.default)
        assert len(calls) == (0 if odd else 1), graph.code
        after = graph(*given)
        assert torch.equal(after[1], before[1]) and torch.allclose(after[0], before[0], rtol=0.02)


def test_a_graph_is_changed_where_rows_are_served() -> None:
    run_ranks(traced, 2)


def near_misses(rank: int, world: int) -> None:
    """Graphs that compute something other than the operator; each differs in one argument of one node."""
    from torch.fx.experimental.proxy_tensor import make_fx

    torch_symm.stats()
    name = dist.group.WORLD.group_name
    collectives = torch.ops._c10d_functional

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
    operator = torch.ops.symm.all_reduce_add_rms_norm.default
    single = torch.float32
    given = (numbers(rank, 64, 64, dtype=single), numbers(10, 64, 64, dtype=single), numbers(11, 64, dtype=single))
    for case, (layer, wanted) in cases.items():
        graph = make_fx(layer, tracing_mode="fake")(*given)
        SymmPass()(graph.graph)
        graph.recompile()
        assert len(graph.graph.find_nodes(op="call_function", target=operator)) == wanted, (case, graph.code)
        for one, other in zip(graph(*given), layer(*given), strict=True):
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-5), case


def test_what_computes_something_else_is_left_alone() -> None:
    run_ranks(near_misses, 2)


def test_it_is_enabled_beside_passes_of_the_user_and_disabled_alone() -> None:
    config = torch._inductor.config
    assert config.post_grad_custom_pre_pass is None
    enable()
    enable()
    assert isinstance(config.post_grad_custom_pre_pass, SymmPass)
    disable()
    disable()
    assert config.post_grad_custom_pre_pass is None
    own = Counted()
    with config.patch(post_grad_custom_pre_pass=own):
        enable()
        assert next(iter(config.post_grad_custom_pre_pass)) is own and len(config.post_grad_custom_pre_pass) == 2
        disable()
        assert config.post_grad_custom_pre_pass is own

"""Operators that communicate, in compiled code: every rank keeps the program's calls and their order."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
import torch_symm
from programs import needs_compiler
from torch.utils.checkpoint import checkpoint
from torch_symm import _inductor
from torch_symm._native import OPERATORS

ops: Any = torch.ops


def summed(tensor: torch.Tensor, name: str) -> torch.Tensor:
    total: torch.Tensor = ops.symm.all_reduce(tensor, "sum", name)
    return total


def check_compiled(step: Callable[..., Any], *given: torch.Tensor) -> None:
    """Compares the results of compiled code, which no earlier run has left in a cache, with eager ones."""
    torch._dynamo.reset()
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        results = torch.compile(step, dynamic=False, fullgraph=True)(*given)
    for got, wanted in zip(results, step(*given), strict=True):
        assert torch.equal(got, wanted)


@needs_compiler
@pytest.mark.slow
@pytest.mark.usefixtures("inductor")
@pytest.mark.ranks(2, timeout=300)
def test_ranks_keep_the_order_of_the_program(rank: int) -> None:
    """Also if their tensors have other sizes, and if they use the results in another order."""
    torch_symm.stats()  # Registers the operators
    name = dist.group.WORLD.group_name

    def sizes(
        shared: torch.Tensor, small: torch.Tensor, large: torch.Tensor, eye: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        product = shared @ eye
        one = product[0].clone()
        mine = (small * one) @ eye
        mine = (mine * mine).sum(0)
        total = summed(mine, name)
        other = (large * one) @ eye
        other = (other * other * 3).sum(0) + (product @ eye).sum(0) * 0
        return total, mine, summed(other, name), other

    rows = (512, 8192) if rank == 0 else (8192, 512)
    small, large = (torch.ones(count, 64) / 64 for count in rows)
    check_compiled(sizes, torch.ones(4096, 64), small, large, torch.eye(64))

    def uses(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        one, other = summed(x, name), summed(y, name)
        return (other * 2, one * 3) if rank == 0 else (one * 3, other * 2)

    check_compiled(uses, torch.full((64,), 1.0), torch.full((64,), 10.0))


def test_graphs_keep_calls_whose_results_are_not_used() -> None:
    torch_symm.stats()  # Registers the operators
    for name in OPERATORS:
        packet = getattr(ops.symm, name)
        for target in (packet, packet.default):
            graph = torch.fx.Graph()
            graph.call_function(target, (graph.placeholder("tensor"),))
            graph.output(None)
            graph.eliminate_dead_code()
            assert len(graph.find_nodes(op="call_function", target=target)) == 1, target


@pytest.mark.ranks(2, timeout=200)
def test_a_rank_that_does_not_use_the_results_takes_part(rank: int) -> None:
    torch_symm.stats()  # Registers the operators
    name = dist.group.WORLD.group_name

    def step(rows: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        normed, _ = ops.symm.all_reduce_add_rms_norm(rows, rows, weight, 1e-5, name)
        return (normed,) if rank == 0 else (rows * 2,)

    with torch.no_grad():
        torch.compile(step, backend="aot_eager", fullgraph=True)(torch.ones(4, 64), torch.ones(64))
    total = torch.full((64,), float(rank))
    dist.all_reduce(total)
    assert torch.equal(total, torch.ones(64))


@pytest.mark.ranks(2, timeout=200)
def test_a_backward_pass_does_not_repeat_the_calls_of_the_forward_pass(rank: int) -> None:
    """Both partitioners of AOTAutograd; a call is recomputed only if its region is checkpointed."""
    torch_symm.stats()  # Registers the operators
    name = dist.group.WORLD.group_name

    def saved(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x * w).sum() + summed(x, name).sum()

    def region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.sin(summed(x, name) * w) * w

    def recomputed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(region, x, w, use_reentrant=False)
        return result.sum()

    class Gathered(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(w)
            return summed(w, name) * w

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (w,) = ctx.saved_tensors
            # Another reduction, because AOTAutograd before torch 2.15 merges equal calls.
            largest: torch.Tensor = ops.symm.all_reduce(w, "max", name)
            return summed(grad.contiguous(), name) * largest

    def with_calls_of_its_own(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Gathered.apply(w.cos())
        return (result.sin() * x).sum()

    for backend, step, calls in (
        ("aot_eager_default_partitioner", saved, 1),
        ("aot_eager", saved, 1),
        ("aot_eager_default_partitioner", with_calls_of_its_own, 3),
        ("aot_eager", with_calls_of_its_own, 3),
        ("aot_eager", recomputed, 2),
    ):
        gradients = []
        for run in (step, torch.compile(step, backend=backend, fullgraph=True)):
            weight = torch.full((4, 64), 0.5, requires_grad=True)
            before = len(torch_symm.trace()["calls"])
            run(torch.full((4, 64), rank + 1.0), weight).backward()
            gradients.append(weight.grad)
            assert len(torch_symm.trace()["calls"]) - before == calls or run is step, (backend, step.__name__)
        assert torch.equal(*gradients)


def test_inductor_orders_every_operator_that_communicates() -> None:
    from torch._inductor import lowering
    from torch_symm import symm_mem

    symm_mem.enable_fused_ops()
    symm_mem.disable_fused_ops()
    defined = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("symm::")}
    known = {operator.name() for operator in _inductor._collectives}
    assert defined and known - defined == {name.replace("symm::", "symm_mem::") for name in defined if "fused" in name}
    assert not defined - known
    assert all(operator in lowering.lowerings for operator in _inductor._collectives)


def test_the_operators_are_registered_without_importing_inductor() -> None:
    program = """
import sys, torch_symm
torch_symm.stats()
assert "torch._inductor" not in sys.modules
from torch._inductor import lowering
from torch_symm import _inductor
from torch_symm._native import OPERATORS
assert _inductor._collectives.keys() <= lowering.lowerings.keys()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)

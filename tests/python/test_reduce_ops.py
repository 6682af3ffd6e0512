"""Every reduce op on every dtype has the documented result, or is rejected with the nearest form named."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from cases import Case
from collectives import refusals, run
from expected import DTYPES, OPS, served
from ranks import backend_of


@pytest.mark.ranks([1, 2, 4], timeout=200)
def test_served(rank: int, world_size: int) -> None:
    forms = (("all_reduce", False), ("all_reduce", True), ("reduce", False), ("reduce_scatter_tensor", False))
    run(
        (form, Case(rank, world_size, dtype, count, asynchronous=asynchronous, op=op, root=world_size - 1))
        for op in OPS
        for dtype in DTYPES
        if served(op, dtype)
        for count in (1, 5, 1_003, 40_007)
        for form, asynchronous in forms
    )


# proves P22
@pytest.mark.ranks(2)
def test_refused(world_size: int) -> None:
    assert refusals(world_size) > 30


@pytest.mark.ranks(2)
def test_a_factor_may_be_a_tensor() -> None:
    tensor = torch.ones(10)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(torch.tensor([0.25])))
    assert (tensor == 0.5).all()
    tensors = [torch.ones(3), torch.ones(50_000)]
    dist.all_reduce_coalesced(tensors, dist._make_nccl_premul_sum(2.0))
    assert all((tensor == 4.0).all() for tensor in tensors)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", ("float8_e8m0fnu", "float4_e2m1fn_x2", "bits16", "uint3"))
def test_types_without_kernels_are_copied(rank: int, dtype: str) -> None:
    def numbered(start: int) -> torch.Tensor:
        return torch.arange(start, start + 8, dtype=torch.uint8).view(getattr(torch, dtype))

    def held(*tensors: torch.Tensor) -> list[int]:
        return [byte for tensor in tensors for byte in tensor.view(torch.uint8).tolist()]

    mine = numbered(10 * rank)
    dist.broadcast(sent := numbered(10 * rank), 1)
    assert held(sent) == held(numbered(10))
    dist.all_gather(parts := [numbered(0), numbered(0)], mine)
    assert held(*parts) == held(numbered(0), numbered(10))
    dist.all_to_all_single(moved := numbered(0), mine)
    half = len(held(mine)) // 2
    assert held(moved) == [*range(half * rank, half * (rank + 1)), *range(10 + half * rank, 10 + half * (rank + 1))]
    with pytest.raises(TypeError, match="not served"):
        backend_of().allreduce([mine], dist.AllreduceOptions())


@pytest.mark.ranks(2)
def test_small_complex_numbers_are_summed_by_parts(rank: int, world_size: int) -> None:
    parts = torch.arange(20.0).view(10, 2).half()
    numbers = torch.view_as_complex(parts * (rank + 1))
    dist.reduce(total := numbers.clone(), 0)
    assert rank or torch.equal(torch.view_as_real(total), parts * 3)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.AVG
    backend_of().allreduce([mean := numbers.clone()], options).wait()
    assert torch.equal(torch.view_as_real(mean) * world_size, parts * 3)

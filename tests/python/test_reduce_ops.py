"""Every reduce op on every dtype: served with the documented meaning, or refused with the nearest form named."""

from __future__ import annotations

import expected
import pytest
import torch
import torch.distributed as dist
from expected import COMPLEX, OPS, assert_same_bits, name, op_of, reduced, seeded, served

FACTORS = (0.5, 1 / 3, -7.0, 1e-3)


@pytest.mark.ranks([1, 2, 4])
@pytest.mark.parametrize("op", OPS)
def test_served(rank: int, world_size: int, op: str) -> None:
    factors = FACTORS[:world_size]
    for dtype in filter(lambda dtype: served(op, dtype), expected.DTYPES):
        for count in (1, 5, 1_003, 40_007):
            inputs = [seeded(dtype, (count,), 31 * r + count) for r in range(world_size)]
            wanted = reduced(op, inputs, factors)
            about = f"{op} {name(dtype)} {count} of {world_size}"
            for asynchronous in (False, True):
                tensor = inputs[rank].clone()
                work = dist.all_reduce(tensor, op_of(op, FACTORS[rank]), async_op=asynchronous)
                if work is not None:
                    work.wait()
                assert_same_bits(tensor, wanted, f"all_reduce {about}")
            tensor = inputs[rank].clone()
            dist.reduce(tensor, world_size - 1, op_of(op, FACTORS[rank]))
            if rank == world_size - 1:
                assert_same_bits(tensor, wanted, f"reduce {about}")
            if dtype in COMPLEX:
                continue
            output = torch.empty_like(tensor)
            dist.reduce_scatter_tensor(output, inputs[rank].repeat(world_size), op_of(op, FACTORS[rank]))
            assert_same_bits(output, wanted, f"reduce_scatter_tensor {about}")


@pytest.mark.ranks(2)
def test_refused(world_size: int) -> None:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    for dtype in expected.DTYPES:
        for op in OPS:
            if served(op, dtype):
                continue
            tensor = seeded(dtype, (6,), 1)
            before = tensor.clone()
            # On the backend itself: torch refuses some of these before.
            options = dist.AllreduceOptions()
            options.reduceOp = op_of(op, 2.0)
            with pytest.raises(NotImplementedError) as refusal:
                backend.allreduce([tensor], options)
            text = str(refusal.value)
            assert op in text and name(dtype) in text and "use SUM" in text, text
            scatter = dist.ReduceScatterOptions()
            scatter.reduceOp = op_of(op, 2.0)
            with pytest.raises(NotImplementedError, match=op):
                backend._reduce_scatter_base(tensor[:3].clone(), tensor, scatter)
            assert_same_bits(tensor, before, "a refused tensor is as it was")
    one = torch.ones(3)
    dist.all_reduce(one)
    assert (one == world_size).all(), "nothing was exchanged before"


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
        dist.group.WORLD._get_backend(torch.device("cpu")).allreduce([mine], dist.AllreduceOptions())


@pytest.mark.ranks(2)
def test_small_complex_numbers_are_summed_by_parts(rank: int, world_size: int) -> None:
    parts = torch.arange(20.0).view(10, 2).half()
    numbers = torch.view_as_complex(parts * (rank + 1))
    dist.reduce(total := numbers.clone(), 0)
    assert rank or torch.equal(torch.view_as_real(total), parts * 3)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.AVG
    dist.group.WORLD._get_backend(torch.device("cpu")).allreduce([mean := numbers.clone()], options).wait()
    assert torch.equal(torch.view_as_real(mean) * world_size, parts * 3)

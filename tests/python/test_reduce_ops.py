"""Every reduce op on every dtype: served with the documented meaning, or refused with the nearest form named."""

from __future__ import annotations

import expected
import pytest
import torch
import torch.distributed as dist
from expected import COMPLEX, OPS, assert_same_bits, name, op_of, reduced, seeded, served
from ranks import run_ranks

FACTORS = (0.5, 1 / 3, -7.0, 1e-3)


def check(rank: int, world: int, op: str) -> None:
    factors = FACTORS[:world]
    for dtype in filter(lambda dtype: served(op, dtype), expected.DTYPES):
        for count in (1, 5, 1_003, 40_007):
            inputs = [seeded(dtype, (count,), 31 * r + count) for r in range(world)]
            wanted = reduced(op, inputs, factors)
            about = f"{op} {name(dtype)} {count} of {world}"
            for asynchronous in (False, True):
                tensor = inputs[rank].clone()
                work = dist.all_reduce(tensor, op_of(op, FACTORS[rank]), async_op=asynchronous)
                if work is not None:
                    work.wait()
                assert_same_bits(tensor, wanted, f"all_reduce {about}")
            tensor = inputs[rank].clone()
            dist.reduce(tensor, world - 1, op_of(op, FACTORS[rank]))
            if rank == world - 1:
                assert_same_bits(tensor, wanted, f"reduce {about}")
            if dtype in COMPLEX:
                continue
            output = torch.empty_like(tensor)
            dist.reduce_scatter_tensor(output, inputs[rank].repeat(world), op_of(op, FACTORS[rank]))
            assert_same_bits(output, wanted, f"reduce_scatter_tensor {about}")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", (1, 2, 4))
def test_served(world: int, op: str) -> None:
    run_ranks(check, world, op)


def refusals(rank: int, world: int) -> None:
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
    assert (one == world).all(), "nothing was exchanged before"


def test_refused() -> None:
    run_ranks(refusals, 2)


def tensor_factor(rank: int, world: int) -> None:
    tensor = torch.ones(10)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(torch.tensor([0.25])))
    assert (tensor == 0.5).all()
    tensors = [torch.ones(3), torch.ones(50_000)]
    dist.all_reduce_coalesced(tensors, dist._make_nccl_premul_sum(2.0))
    assert all((tensor == 4.0).all() for tensor in tensors)


def test_a_factor_may_be_a_tensor() -> None:
    run_ranks(tensor_factor, 2)

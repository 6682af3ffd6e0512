"""Every reduce op on every dtype, served with the documented meaning or refused by name; and the same bits always."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from cases import Findings, assert_same, values
from expected import BITWISE, COMPLEX, DTYPES, FLOATS, OPS, assert_same_bits, bits, name, op_of, reduced, seeded, served
from pool import WORLDS, Pool, device, needs_ranks

pytestmark = needs_ranks

FACTORS = (0.5, 1 / 3, -7.0, 1e-3, 2.0, -0.25, 3.0, 1.5)


def expected(op: str, inputs: list[torch.Tensor], factors: tuple[float, ...]) -> torch.Tensor:
    """As on CPU, except that a GPU sends its product in the tensor's own type, rounded."""
    if op == "PREMUL_SUM" and device().type == "cuda" and inputs[0].dtype in FLOATS and inputs[0].dtype.itemsize < 4:
        products = [(each.float() * factor).to(each.dtype) for each, factor in zip(inputs, factors, strict=True)]
        return reduced("SUM", products, factors)
    return reduced(op, inputs, factors)


def sweep(rank: int, world: int, op: str) -> int:
    factors = FACTORS[:world]
    findings = Findings()
    for dtype in filter(lambda dtype: served(op, dtype), DTYPES):
        for count in (1, 5, 1_003, 40_007, 300_001):
            inputs = [seeded(dtype, (count,), 31 * r + count) for r in range(world)]
            wanted = expected(op, inputs, factors)
            mine = op_of(op, FACTORS[rank])
            about = f"{op} {name(dtype)} x{count}"
            with findings.case(f"all_reduce {about}"):
                dist.all_reduce(tensor := inputs[rank].clone().to(device()), mine)
                assert_same(tensor.cpu(), wanted, "result")
            with findings.case(f"reduce {about}"):
                dist.reduce(tensor := inputs[rank].clone().to(device()), world - 1, mine)
                if rank == world - 1:
                    assert_same(tensor.cpu(), wanted, "result")
            if dtype in COMPLEX:
                continue
            with findings.case(f"reduce_scatter_tensor {about}"):
                output = torch.empty(count, dtype=dtype, device=device())
                dist.reduce_scatter_tensor(output, inputs[rank].repeat(world).to(device()), mine)
                assert_same(output.cpu(), wanted, "result")
    return findings.close()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", WORLDS)
def test_served(pool: Pool, world: int, op: str) -> None:
    pool.run(sweep, world, op)


def refusals(rank: int, world: int) -> int:
    """On the backend itself: torch refuses some of these before."""
    backend = dist.group.WORLD._get_backend(device())
    findings = Findings()
    for dtype in DTYPES:
        for op in (op for op in OPS if not served(op, dtype)):
            host = seeded(dtype, (6,), 1)
            tensor = host.clone().to(device())
            options = dist.AllreduceOptions()
            options.reduceOp = op_of(op, 2.0)
            with findings.case(f"{op} {name(dtype)}"):
                with pytest.raises(NotImplementedError) as refusal:
                    backend.allreduce([tensor], options)
                text = str(refusal.value)
                assert op in text and name(dtype) in text, text
                assert_same_bits(tensor.cpu(), host, "a refused tensor is as it was")
    dist.all_reduce(one := torch.ones(3, device=device()))
    assert bool((one == world).all()), "nothing was exchanged before"
    return findings.close()


def test_refused(pool: Pool) -> None:
    assert pool.run(refusals, 2)[0] > len(BITWISE)


#: From a single element to the range of every algorithm.
TOTALS = (1_000, 4_096, 33_001, 131_072, 524_291, 1 << 21, 1 << 23)


def same_bits(rank: int, world: int, dtype: torch.dtype) -> int:
    """An element's result depends on the ranks' elements alone: not on rank, run, size, place, algorithm."""
    generator = torch.Generator().manual_seed(3)
    # Of very different magnitudes, so that every other order of additions shows.
    few = [
        (torch.randn(1_000, generator=generator) * 10 ** torch.randint(-4, 5, (1_000,), generator=generator)).to(dtype)
        for _ in range(world)
    ]
    wanted = reduced("SUM", few)
    findings = Findings()
    for total in TOTALS:
        surroundings = values(dtype, total, 90 + rank)
        for place in sorted({0, (total - 1_000) // 3, total - 1_000}):
            host = surroundings.clone()
            host[place : place + 1_000] = few[rank]
            for repetition in range(20 if total <= 131_072 else 3):
                with findings.case(f"{name(dtype)} at {place} of {total}, repetition {repetition}"):
                    dist.all_reduce(tensor := host.to(device(), copy=True))
                    assert_same_bits(tensor[place : place + 1_000].cpu(), wanted, "all_reduce")
                    if repetition == 0:
                        everyone: list[object] = [None] * world
                        digest = bits(tensor.cpu()).long()
                        weights = torch.arange(digest.numel()) % 65_521 + 1
                        dist.all_gather_object(everyone, int((digest * weights).sum()))
                        assert len(set(everyone)) == 1, "the ranks differ"
    output = torch.empty(1_000, dtype=dtype, device=device())
    with findings.case("reduce_scatter_tensor"):
        dist.reduce_scatter_tensor(output, few[rank].repeat(world).to(device()))
        assert_same_bits(output.cpu(), wanted, "reduce_scatter_tensor")
    return findings.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
@pytest.mark.parametrize("world", WORLDS)
def test_same_bits(pool: Pool, world: int, dtype: torch.dtype) -> None:
    pool.run(same_bits, world, dtype)

"""Every reduce op on every dtype has the documented result or is rejected by name; and the bits are always the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from cases import Case, Findings, values
from collectives import refusals, run
from expected import BITWISE, COMPLEX, DTYPES, NARROW, OPS, assert_same_bits, bits, name, reduced, served
from pool import DEVICE, WORLDS, Pool, device, needs_ranks

pytestmark = needs_ranks


def on_gpu(
    op: str, inputs: Sequence[torch.Tensor], factors: Sequence[float], reduce: Callable[..., torch.Tensor] = reduced
) -> torch.Tensor:
    """Reduces as on the CPU, except that each rank rounds its product to the tensor's type before it sends it."""
    if op == "PREMUL_SUM" and DEVICE == "cuda" and inputs[0].dtype in NARROW:
        products = [(each.float() * factor).to(each.dtype) for each, factor in zip(inputs, factors, strict=True)]
        return reduce("SUM", products, factors)
    return reduce(op, inputs, factors)


def sweep(rank: int, world: int, op: str) -> int:
    return run(
        (form, Case(rank, world, dtype, count, op=op, reference=on_gpu, root=world - 1, device=device()))
        for dtype in DTYPES
        if served(op, dtype)
        for count in (1, 5, 1_003, 40_007, 300_001)
        for form in ("all_reduce", "reduce", "reduce_scatter_tensor")
        if form != "reduce_scatter_tensor" or dtype not in COMPLEX
    )


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", WORLDS)
def test_served(pool: Pool, world: int, op: str) -> None:
    pool.run(sweep, world, op)


def refused(rank: int, world: int) -> int:
    return refusals(world, device())


# proves P22
def test_refused(pool: Pool) -> None:
    assert pool.run(refused, 2)[0] > len(BITWISE)


#: Numbers of elements of the tensor around the compared elements: some for every algorithm.
TOTALS = (1_000, 4_096, 33_001, 131_072, 524_291, 1 << 21, 1 << 23)


def same_bits(rank: int, world: int, dtype: torch.dtype) -> int:
    """An element's result depends only on the ranks' elements, not on rank, run, size, location or algorithm."""
    generator = torch.Generator().manual_seed(3)
    # Values of very different magnitudes, so that any other order of additions changes the bits.
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

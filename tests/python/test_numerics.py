"""Adversarial values: the documented bits, the same on every rank, for every message size, algorithm and call."""

from __future__ import annotations

import itertools

import expected
import pytest
import torch
import torch.distributed as dist
from expected import COMPLEX, FLOATS, assert_same_bits, bits, name
from ranks import run_ranks

NAN, INF = float("nan"), float("inf")
SPECIAL = (1e30, -1e30, 1.0, -1.0, 1e-40, 5e-324, -0.0, 0.0, NAN, INF, -INF, 3.0, 1 / 3, 65504.0, 6e-8)
#: One element, 1 KB, the longest inline message and one more, 1 MB, 5 MB.
BYTES = (0, 1 << 10, 4096, 4096 + 64, 9_000, 1 << 20, 5 << 20)
OPS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT", "PREMUL_SUM")
FACTORS = (0.1, 3.0, -2.0, 1e-3)


def tuples(dtype: torch.dtype, world: int) -> list[torch.Tensor]:
    """Every combination of special values over the ranks, one tensor per rank."""
    values = torch.tensor(list(itertools.islice(itertools.product(SPECIAL, repeat=world), 4000)), dtype=torch.float64)
    return [column.contiguous().to(dtype) for column in values[torch.randperm(len(values))].unbind(1)]


def same_everywhere(rank: int, world: int, dtype: torch.dtype, inputs: list[torch.Tensor]) -> None:
    for op in OPS:
        if dtype in COMPLEX and op not in ("SUM", "AVG", "PREMUL_SUM"):
            continue
        wanted = expected.reduced(op, inputs, FACTORS[:world])
        about = f"{name(dtype)} {op} rank {rank}"
        torch_op = expected.op_of(op, FACTORS[rank])
        # The plans for long messages are the same for all ops.
        for size in BYTES if op == "SUM" else BYTES[:5]:
            count = max(1, size // dtype.itemsize)
            repeats = count // len(wanted) + 1
            mine = inputs[rank].repeat(repeats)[:count].contiguous()
            dist.all_reduce(mine, torch_op)
            assert_same_numbers(mine, wanted.repeat(repeats)[:count], f"{about} {count} elements")
            whole = torch.zeros(world * count, dtype=dtype)
            dist.all_gather_into_tensor(whole, mine)
            for other in whole.view(world, count):
                assert_same_bits(other, mine, f"{about} {count} elements: ranks differ")
            if size == 1 << 10:
                by_reduce_scatter = torch.zeros(count, dtype=dtype)
                part = inputs[rank].repeat(repeats)[:count].contiguous()
                dist.reduce_scatter(by_reduce_scatter, [part] * world, torch_op)
                assert_same_bits(by_reduce_scatter, mine, f"{about}: reduce_scatter")
                dist.reduce(part, world - 1, torch_op)
                if rank == world - 1:
                    assert_same_bits(part, mine, f"{about}: reduce")


def assert_same_numbers(got: torch.Tensor, wanted: torch.Tensor, about: str) -> None:
    """Fails unless the bits are equal; a NaN must be the canonical NaN of its dtype, whichever NaN torch has computed.

    e4m3fn has no infinity: a number that overflows becomes that NaN with the number's sign.
    """
    if wanted.dtype in COMPLEX:
        got, wanted = torch.view_as_real(got), torch.view_as_real(wanted)
    wide = wanted.to(torch.float64).reshape(-1)
    nan = wide.isnan()
    assert torch.equal(got.to(torch.float64).reshape(-1).isnan(), nan), f"{about}: NaN elsewhere"
    width = wanted.element_size()
    ours, theirs = bits(got).view(-1, width), bits(wanted).view(-1, width)
    assert torch.equal(ours[~nan], theirs[~nan]), f"{about}: other numbers"
    if wanted.dtype == torch.float8_e4m3fn:
        ours = ours & 0x7F
    if nan.any():
        assert (ours[nan] == ours[nan][0]).all(), f"{about}: several NaN"


@pytest.mark.parametrize("dtype", (*FLOATS, *COMPLEX), ids=name)
@pytest.mark.parametrize("world", (2, 4))
def test_the_same_bits_everywhere(world: int, dtype: torch.dtype) -> None:
    torch.manual_seed(world)
    run_ranks(same_everywhere, world, dtype, tuples(dtype, world))


def cancellation(rank: int, world: int) -> None:
    for count in (1, 256, 262_144):
        tensor = torch.full((count,), (1e30, -1e30, 1.0)[rank])
        dist.all_reduce(tensor)
        assert (tensor == 1.0).all(), "rank order: (1e30 - 1e30) + 1"
        tensor = torch.full((count,), (1.0, 1e30, -1e30)[rank])
        dist.all_reduce(tensor)
        assert (tensor == 0.0).all(), "rank order: (1 + 1e30) - 1e30"
        tensor = torch.full((count,), (256.0, 1.0, 1.0)[rank], dtype=torch.bfloat16)
        dist.all_reduce(tensor)
        assert (tensor == 258.0).all(), "rounded once: 256 + 1 is 256 in bfloat16"
        tensor = torch.full((count,), -0.0)
        dist.all_reduce(tensor)
        assert (bits(tensor).view(-1, 4)[:, 3] == 0x80).all(), "-0.0 + -0.0 is -0.0"


def test_order_and_rounding() -> None:
    run_ranks(cancellation, 3)


def flushing(rank: int, world: int) -> None:
    torch.set_flush_denormal(rank == 1)
    for count in (1, 100_000):
        tensor = torch.full((count,), 1, dtype=torch.int32)
        dist.all_reduce(tensor.view(torch.float32))
        assert (tensor == world).all(), "the smallest subnormal, twice"
    torch.set_flush_denormal(False)


def test_ranks_that_flush_denormals_get_the_same_bits() -> None:
    run_ranks(flushing, 2)

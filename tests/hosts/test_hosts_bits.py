"""Reductions on several hosts against the two-level definition: every type and operation, long; every power of ten."""

from __future__ import annotations

from collections.abc import Sequence

import expected
import pytest
import torch
import torch.distributed as dist
from machines import run_hosts
from test_hosts_collectives import check_reductions, two_level

#: Bytes of a tensor that all rails carry, in several turns of theirs.
LONG = 300_000
#: Lengths of a reduction: what a slot holds, one rail carries, all rails do, with few turns and with many.
LENGTHS = tuple(10**power for power in range(8))
#: Elements after which the longest tensors repeat: a prime, which is no distance between pieces.
PERIOD = 1_000_003


def long_reductions(rank: int, world_size: int, layout: Sequence[int]) -> None:
    served = [(op, dtype) for dtype in expected.DTYPES for op in expected.OPS if expected.served(op, dtype)]
    check_reductions([(op, dtype, LONG // dtype.itemsize + 3) for op, dtype in served], two_level, rank, layout)


@pytest.mark.parametrize("layout", [(2, 2), pytest.param((2, 1, 1), marks=pytest.mark.slow)], ids=str)
def test_long_reductions_of_every_type(layout: Sequence[int]) -> None:
    run_hosts(long_reductions, layout, layout)


def lengths(rank: int, world_size: int, layout: Sequence[int], dtypes: Sequence[torch.dtype]) -> None:
    """A prefix of a longer sum has the same bits, whatever way it goes."""
    for dtype in dtypes:
        inputs = [expected.seeded(dtype, (LENGTHS[-1],), other) for other in range(world_size)]
        wanted = two_level("SUM", inputs, layout)
        for length in LENGTHS:
            dist.all_reduce(got := inputs[rank][:length].clone())
            expected.assert_same(got, wanted[:length], ("all_reduce", dtype, length))
            each = length // world_size
            got = torch.empty(each, dtype=dtype)
            dist.reduce_scatter_tensor(got, inputs[rank][: each * world_size].clone())
            part = wanted[rank * each : (rank + 1) * each]
            expected.assert_same(got, part, ("reduce_scatter", dtype, length))


@pytest.mark.parametrize("layout", [(2, 2), pytest.param((1, 1, 2), marks=pytest.mark.slow)], ids=str)
def test_sums_of_every_length(layout: Sequence[int]) -> None:
    run_hosts(lengths, layout, layout, (torch.float32, torch.bfloat16, torch.int8))


def every_length(rank: int, world_size: int, layout: Sequence[int], dtypes: Sequence[torch.dtype]) -> None:
    """Every operation; tensors longer than ``PERIOD`` repeat, and so do their reductions."""

    def long(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor] * -(-LENGTHS[-1] // PERIOD))

    for dtype in dtypes:
        inputs = [expected.seeded(dtype, (PERIOD,), other) for other in range(world_size)]
        own = long(inputs[rank])
        for op in [op for op in expected.OPS if expected.served(op, dtype)]:
            wanted = long(two_level(op, inputs, layout))
            for length in LENGTHS:
                dist.all_reduce(got := own[:length].clone(), expected.op_of(op, rank + 0.5))
                expected.assert_same(got, wanted[:length], (op, dtype, length))


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtypes",
    [expected.FLOATS, expected.INTEGERS, (torch.bool, *expected.COMPLEX)],
    ids=["floats", "integers", "bool and complex"],
)
def test_reductions_of_every_type_and_length(dtypes: Sequence[torch.dtype]) -> None:
    run_hosts(every_length, (2, 2), (2, 2), dtypes)

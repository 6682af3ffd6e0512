"""Reductions give the documented bits: every op and dtype, every message size, every rank."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import reference
import torch
import torch.distributed as dist
from ranks import run_ranks, values
from reference import AVG, BAND, BOR, BXOR, MAX, MIN, PRODUCT, SUM

HARD = {
    torch.float64: (1e300, -1e300, 1.0, 5e-324, -5e-324, -0.0, 0.0, float("nan"), float("inf"), float("-inf"), 1e16, 0.1),
    torch.float32: (1e30, -1e30, 1.0, 1e-45, -1e-45, -0.0, 0.0, float("nan"), float("inf"), float("-inf"), 3.4e38, 0.1),
    torch.float16: (60000.0, -60000.0, 1.0, 6e-8, -6e-8, -0.0, 0.0, float("nan"), float("inf"), float("-inf"), 2049.0, 0.1),
    torch.bfloat16: (1e30, -1e30, 1.0, 1e-40, -1e-40, -0.0, 0.0, float("nan"), float("inf"), float("-inf"), 257.0, 0.1),
    torch.float8_e4m3fn: (448.0, -448.0, 1.0, 0.002, -0.002, -0.0, 0.0, float("nan"), 17.0, 0.1),
    torch.float8_e5m2: (57344.0, -57344.0, 1.0, 2e-5, -2e-5, -0.0, 0.0, float("nan"), float("inf"), float("-inf"), 0.1),
}
# Bytes: beside the flag, one chunk, several chunks, past the two-phase threshold.
SIZES = (8, 1 << 10, 1 << 20, 5 << 20)


def hard_inputs(dtype: torch.dtype, world: int) -> list[torch.Tensor]:
    """One tensor a rank; together they hold every combination of two values, in every order of ranks, and shuffles."""
    table = HARD[dtype]
    columns = [(a, b, *([c] * (world - 2))) for a, b in itertools.product(table, table) for c in (1.0, table[0])]
    array = np.array([column[:world] for column in columns], dtype=np.float64)
    generator = np.random.default_rng(5)
    array = np.concatenate([array, *(generator.permuted(array, axis=1) for _ in range(3))])
    return [torch.tensor(array[:, rank].copy()).to(dtype) for rank in range(world)]


def repeated(pattern: torch.Tensor, count: int) -> torch.Tensor:
    times = -(-count // pattern.numel())
    return torch.cat([pattern] * times)[:count] if times > 1 else pattern[:count].clone()


@pytest.mark.parametrize("world", (2, 3, 4))
@pytest.mark.parametrize("dtype", HARD, ids=reference.name)
def test_hard_values(dtype: torch.dtype, world: int) -> None:
    """Cancellation, denormals, signed zeros, NaN and infinities: the same bits at every size and on every rank."""
    inputs = hard_inputs(dtype, world)
    width = inputs[0].element_size()

    def body(rank: int) -> dict[Any, bytes]:
        found = {}
        for op in (SUM, AVG, PRODUCT, MIN, MAX):
            expected = reference.reduced(inputs, op)
            # One element at a time, for some of them.
            for index in range(0, inputs[0].numel(), 37):
                single = inputs[rank][index : index + 1].clone()
                dist.all_reduce(single, op=op)
                assert reference.same_bits(single, expected[index : index + 1]), (op, index)
            for size in SIZES[1:]:
                count = size // width + 3
                mine = repeated(inputs[rank], count)
                dist.all_reduce(mine, op=op)
                whole = repeated(expected, count)
                if not reference.same_bits(mine, whole):
                    wrong = [i for i in range(0, min(count, 20_000)) if not reference.same_bits(mine[i : i + 1], whole[i : i + 1])]
                    shown = [([float(each[i % each.numel()]) for each in inputs], float(mine[i]), float(whole[i])) for i in wrong[:3]]
                    raise AssertionError(f"{op} at {size} bytes: {len(wrong)} wrong; (inputs, got, expected): {shown}")
                # NaN payloads included: what every rank must agree upon.
                period = min(count, inputs[0].numel())
                found[str(op), size] = reference.as_bytes(mine[:period]).numpy().tobytes()
                tail = mine[period : 2 * period]
                assert torch.equal(reference.as_bytes(tail), reference.as_bytes(mine[: tail.numel()])), (op, size)
        return found

    per_rank = values(run_ranks(world, body))
    for other in per_rank[1:]:
        assert other == per_rank[0], "ranks differ"
    for op in (SUM, AVG, PRODUCT, MIN, MAX):
        sizes = [per_rank[0][str(op), size] for size in SIZES[1:]]
        shortest = min(len(each) for each in sizes)
        assert len({each[:shortest] for each in sizes}) == 1, f"{op}: bits depend on the size of the message"


def test_order_of_ranks_shows() -> None:
    """1e30 - 1e30 + 1 is 1 from left to right and 0 from right to left; three orders, two answers."""

    def body(rank: int) -> None:
        for values_of, expected in (((1e30, -1e30, 1.0), 1.0), ((1e30, 1.0, -1e30), 0.0), ((1.0, 1e30, -1e30), 0.0)):
            for count in (1, 1000, 300_000):
                tensor = torch.full((count,), values_of[rank])
                dist.all_reduce(tensor)
                assert bool((tensor == expected).all())
                output = torch.zeros(count)
                dist.reduce_scatter_tensor(output, torch.full((3 * count,), values_of[rank]))
                assert bool((output == expected).all())
                tensor = torch.full((count,), values_of[rank])
                dist.reduce(tensor, 1)
                assert rank != 1 or bool((tensor == expected).all())

    run_ranks(3, body)


def test_sixteen_bits_accumulate_in_thirty_two() -> None:
    """Four times a quarter above 1: lost when rounded on the way, kept when rounded once."""

    def body(rank: int) -> None:
        for dtype, small in ((torch.bfloat16, 2.0**-9), (torch.float16, 2.0**-12)):
            for count in (1, 5000, 700_000):
                tensor = torch.full((count,), 1.0 if rank == 0 else small, dtype=dtype)
                dist.all_reduce(tensor)
                expected = torch.tensor(1.0 + 3 * small).to(dtype)
                assert bool((tensor == expected).all()) and float(expected) > 1

    run_ranks(4, body)


CASES = [
    *[(dtype, op) for dtype in reference.FLOATS for op in (SUM, AVG, PRODUCT, MIN, MAX)],
    *[(dtype, op) for dtype in reference.INTEGERS for op in (SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR)],
    *[(torch.bool, op) for op in (SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR)],
    *[(dtype, op) for dtype in reference.COMPLEX for op in (SUM, AVG)],
]


@pytest.mark.parametrize("world", (1, 2, 4))
def test_every_op(world: int) -> None:
    """All ops that mean something, through all_reduce, reduce, reduce_scatter and coalesced."""
    from test_collectives import Pool

    def body(rank: int) -> list[str]:
        pool = Pool(world, 40_000)
        wrong = []
        for number, (dtype, op) in enumerate(CASES):
            for count in (1, 33, 9001):
                label = f"{reference.name(dtype)} {op} x{count}"
                inputs = [pool.flat(dtype, r, count, number) for r in range(world)]
                expected = reference.reduced(inputs, op)
                mine = inputs[rank].clone()
                dist.all_reduce(mine, op=op)
                if not reference.same_bits(mine, expected):
                    wrong.append(f"all_reduce {label}: {mine[:4]} for {expected[:4]}")
                mine = inputs[rank].clone()
                dist.reduce(mine, world - 1, op=op)
                if rank == world - 1 and not reference.same_bits(mine, expected):
                    wrong.append(f"reduce {label}")
                output = torch.zeros(count, dtype=torch.uint8).to(dtype)
                dist.reduce_scatter_tensor(output, torch.cat([inputs[rank]] * world), op=op)
                if not reference.same_bits(output, expected):
                    wrong.append(f"reduce_scatter_tensor {label}")
        return wrong

    lines = [line for wrong in values(run_ranks(world, body)) for line in wrong]
    assert not lines, "\n".join(lines[:20])


def test_avg_of_integers_truncates() -> None:
    """Like torch.div(rounding_mode="trunc")."""

    def body(rank: int) -> None:
        for dtype in (torch.int64, torch.int32, torch.int8, torch.uint8):
            tensor = torch.tensor([rank, 2 * rank, 7], dtype=dtype)
            dist.all_reduce(tensor, op=AVG)
            assert tensor.tolist() == [1, 2, 7]
        tensor = torch.tensor([-rank, -5])
        dist.all_reduce(tensor, op=AVG)
        assert tensor.tolist() == [-1, -5]

    run_ranks(3, body)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.float16, torch.bfloat16), ids=reference.name)
def test_premul_sum(dtype: torch.dtype) -> None:
    """Each rank's tensor times the factor that this rank gave, then the sum; factors may differ between ranks."""

    def body(rank: int) -> None:
        generator = torch.Generator().manual_seed(3)
        for count in (1, 1000, 400_001):
            inputs = [torch.randn(count, generator=generator).to(dtype) for _ in range(3)]
            for factors in ((0.25, 0.25, 0.25), (2.0, -0.5, 3.0)):
                expected = reference.reduced(inputs, SUM, factors)
                mine = inputs[rank].clone()
                dist.all_reduce(mine, op=dist._make_nccl_premul_sum(factors[rank]))
                assert reference.same_bits(mine, expected), (count, factors, mine[:3], expected[:3])
                output = torch.zeros(count, dtype=dtype)
                dist.reduce_scatter_tensor(
                    output, torch.cat([inputs[rank]] * 3), op=dist._make_nccl_premul_sum(factors[rank])
                )
                assert reference.same_bits(output, expected), (count, factors)

    run_ranks(3, body)


def test_premul_sum_with_a_tensor_factor() -> None:
    def body(rank: int) -> None:
        mine = torch.full((100,), 2.0)
        dist.all_reduce(mine, op=dist._make_nccl_premul_sum(torch.tensor([0.5])))
        assert bool((mine == 2).all())

    run_ranks(2, body)


REFUSED = [
    *[(dtype, op) for dtype in reference.FLOATS for op in (BAND, BOR, BXOR)],
]


def test_refused_ops_name_what_is_supported() -> None:
    """Bit operations on floats: an error that names op and dtype and something that works instead."""

    def body(rank: int) -> list[str]:
        messages = []
        for dtype, op in REFUSED:
            with pytest.raises((NotImplementedError, TypeError, ValueError)) as info:
                dist.all_reduce(torch.ones(4).to(dtype), op=op)
            messages.append(str(info.value))
        for op in (MAX, MIN, PRODUCT):
            # torch itself refuses these before they reach a backend.
            with pytest.raises((ValueError, RuntimeError)):
                dist.all_reduce(torch.ones(4, dtype=torch.complex64), op=op)
        dist.all_reduce(tensor := torch.ones(4))
        assert bool((tensor == 2).all())
        return messages

    for (dtype, op), message in zip(REFUSED, values(run_ranks(2, body))[0], strict=True):
        text = message.lower()
        assert str(op).rsplit(".", 1)[-1].lower() in text, message
        assert reference.name(dtype) in text, message
        assert any(word in text for word in ("use ", "instead", "supported", "view", "convert", "cast")), message


def test_repeatable() -> None:
    """Run after run the same bits, whatever else the machine does."""

    def body(rank: int) -> int:
        generator = torch.Generator().manual_seed(rank)
        data = torch.randn(300_000, generator=generator) * torch.logspace(-20, 20, 300_000)
        seen = set()
        for _ in range(15):
            mine = data.clone()
            dist.all_reduce(mine)
            seen.add(hash(reference.as_bytes(mine).numpy().tobytes()))
        return len(seen)

    assert values(run_ranks(4, body)) == [1, 1, 1, 1]

"""Every collective, dtype, world size, length and layout, synchronous and asynchronous, against its definition.

Two ranks make all combinations, three and four make half of them. All cases of one world size share one group; the
inputs are made once, before the ranks are forked. Every reduce op on every dtype has the documented result, or is
rejected with the nearest form named.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import expected
import pytest
import torch
import torch.distributed as dist
from cases import Case, shared
from collectives import FLAT, ON_CPU, make, objects, refusals, run
from expected import COMPLEX, DTYPES, FLOATS, OPS, assert_same_bits, bits, name, served
from ranks import backend_of, run_ranks

EVERY = ("offset", "misaligned", "strided", "transposed", "columns", "channels_last", "mixed")
#: Types whose long tensors have more layouts.
LONG = (torch.float32, torch.bfloat16)
#: Collectives that are tested with long tensors of every type.
SIMPLE = (
    "broadcast", "all_reduce", "reduce", "all_gather", "all_gather_into_tensor", "gather", "scatter", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single",
)  # fmt: skip


def lengths(dtype: torch.dtype, collective: str) -> dict[int, tuple[str, ...]]:
    """The layouts of tensors with each number of elements, in addition to the contiguous one."""
    medium, large = (count // dtype.itemsize // 12 * 12 for count in (9_000, 1_100_000))
    found = {
        0: ("offset",),
        1: ("scalar", "offset"),
        33: ("offset", "misaligned", "strided"),
        252: EVERY,
        medium: EVERY,
    }
    if dtype in LONG:
        found[large] = ("misaligned", "strided", "transposed")
    elif collective in SIMPLE:
        found[large] = ()
    return found


def fits(collective: str, layout: str) -> bool:
    """Returns true if tensors that the collective cuts along their first dimension may have this layout."""
    if "in_place" in collective:
        return layout == "offset"
    return collective not in FLAT or layout in ("offset", "misaligned", "strided")


def cases(rank: int, world: int, collectives: Iterable[str]) -> Iterator[tuple[str, Case]]:
    for collective in collectives:
        for number, dtype in enumerate(DTYPES):
            for at, (count, layouts) in enumerate(lengths(dtype, collective).items()):
                # Three ranks make the long calls of every second type, and four those of the others.
                if world > 2 and at == 5 and dtype not in LONG and (number + world) % 2:
                    continue
                for asynchronous in (False, True) if world < 3 and count < 100_000 else ((number + at) % 2 == 1,):
                    yield collective, Case(rank, world, dtype, count, "contiguous", asynchronous)
                for which, layout in enumerate(layouts):
                    # With more ranks every second layout is enough, because a layout only affects its own rank.
                    if fits(collective, layout) and (world < 3 or (number + which) % 2 == 0):
                        yield collective, Case(rank, world, dtype, count, layout, (number + at + which) % 2 == 1)


def every_case(rank: int, world: int, collectives: Iterable[str]) -> int:
    return run(cases(rank, world, collectives))


# proves P8
@pytest.mark.parametrize("world", (1, 2, 3, 4))
def test_every_case(world: int) -> None:
    collectives = tuple(ON_CPU if world % 2 == 0 else SIMPLE)
    with shared():
        make(cases(0, world, collectives))
        counts = run_ranks(every_case, world, collectives, timeout=230)
    assert set(counts) == {len(list(cases(0, world, collectives)))}


@pytest.mark.ranks(3)
def test_all_gather_coalesced(rank: int, world_size: int) -> None:
    shapes = ((3,), (2, 2), (40_000,), (0,))
    inputs = [torch.full(shape, float(rank + 10 * i)) for i, shape in enumerate(shapes)]
    outputs = [[torch.zeros(shape) for shape in shapes] for _ in range(world_size)]
    dist.all_gather_coalesced(outputs, inputs)
    for giver, tensors in enumerate(outputs):
        for i, tensor in enumerate(tensors):
            assert (tensor == giver + 10 * i).all()


def test_object_collectives() -> None:
    run_ranks(objects, 3)


@pytest.mark.ranks(2, timeout=100)
def test_tensors_above_2_31_elements(rank: int) -> None:
    count = 2**31 + 5
    tensor = torch.zeros(count, dtype=torch.uint8)
    tensor[0] = tensor[2**31 - 1] = tensor[2**31] = tensor[-1] = rank + 1
    dist.all_reduce(tensor)
    assert [int(tensor[i]) for i in (0, 1, 2**31 - 1, 2**31, -2, -1)] == [3, 0, 3, 3, 0, 3]
    assert int(torch.count_nonzero(tensor)) == 4


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
    with pytest.raises(NotImplementedError, match=f"{dtype} is not served by this call; .* float32"):
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


# Adversarial values: the documented bits, the same on every rank, for every message size, algorithm and call.
NAN, INF = float("nan"), float("inf")
SPECIAL = (1e30, -1e30, 1.0, -1.0, 1e-40, 5e-324, -0.0, 0.0, NAN, INF, -INF, 3.0, 1 / 3, 65504.0, 6e-8)
#: One element, 1 KB, the longest inline message and one more, 1 MB, 5 MB.
BYTES = (0, 1 << 10, 4096, 4096 + 64, 9_000, 1 << 20, 5 << 20)
ARITHMETIC = ("SUM", "AVG", "MIN", "MAX", "PRODUCT", "PREMUL_SUM")
TIMES = (0.1, 3.0, -2.0, 1e-3)


def tuples(dtype: torch.dtype, world: int) -> list[torch.Tensor]:
    """Every combination of special values over the ranks, one tensor per rank."""
    values = torch.tensor(list(itertools.islice(itertools.product(SPECIAL, repeat=world), 4000)), dtype=torch.float64)
    return [column.contiguous().to(dtype) for column in values[torch.randperm(len(values))].unbind(1)]


def same_everywhere(rank: int, world: int, dtype: torch.dtype, inputs: list[torch.Tensor]) -> None:
    for op in ARITHMETIC:
        if dtype in COMPLEX and op not in ("SUM", "AVG", "PREMUL_SUM"):
            continue
        wanted = expected.reduced(op, inputs, TIMES[:world])
        about = f"{name(dtype)} {op} rank {rank}"
        torch_op = expected.op_of(op, TIMES[rank])
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


@pytest.mark.ranks(2)
def test_ranks_that_flush_denormals_get_the_same_bits(rank: int, world_size: int) -> None:
    torch.set_flush_denormal(rank == 1)
    for count in (1, 100_000):
        tensor = torch.full((count,), 1, dtype=torch.int32)
        dist.all_reduce(tensor.view(torch.float32))
        assert (tensor == world_size).all(), "the smallest subnormal, twice"
    torch.set_flush_denormal(False)

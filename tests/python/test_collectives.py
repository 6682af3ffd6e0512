"""Every collective, dtype, world size, length and layout, synchronous and asynchronous, against its definition.

All cases of one world size share one group; the inputs are made once, before the ranks are forked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch
import torch.distributed as dist
from cases import Case, shared
from collectives import FLAT, ON_CPU, make, objects, run
from expected import DTYPES
from ranks import run_ranks

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
                for asynchronous in (False, True) if count < 100_000 else (number % 2 == 1,):
                    yield collective, Case(rank, world, dtype, count, "contiguous", asynchronous)
                for which, layout in enumerate(layouts):
                    # With four ranks every second layout is enough, because a layout only affects its own rank.
                    if fits(collective, layout) and (world < 4 or (number + which) % 2 == 0):
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


def coalesced_lists(rank: int, world: int) -> None:
    shapes = ((3,), (2, 2), (40_000,), (0,))
    inputs = [torch.full(shape, float(rank + 10 * i)) for i, shape in enumerate(shapes)]
    outputs = [[torch.zeros(shape) for shape in shapes] for _ in range(world)]
    dist.all_gather_coalesced(outputs, inputs)
    for giver, tensors in enumerate(outputs):
        for i, tensor in enumerate(tensors):
            assert (tensor == giver + 10 * i).all()


def test_all_gather_coalesced() -> None:
    run_ranks(coalesced_lists, 3)


def test_object_collectives() -> None:
    run_ranks(objects, 3)


def above_2_31_elements(rank: int, world: int) -> None:
    count = 2**31 + 5
    tensor = torch.zeros(count, dtype=torch.uint8)
    tensor[0] = tensor[2**31 - 1] = tensor[2**31] = tensor[-1] = rank + 1
    dist.all_reduce(tensor)
    assert [int(tensor[i]) for i in (0, 1, 2**31 - 1, 2**31, -2, -1)] == [3, 0, 3, 3, 0, 3]
    assert int(torch.count_nonzero(tensor)) == 4


def test_tensors_above_2_31_elements() -> None:
    run_ranks(above_2_31_elements, 2, timeout=100)

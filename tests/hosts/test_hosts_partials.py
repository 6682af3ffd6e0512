"""``Options(partials="fp32")``: sums of narrow floats travel between hosts in float32 and are rounded once."""

from __future__ import annotations

from collections.abc import Sequence

import expected
import pytest
import ranks
import torch
import torch.distributed as dist
import torch_symm
from machines import run_hosts
from test_hosts_collectives import check_reductions, two_level

OPS = ("SUM", "AVG", "PRODUCT", "PREMUL_SUM", "MAX")

#: Elements: none, one, odd, at both sides of what has room in a slot and of what one rail carries.
COUNTS = (0, 1, 37, 4099, 33_001)


def once(op: str, inputs: Sequence[torch.Tensor], layout: Sequence[int]) -> torch.Tensor:
    """The ranks of each host in order, then the hosts in order, in float32, and one rounding."""
    return expected.rounded(two_level(op, [x.float() for x in inputs], layout), inputs[0].dtype)


def group_of(world_size: int, partials: str = "fp32") -> dist.ProcessGroup:
    group = dist.new_group(list(range(world_size)), pg_options=torch_symm.Options(partials=partials))
    assert group is not None
    return group


def reductions(rank: int, world_size: int, layout: Sequence[int]) -> None:
    group = group_of(world_size)
    cases = [(op, dtype, 37) for dtype in expected.NARROW for op in OPS]
    cases += [("SUM", dtype, count) for dtype in (torch.bfloat16, torch.float8_e5m2) for count in COUNTS]
    # Several turns; with three hosts each adds up a part.
    cases += [("SUM", torch.float16, 600_011), ("AVG", torch.float8_e4m3fn, 300_001)]
    check_reductions(cases, once, rank, layout, group)
    forms(rank, world_size, layout, group)


def forms(rank: int, world_size: int, layout: Sequence[int], group: dist.ProcessGroup) -> None:
    """Asynchronous, coalesced, strided and into one tensor; other types as ever."""
    dtype, count = torch.bfloat16, 5001
    inputs = [expected.seeded(dtype, (count, world_size), other) for other in range(world_size)]
    wanted = once("SUM", inputs, layout)
    work = dist.all_reduce(got := inputs[rank].clone(), group=group, async_op=True)
    assert work is not None
    work.wait()
    expected.assert_same_bits(got, wanted, "asynchronous")
    assert max(layout) == 1 or not torch.equal(got, two_level("SUM", inputs, layout)), "twice rounded differs"
    with dist._coalescing_manager(group):
        many = [inputs[rank].clone() for _ in range(3)]
        for tensor in many:
            dist.all_reduce(tensor, group=group)
    for tensor in many:
        expected.assert_same_bits(tensor, wanted, "coalesced")
    strided = inputs[rank].t().contiguous().t()
    dist.all_reduce(strided, group=group)
    expected.assert_same_bits(strided, wanted, "strided")
    row = torch.empty(count, dtype=dtype)
    dist.reduce_scatter_tensor(row, inputs[rank].t().contiguous().reshape(-1), group=group)
    expected.assert_same_bits(row, wanted[:, rank].contiguous(), "into one tensor")
    for dtype in (torch.float32, torch.int32):
        inputs = [expected.seeded(dtype, (count,), other) for other in range(world_size)]
        dist.all_reduce(got := inputs[rank].clone(), group=group)
        expected.assert_same_bits(got, two_level("SUM", inputs, layout), dtype)


LONGER = [pytest.param(layout, marks=pytest.mark.slow) for layout in ((3, 1), (2, 3, 1))]


@pytest.mark.parametrize("layout", [(2, 2), (1, 1), (1, 2, 1), *LONGER], ids=str)
def test_elements_are_rounded_once(layout: Sequence[int]) -> None:
    run_hosts(reductions, layout, layout)


def sent(rank: int, world_size: int) -> tuple[int, int]:
    found = []
    for partials in ("tensor", "fp32"):
        group = group_of(world_size, partials)
        before = torch_symm.stats()["between_hosts"][group.group_name]["gloo rail 0"]["sent"]
        dist.all_reduce(torch.ones(1 << 20, dtype=torch.bfloat16), group=group)
        found.append(torch_symm.stats()["between_hosts"][group.group_name]["gloo rail 0"]["sent"] - before)
    return found[0], found[1]


def test_twice_the_bytes_travel() -> None:
    for narrow, wide in run_hosts(sent, (1, 1)):
        assert (narrow, wide) == ((2 << 20) + 1024, (4 << 20) + 1024)


def disagree(rank: int, world_size: int) -> str:
    with pytest.raises(torch_symm.SymmConfigError) as caught:
        group_of(world_size, "tensor" if rank < 3 else "fp32")
    return str(caught.value)


def test_ranks_that_choose_differently_are_told_at_joining() -> None:
    for text in run_hosts(disagree, (2, 2)):
        assert 'rank 0 (host "a", pid' in text and 'has partials="tensor"' in text, text
        assert 'rank 3 (host "b", pid' in text and 'has partials="fp32"; give torch_symm.Options(partials=' in text, (
            text
        )


def inherited(rank: int, world_size: int) -> None:
    dist.destroy_process_group()
    options = torch_symm.Options(timeout=60, partials="fp32")
    store = ranks.file_store("second", world_size)
    dist.init_process_group("symm", rank=rank, world_size=world_size, store=store, pg_options=options)
    layout = (2, 2)
    inputs = [expected.seeded(torch.bfloat16, (5001,), other) for other in range(world_size)]
    for group in (dist.group.WORLD, dist.new_group([0, 1, 2, 3])):
        dist.all_reduce(got := inputs[rank].clone(), group=group)
        expected.assert_same_bits(got, once("SUM", inputs, layout), "inherited")
    dist.all_reduce(got := inputs[rank].clone(), group=group_of(world_size, "tensor"))
    expected.assert_same_bits(got, two_level("SUM", inputs, layout), "chosen")


def test_later_groups_do_as_the_default_one() -> None:
    run_hosts(inherited, (2, 2))


def unknown(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=r'partials="float32" is none of "tensor", "fp32"'):
        group_of(world_size, "float32")


def test_an_unknown_choice_is_refused() -> None:
    run_hosts(unknown, (1, 1))

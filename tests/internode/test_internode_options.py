"""``Options`` of sums between nodes.

``reduce_dtype="float32"``: narrow floats travel between nodes in float32 and are rounded once. ``order="tree"``: the
bits of one node, or an error that names the node.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import expected
import pytest
import ranks
import torch
import torch.distributed as dist
import torch_symm
from cases import Case, Reference
from collectives import run
from launch import on_nodes
from test_internode_collectives import COUNTS, reducing, two_level

OPS = ("SUM", "AVG", "PRODUCT", "PREMUL_SUM", "MAX")


@lru_cache
def once(layout: Sequence[int]) -> Reference:
    """The sum over the ranks of each node in order, then over the nodes in order, in float32, with one rounding."""

    def reference(op: str, inputs: Sequence[torch.Tensor], factors: Sequence[float]) -> torch.Tensor:
        return expected.rounded(two_level(layout)(op, [x.float() for x in inputs], factors), inputs[0].dtype)

    return reference


def group_of(world_size: int, **options: str) -> dist.ProcessGroup:
    group = dist.new_group(list(range(world_size)), pg_options=torch_symm.Options(**options))
    assert group is not None
    return group


LONGER = [pytest.param(layout, marks=pytest.mark.slow) for layout in ((3, 1), (2, 3, 1))]


@pytest.mark.parametrize("layout", [(2, 2), (1, 1), (1, 2, 1), *LONGER], ids=str)
@on_nodes()
def test_elements_are_rounded_once(rank: int, world_size: int, layout: Sequence[int]) -> None:
    group = group_of(world_size, reduce_dtype="float32")
    cases = [(op, dtype, 37) for dtype in expected.NARROW for op in OPS]
    cases += [("SUM", dtype, count) for dtype in (torch.bfloat16, torch.float8_e5m2) for count in COUNTS]
    # Several pipeline steps; on three nodes, each node sums a part.
    cases += [("SUM", torch.float16, 600_011), ("AVG", torch.float8_e4m3fn, 300_001)]
    run(reducing(cases, rank, world_size, reference=once(layout), group=group))
    options = {"reference": once(layout), "group": group}
    for form, how, later in (
        ("all_reduce", "contiguous", True),
        ("all_reduce", "transposed", False),
        ("coalesced", "contiguous", False),
    ):
        run([(form, Case(rank, world_size, torch.bfloat16, 5002, how, later, **options))])
    # Rounding twice gives a different result, and other types are unchanged.
    rounded = Case(rank, world_size, torch.bfloat16, 5002, **options).total()
    assert max(layout) == 1 or not torch.equal(
        rounded, Case(rank, world_size, torch.bfloat16, 5002, reference=two_level(layout)).total()
    )
    others = [("SUM", dtype, 5001) for dtype in (torch.float32, torch.int32)]
    run(reducing(others, rank, world_size, reference=two_level(layout), group=group))


@on_nodes(1, 1)
def test_twice_the_bytes_travel(world_size: int) -> None:
    for reduce_dtype, size in (("tensor", 2 << 20), ("float32", 4 << 20)):
        group = group_of(world_size, reduce_dtype=reduce_dtype)
        before = torch_symm.stats()["inter_node"][group.group_name]["gloo rail 0"]["sent"]
        dist.all_reduce(torch.ones(1 << 20, dtype=torch.bfloat16), group=group)
        after = torch_symm.stats()["inter_node"][group.group_name]["gloo rail 0"]["sent"]
        assert after - before == size + 4096


@on_nodes(2, 2)
def test_later_groups_do_as_the_default_one(rank: int, world_size: int) -> None:
    dist.destroy_process_group()
    options = torch_symm.Options(timeout=60, reduce_dtype="float32")
    store = ranks.file_store("second", world_size)
    dist.init_process_group("symm", rank=rank, world_size=world_size, store=store, pg_options=options)
    for group in (dist.group.WORLD, dist.new_group([0, 1, 2, 3])):
        run([("all_reduce", Case(rank, world_size, torch.bfloat16, 5001, reference=once((2, 2)), group=group))])
    chosen = group_of(world_size, reduce_dtype="tensor")
    run([("all_reduce", Case(rank, world_size, torch.bfloat16, 5001, reference=two_level((2, 2)), group=chosen))])


@pytest.mark.parametrize("layout", [(2, 2), (1, 1, 1, 1)], ids=str)
@on_nodes()
def test_trees_have_the_bits_of_one_node(rank: int, world_size: int) -> None:
    options = {"group": group_of(world_size, order="tree"), "reference": expected.in_halves, "root": world_size - 1}
    cases = [("SUM", torch.bfloat16), ("AVG", torch.float16), ("PREMUL_SUM", torch.float32), ("PRODUCT", torch.float64)]
    run(
        (form, Case(rank, world_size, dtype, count, op=op, **options))
        for op, dtype in cases
        # Lengths sent with the headers, in one chunk, and in several.
        for count in (37, 5_002, 600_011)
        for form in ("all_reduce", "reduce", "reduce_scatter_tensor")
        if count < 600_000 or form == "all_reduce"
    )


@on_nodes(3, 1)
def test_nodes_of_other_sizes_are_refused(world_size: int) -> None:
    with pytest.raises(torch_symm.SymmConfigError) as caught:
        group_of(world_size, order="tree")
    text = str(caught.value)
    assert 'cannot use order="tree"' in text and 'node "a" (ranks 0, 1 and 2)' in text, text

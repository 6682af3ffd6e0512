"""``Options(order="tree")`` on several nodes: the bits of one node, or an error that names the node."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
import torch_symm
from cases import Case
from collectives import run
from expected import in_halves
from launch import run_nodes


def group_of(world_size: int, order: str = "tree") -> dist.ProcessGroup:
    group = dist.new_group(list(range(world_size)), pg_options=torch_symm.Options(order=order))
    assert group is not None
    return group


def reductions(rank: int, world: int) -> None:
    group = group_of(world)
    cases = [("SUM", torch.bfloat16), ("AVG", torch.float16), ("PREMUL_SUM", torch.float32), ("PRODUCT", torch.float64)]
    run(
        (form, Case(rank, world, dtype, count, op=op, reference=in_halves, root=world - 1, group=group))
        for op, dtype in cases
        # Sent with the headers, and in several chunks.
        for count in (37, 5_002, 600_011)
        for form in ("all_reduce", "reduce", "reduce_scatter_tensor")
        if count < 600_000 or form == "all_reduce"
    )


@pytest.mark.parametrize("layout", [(2, 2), (1, 1, 1, 1)], ids=str)
def test_trees_have_the_bits_of_one_node(layout: Sequence[int]) -> None:
    run_nodes(reductions, layout)


def refused(rank: int, world_size: int) -> str:
    with pytest.raises(torch_symm.SymmConfigError) as caught:
        group_of(world_size)
    return str(caught.value)


def test_nodes_of_other_sizes_are_refused() -> None:
    for text in run_nodes(refused, (3, 1)):
        assert 'cannot use order="tree"' in text and 'node "a" (ranks 0, 1 and 2)' in text, text

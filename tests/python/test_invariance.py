"""Sums that depend only on the ranks' values: ``order="tree"``, and ``torch-symm check --invariance``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_symm
from cases import Case
from collectives import run
from expected import COMPLEX, DTYPES, OPS, assert_same_bits, in_halves, name, reduced, served
from norm_reference import EPS, Rows
from torch_symm import __main__ as entry
from torch_symm.tools.check import command, invariance, sides
from torch_symm.tools.check.invariance import COLUMNS, LEAVES, Row, share, tree, values
from vllm_doubles import put

#: Types of long sums.
FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def of_order(order: str) -> dist.ProcessGroup:
    return dist.new_group(list(range(dist.get_world_size())), pg_options=torch_symm.Options(order=order))


def normed(rank: int, world: int, group: dist.ProcessGroup, shapes: Sequence[tuple[int, int]], device: Any) -> None:
    """A norm has the same bits as one rank whose input is the sum of all inputs."""
    for shape in shapes:
        rows = Rows(rank, world, shape, torch.bfloat16, device=device)
        got = torch.ops.symm.all_reduce_add_rms_norm(*rows.tensors(), EPS, group.group_name)
        rows.all = [in_halves("SUM", rows.all)]
        rows.check(got)


@pytest.mark.ranks([1, 2, 3, 4, 5, 6, 7, 8])
def test_trees_combine_halves(rank: int, world_size: int) -> None:
    group, forms = of_order("tree"), ("all_reduce", "reduce", "reduce_scatter_tensor")
    # Lengths of calls whose data are posted with the call, and of staged ones; longer ones follow below.
    counts = (1, 37, 5_003) if world_size in (4, 5) else (37,)
    cases = [(op, dtype, count) for dtype in DTYPES for op in OPS if served(op, dtype) for count in counts]
    if world_size == 4:
        long = zip(("SUM", "AVG", "PREMUL_SUM", "PRODUCT"), FLOATING, strict=True)
        cases += [(op, dtype, 300_007) for op, dtype in long]
        normed(rank, world_size, group, ((1, 64), (3, 1_032), (70, 256)), torch.device("cpu"))
    run(
        (form, Case(rank, world_size, dtype, count, op=op, reference=in_halves, root=world_size - 1, group=group))
        for op, dtype, count in cases
        for form in forms
        if form != "reduce_scatter_tensor" or dtype not in COMPLEX
    )


@pytest.mark.ranks([1, 2, 4, 8])
def test_a_tree_has_the_same_bits_with_1_2_4_and_8_ranks(rank: int, world_size: int) -> None:
    leaves, each = values(torch.float32, LEAVES), LEAVES // world_size
    alone, own = tree(leaves), tree(leaves[rank * each : (rank + 1) * each])
    total, mean, other, scattered = own.clone(), own / each, own.clone(), torch.empty(own.numel() // world_size)
    group = of_order("tree")
    dist.reduce_scatter_tensor(scattered, own.clone(), group=group)
    dist.all_reduce(total, group=group)
    dist.all_reduce(mean, dist.ReduceOp.AVG, group=group)
    assert_same_bits(total, alone, f"{world_size} ranks")
    assert_same_bits(mean, alone / LEAVES, f"average of {world_size} ranks")
    assert share(scattered, total.chunk(world_size)[rank]) == 0
    dist.all_reduce(other, group=of_order("rank"))
    assert (share(other, alone) > 0) == (world_size > 2)


@pytest.mark.ranks(3)
def test_an_unknown_order_is_refused_and_ranks_that_disagree_are_named(rank: int, tmp_path: Path) -> None:
    store = torch_symm.FileStore(tmp_path / "store", 3)
    with pytest.raises(ValueError, match="order="):
        torch_symm.ProcessGroupSymm(store, rank, 3, torch_symm.Options(order="ring"))
    options = torch_symm.Options(timeout=20, order="tree" if rank == 1 else "")
    with pytest.raises(torch_symm.SymmConfigError) as error:
        torch_symm.ProcessGroupSymm(store, rank, 3, options)
    message = str(error.value)
    assert "ranks 0 and 1 disagree on the order of sums of group" in message
    assert 'rank 0 has order="rank", rank 1 order="tree"; give torch_symm.Options(order=...)' in message


@pytest.mark.ranks(4, env={"SYMM_ORDER": "tree"})
def test_the_setting_chooses_the_order_of_the_default_group(rank: int) -> None:
    own, later, rank_order = (values(torch.float32, 4)[rank].clone() for _ in range(3))
    dist.all_reduce(own)
    assert_same_bits(own, tree(values(torch.float32, 4)), "SYMM_ORDER=tree")
    # A group that chooses no order inherits the order of the default group.
    dist.all_reduce(later, group=dist.new_group(list(range(4))))
    assert share(later, own) == 0
    dist.all_reduce(rank_order, group=of_order("rank"))
    assert_same_bits(rank_order, reduced("SUM", values(torch.float32, 4)), "rank order")


# The command.


def test_shares_count_elements_with_other_bits_and_trees_are_those_of_groups() -> None:
    one = torch.tensor([0.0, 1.0, 2.0, float("nan")])
    assert share(one, one.clone()) == 0
    assert share(one, torch.tensor([-0.0, 1.0, 3.0, float("nan")])) == 0.5
    assert share(one.bfloat16(), (one + 1).bfloat16()) == 0.75
    for world in range(1, 9):
        rows = values(torch.float32, world)
        assert_same_bits(tree(rows), in_halves("SUM", rows), str(world))


def test_promises_of_each_side() -> None:
    assert Row("gloo", 4, "float32", {"lengths": 0.1}).broken == []
    assert Row("symm", 4, "float32", {"lengths": 0.1, "one rank": 0.2}).broken == ["lengths"]
    assert Row("symm, tree", 4, "float32", {"one rank": 0.2}).broken == ["one rank"]
    assert Row("symm, tree", 3, "float32", {"one rank": 0.2}).broken == []
    assert Row("symm, tree", 4, "bfloat16", {"one rank": 0.2}).broken == []
    several = [[Row("symm", 2, "float32", {"runs": each})] for each in (None, 0.25, 0.0)]
    assert invariance.merged(several) == [Row("symm", 2, "float32", {"runs": 0.25})]


Shares = dict[tuple[str, int, str], dict[str, float]]


def checked(capsys: pytest.CaptureFixture[str], ranks: str, *options: str) -> Shares:
    """Runs the check; returns the shares that differ, by side, number of ranks and type."""
    assert entry.main(["check", "--invariance", "--ranks", ranks, "--json", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and not found["broken"] and not found["errors"]
    rows = {(row["side"], row["ranks"], row["dtype"]): row["differ"] for row in found["rows"]}
    assert all(set(row) == set(COLUMNS) for row in rows.values())
    for side, number, dtype in product(
        ("symm", "symm, tree"), map(int, ranks.split(",")), map(name, invariance.DTYPES)
    ):
        assert all(rows[side, number, dtype][each] == 0 for each in COLUMNS[:-1])
    return rows


def test_a_check_of_invariance(capsys: pytest.CaptureFixture[str]) -> None:
    rows = checked(capsys, "2,4")
    assert rows["symm, tree", 4, "float32"]["one rank"] == 0 and rows["symm", 4, "float32"]["one rank"] > 0
    # The comparison finds a sum whose order depends on the length.
    assert rows["gloo", 4, "float32"]["lengths"] > 0


def test_the_table_of_invariance(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    usual = dict.fromkeys(COLUMNS, 0.0)
    other = {**usual, "lengths": 0.1486, "ranks": None}
    rows = [Row("symm", 2, "float32", dict(usual)), Row("nccl", 2, "float32", other)]
    found = invariance.InvarianceReport(0, rows, {sides.VLLM: "not installed"})
    monkeypatch.setattr(command, "_ran", lambda *given: ([found], ""))
    assert entry.main(["check", "--invariance", "--ranks", "2"]) == 0
    said = capsys.readouterr().out
    assert "14.86%" in said and "vLLM custom: not compared: not installed" in said
    assert "all promised bits are equal" in said
    rows[0].differ["runs"] = 0.5
    assert entry.main(["check", "--invariance", "--ranks", "2"]) == 1
    assert "WRONG: symm, float32 on 2 ranks: runs" in capsys.readouterr().out
    monkeypatch.setattr(command, "_ran", lambda *given: ([], "rank 1 has ended"))
    assert entry.main(["check", "--invariance", "--ranks", "2"]) == command.UNFINISHED
    assert "FAILED: rank 1 has ended" in capsys.readouterr().out


def test_the_engines_kernel_is_used_where_it_serves() -> None:
    serves = {"should_custom_ar": lambda one: one.numel() < 10, "custom_all_reduce": lambda one: one * 2}
    side = sides.of_vllm(SimpleNamespace(disabled=False, **serves))
    assert torch.equal(side.all_reduce(torch.ones(4)), torch.full((4,), 2.0))  # type: ignore[arg-type]
    assert side.all_reduce(torch.ones(10)) is None and side.reduce_scatter(torch.ones(4)) is None


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (None, "not installed"),
        (lambda group, device: SimpleNamespace(disabled=True), "disabled here by vLLM"),
        (lambda group, device: SimpleNamespace(disabled=False), ""),
        (lambda group: None, "takes 1 positional argument"),
    ],
)
def test_an_engine_that_cannot_be_used_is_left_out(made: object, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(sides.VLLM_MODULE)
    if made is not None:
        module.CustomAllreduce = made  # type: ignore[attr-defined]
        put(sides.VLLM_MODULE, module, monkeypatch)
    side, reason = sides._vllm(None, True, torch.device("cpu"))
    assert why in reason and (side is not None) == (why == "")
    assert sides._vllm(None, False, torch.device("cpu")) == (None, "")

"""Sums that depend only on the ranks' values: ``order="tree"``, and ``torch-symm check --invariance``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch_symm
from cases import Case
from collectives import run
from expected import COMPLEX, DTYPES, OPS, assert_same_bits, in_halves, name, reduced, served
from norm_reference import reference
from ranks import file_store, run_ranks
from torch_symm import __main__ as entry
from torch_symm.tools.check import command, invariance, sides
from torch_symm.tools.check.invariance import COLUMNS, LEAVES, Row, share, tree, values


def of_tree(world: int) -> dist.ProcessGroup:
    group = dist.new_group(list(range(world)), pg_options=torch_symm.Options(order="tree"))
    assert group is not None
    return group


def reductions(rank: int, world: int, counts: Sequence[int]) -> int:
    group = of_tree(world)
    return run(
        (form, Case(rank, world, dtype, count, op=op, reference=in_halves, root=world - 1, group=group))
        for dtype in DTYPES
        for op in OPS
        if served(op, dtype)
        for count in counts
        for form in ("all_reduce", "reduce", "reduce_scatter_tensor")
        if form != "reduce_scatter_tensor" or dtype not in COMPLEX
    )


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 6, 7, 8])
def test_trees_combine_halves(world: int) -> None:
    # Posted with the call, staged, and in several chunks.
    run_ranks(reductions, world, (1, 37, 5_003) if world in (4, 5) else (37,))


def long_reductions(rank: int, world: int) -> int:
    group = of_tree(world)
    cases = [("SUM", torch.float32), ("AVG", torch.bfloat16), ("PREMUL_SUM", torch.float16), ("PRODUCT", torch.float64)]
    return run(
        (form, Case(rank, world, dtype, 300_007, op=op, reference=in_halves, group=group))
        for op, dtype in cases
        for form in ("all_reduce", "reduce_scatter_tensor")
    )


def test_long_sums_are_trees_too() -> None:
    run_ranks(long_reductions, 4)


def with_leaves(rank: int, world: int, order: str) -> list[torch.Tensor]:
    group = dist.new_group(list(range(world)), pg_options=torch_symm.Options(order=order))
    assert group is not None
    leaves, each = values(torch.float32, LEAVES), LEAVES // world
    own = tree(leaves[rank * each : (rank + 1) * each]).clone()
    scattered = torch.empty(own.numel() // world)
    dist.reduce_scatter_tensor(scattered, own.clone(), group=group)
    mean = own / each
    dist.all_reduce(own, group=group)
    dist.all_reduce(mean, dist.ReduceOp.AVG, group=group)
    start = rank * scattered.numel()
    assert share(scattered, own[start : start + scattered.numel()]) == 0
    return [own, mean]


def test_a_tree_has_the_same_bits_with_1_2_4_and_8_ranks() -> None:
    alone = tree(values(torch.float32, LEAVES))
    other = {}
    for world in (1, 2, 4, 8):
        for total, mean in run_ranks(with_leaves, world, "tree"):
            assert_same_bits(total, alone, f"{world} ranks")
            assert_same_bits(mean, alone / LEAVES, f"average of {world} ranks")
        other[world] = share(run_ranks(with_leaves, world, "rank")[0][0], alone)
    assert other[1] == other[2] == 0 and other[4] > 0 and other[8] > 0, other


def normed(rank: int, world: int) -> None:
    group, generator = of_tree(world), torch.Generator().manual_seed(7)
    for rows, hidden in ((1, 64), (3, 1_032), (70, 256)):
        inputs = torch.randn((world, rows, hidden), generator=generator).bfloat16()
        residual, weight = (torch.randn(size, generator=generator).bfloat16() for size in ((rows, hidden), (hidden,)))
        got = torch.ops.symm.all_reduce_add_rms_norm(inputs[rank].clone(), residual, weight, 1e-5, group.group_name)
        # The same bits as one rank whose input is the sum.
        wanted = reference([in_halves("SUM", list(inputs))], residual, weight, 1e-5)
        for one, other in zip(got, wanted, strict=True):
            assert_same_bits(one, other, f"{rows} x {hidden}")


def test_the_sum_of_a_fused_norm_is_a_tree() -> None:
    run_ranks(normed, 4)


def of_another_order(rank: int, world: int) -> str:
    options = torch_symm.Options(timeout=20, order="tree" if rank == 1 else "")
    try:
        torch_symm.ProcessGroupSymm(file_store("own", world), rank, world, options)
    except torch_symm.SymmConfigError as error:
        return str(error)
    return ""


def test_ranks_that_disagree_on_the_order_are_named() -> None:
    for message in run_ranks(of_another_order, 3):
        assert "ranks 0 and 1 disagree on the order of sums of group" in message
        assert 'rank 0 has order="rank", rank 1 order="tree"; give torch_symm.Options(order=...)' in message


def default_order(rank: int, world: int) -> torch.Tensor:
    own = values(torch.float32, world)[rank].clone()
    dist.all_reduce(own)
    # A group that chooses no order inherits the order of the default group.
    later, rank_order = own.clone(), values(torch.float32, world)[rank].clone()
    later.copy_(values(torch.float32, world)[rank])
    dist.all_reduce(later, group=dist.new_group(list(range(world))))
    assert share(later, own) == 0
    dist.all_reduce(rank_order, group=dist.new_group(list(range(world)), pg_options=torch_symm.Options(order="rank")))
    assert_same_bits(rank_order, reduced("SUM", values(torch.float32, world)), "rank order")
    return own


def test_the_setting_chooses_the_order_of_the_default_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYMM_ORDER", "tree")
    for total in run_ranks(default_order, 4):
        assert_same_bits(total, tree(values(torch.float32, 4)), "SYMM_ORDER=tree")


def bad_choice(rank: int, world: int) -> str:
    with pytest.raises(ValueError, match="order="):
        torch_symm.ProcessGroupSymm(file_store("own", world), rank, world, torch_symm.Options(order="ring"))
    return ""


def test_an_unknown_order_is_refused() -> None:
    run_ranks(bad_choice, 1)


# The command.


def test_shares_count_elements_with_other_bits() -> None:
    one = torch.tensor([0.0, 1.0, 2.0, float("nan")])
    assert share(one, one.clone()) == 0
    assert share(one, torch.tensor([-0.0, 1.0, 3.0, float("nan")])) == 0.5
    assert share(one.bfloat16(), (one + 1).bfloat16()) == 0.75


def test_the_tree_of_the_command_is_the_definition() -> None:
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


def test_a_check_of_invariance(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["check", "--invariance", "--ranks", "2,4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and not found["broken"] and not found["errors"]
    rows = {(row["side"], row["ranks"], row["dtype"]): row["differ"] for row in found["rows"]}
    assert all(set(row) == set(COLUMNS) for row in rows.values())
    for side in ("symm", "symm, tree"):
        for dtype in map(name, invariance.DTYPES):
            assert all(rows[side, ranks, dtype][each] == 0 for ranks in (2, 4) for each in COLUMNS[:-1])
    assert rows["symm, tree", 4, "float32"]["one rank"] == 0 and rows["symm", 4, "float32"]["one rank"] > 0
    # The comparison finds a sum whose order depends on the length.
    assert rows["gloo", 4, "float32"]["lengths"] > 0


def test_the_table_of_invariance(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    usual = dict.fromkeys(COLUMNS, 0.0)
    rows = [
        Row("symm", 2, "float32", dict(usual)),
        Row("nccl", 2, "float32", {**usual, "lengths": 0.1486, "ranks": None}),
    ]
    found = invariance.Found(0, rows, {sides.VLLM: "not installed"})
    monkeypatch.setattr(command, "_ran", lambda *given: ([found], ""))
    assert entry.main(["check", "--invariance", "--ranks", "2"]) == 0
    said = capsys.readouterr().out
    assert (
        "14.86%" in said
        and "vLLM custom: not compared: not installed" in said
        and "all promised bits are equal" in said
    )
    rows[0].differ["runs"] = 0.5
    assert entry.main(["check", "--invariance", "--ranks", "2"]) == 1
    assert "WRONG: symm, float32 on 2 ranks: runs" in capsys.readouterr().out
    monkeypatch.setattr(command, "_ran", lambda *given: ([], "rank 1 has ended"))
    assert entry.main(["check", "--invariance", "--ranks", "2"]) == command.UNFINISHED
    assert "FAILED: rank 1 has ended" in capsys.readouterr().out


def test_the_engines_kernel_is_used_where_it_serves() -> None:
    kernel = SimpleNamespace(
        disabled=False, should_custom_ar=lambda one: one.numel() < 10, custom_all_reduce=lambda one: one * 2
    )
    side = sides.of_vllm(kernel)
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
        parts = sides.VLLM_MODULE.split(".")
        for end in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
        monkeypatch.setitem(sys.modules, sides.VLLM_MODULE, module)
    side, reason = sides._vllm(None, True, torch.device("cpu"))
    assert why in reason and (side is not None) == (why == "")
    assert sides._vllm(None, False, torch.device("cpu")) == (None, "")

"""``torch-symm bench``: sizes and columns as nccl-tests has them, every row checked, sides that are not there named."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch_symm import __main__ as entry
from torch_symm.bench.ops import DTYPES, PLACEMENTS, REDOPS
from torch_symm.bench.pattern import Pattern, WrongResult, check_parts
from torch_symm.bench.perf import columns, cuda, plot, request
from torch_symm.bench.perf.record import Absent, Figure, Found
from torch_symm.bench.perf.request import Wanted
from torch_symm.bench.timing import FIXED_ROUNDS, MAX_BURST, fixed

KB = 1 << 10


def figure(us: float = 10.0, wrong: int | None = 0) -> Figure:
    return Figure(us, us, us, us, 20, wrong)


def test_sizes_rise_by_a_factor_or_a_step() -> None:
    assert request.sizes(8, 256, 2, None) == [8, 16, 32, 64, 128, 256]
    assert request.sizes(1, 3, 1.5, None) == [1, 2, 3]
    assert request.sizes(8, 20, None, 5) == [8, 13, 18]
    assert request.sizes(KB, KB, None, KB) == [KB]


def test_names_of_nccl_tests_and_of_torch() -> None:
    assert request.operations(["all_reduce_perf", "alltoall", "sendrecv"]) == ["all_reduce", "all_to_all", "send_recv"]
    assert request.operations(["all"]) == list(PLACEMENTS)
    assert request.types("float,bf16,HALF,int8") == ["f32", "bf16", "f16", "i8"]
    assert request.types("all") == list(DTYPES)
    assert request.reductions("product,avg") == ["prod", "avg"]


def test_counts_are_of_one_part_where_the_size_is_divided() -> None:
    rows = request.rows(["all_reduce", "all_gather", "broadcast"], ["f32"], ["sum", "max"], [0, 1], [8], 4)
    assert rows == [
        Wanted("all_reduce", "f32", "sum", -1, 8, 4),
        Wanted("all_reduce", "f32", "max", -1, 8, 4),
        Wanted("all_gather", "f32", "none", -1, 16, 4),
        Wanted("broadcast", "f32", "none", 0, 8, 4),
        Wanted("broadcast", "f32", "none", 1, 8, 4),
    ]
    assert [row.count for row in rows] == [2, 2, 1, 2, 2]


def test_bus_bandwidth_has_the_factors_of_nccl_tests() -> None:
    factors = {op: Wanted(op, "f32", "sum", 0, 8, 4).bus_factor for op in PLACEMENTS}
    one, others = (
        ("broadcast", "reduce", "send_recv"),
        ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"),
    )
    assert factors == {"all_reduce": 1.5} | dict.fromkeys(others, 0.75) | dict.fromkeys(one, 1.0)
    found = Found(Wanted("all_reduce", "f32", "sum", -1, 1_000_000, 4), {"symm": {"in_place": figure(100.0)}})
    assert found.records()[0]["algbw"] == pytest.approx(10.0)
    assert found.records()[0]["busbw"] == pytest.approx(15.0)


@pytest.mark.parametrize("calls", [1, 2, 7, 20, 100, 1000])
@pytest.mark.parametrize("estimate", [1.0, 10_000.0])
@pytest.mark.parametrize("world", [2, 4, 16])
def test_a_fixed_number_of_calls_is_made(calls: int, estimate: float, world: int) -> None:
    rhythm = fixed(calls, estimate, world)
    assert calls <= rhythm.iterations <= calls + FIXED_ROUNDS * (calls // MAX_BURST + 16)
    assert rhythm.samples + rhythm.lead <= MAX_BURST


@pytest.mark.parametrize("redop", list(REDOPS))
@pytest.mark.parametrize("dtype", list(DTYPES.values()))
@pytest.mark.parametrize("world", [2, 3, 8, 16])
def test_what_reductions_give_is_exact(redop: str, dtype: torch.dtype, world: int) -> None:
    inputs = []
    for rank in range(world):
        part = torch.empty(3000, dtype=dtype)
        Pattern([rank], 0, 3000, world, dtype, redop).fill(part)
        inputs.append(part.double())
    stacked = torch.stack(inputs)
    wanted = {
        "sum": stacked.sum(0),
        "avg": stacked.sum(0) / world,
        "prod": stacked.prod(0),
        "min": stacked.amin(0),
        "max": stacked.amax(0),
    }[redop]
    assert len(wanted.unique()) > 1
    assert torch.equal(wanted.to(dtype).double(), wanted)
    Pattern(range(world), 0, 3000, world, dtype, redop).check(wanted.to(dtype), redop)


def test_all_wrong_elements_are_counted() -> None:
    patterns = [Pattern([rank], 0, 10, 2, torch.float32) for rank in range(2)]
    parts = [torch.empty(10), torch.empty(10)]
    for pattern, part in zip(patterns, parts, strict=True):
        pattern.fill(part)
    check_parts(patterns, parts, "right")
    parts[0][3] += 1
    parts[1][:2] += 1
    with pytest.raises(WrongResult, match="part of rank 0: element 3 of 10") as found:
        check_parts(patterns, parts, "here")
    assert found.value.count == 3


def test_columns_are_those_of_nccl_tests() -> None:
    wanted = Wanted("all_reduce", "bf16", "sum", -1, KB, 2)
    both = Found(wanted, {"symm": {"in_place": figure()}, "gloo": {"in_place": figure(25.0, 7)}}, {"mpi": "not here"})
    ours, theirs, note = columns.lines(both, True)
    assert ours.split() == [
        "1024",
        "512",
        "bfloat16",
        "sum",
        "-1",
        "N/A",
        "N/A",
        "N/A",
        "N/A",
        "10.00",
        "0.10",
        "0.10",
        "0",
        "symm",
        "1.00",
    ]
    assert theirs.split()[-3:] == ["7", "gloo", "2.50"]
    assert note == "# mpi: not here"
    alone = Found(wanted, {"symm": {"in_place": figure(wrong=None)}})
    (line,) = columns.lines(alone, False)
    head = columns.headings(False)
    assert len(line) == len(head[1]) and line.endswith("N/A")
    assert head[1].split()[1:] == [
        "size",
        "count",
        "type",
        "redop",
        "root",
        "time",
        "algbw",
        "busbw",
        "#wrong",
        "time",
        "algbw",
        "busbw",
        "#wrong",
    ]
    assert columns.closing([both], True)[0] == "# Out of bounds values : 7 FAILED"
    assert columns.closing([alone], False)[0].endswith("not checked (-c 0)")


def test_rows_of_all_operations_are_measured_and_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "rows.csv"
    typed = ["bench", "all", "-b", "8", "-e", "4K", "-f", "512", "-n", "2", "-w", "1", "-o", "avg", "--device", "cpu"]
    assert entry.main([*typed, "-r", "1", "--against", "gloo,nccl", "--csv", str(table), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["absent"] == [{"side": "nccl", "reason": "serves CUDA tensors only"}]
    assert found["failure"] is None
    rows = found["rows"]
    assert {row["op"] for row in rows} == set(PLACEMENTS)
    assert {(row["side"], row["wrong"]) for row in rows} == {("symm", 0), ("gloo", 0)}
    assert all(row["median_us"] > 0 and row["iterations"] >= 2 for row in rows)
    assert {row["root"] for row in rows if row["op"] in request.ROOTED} == {1}
    placed = {(row["op"], row["placement"]) for row in rows if row["side"] == "symm"}
    assert ("reduce_scatter", "in_place") in placed and ("reduce", "out_of_place") not in placed
    with table.open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)


def test_what_gpus_do_is_shown_in_the_same_columns() -> None:
    rows = request.rows(["all_reduce", "all_gather"], ["f32"], ["sum"], [0], [KB], 2)
    assert cuda.unmeasured(rows) is None
    found = list(cuda.run(rows, ["gloo", "torch"], 1, False, device="cpu"))
    assert [one for one in found if isinstance(one, Absent)] == [Absent("torch", "is not measured on cpu tensors")]
    measured: Sequence[Found] = [one for one in found if isinstance(one, Found)]
    assert [one.wanted for one in measured] == rows
    assert all(one.sides["symm"] and one.sides["gloo"] and not one.wrong for one in measured)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (Wanted("gather", "f32", "none", 0, 8, 2), "gather is not measured on GPUs"),
        (Wanted("all_reduce", "i8", "sum", -1, 8, 2), "-d i8 is not measured on GPUs"),
        (Wanted("all_reduce", "f32", "max", -1, 8, 2), "only -o sum and -r 0"),
    ],
)
def test_what_is_not_measured_on_gpus_is_refused(row: Wanted, says: str) -> None:
    assert says in str(cuda.unmeasured([row]))


def test_curves_of_all_sides_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="--plot needs matplotlib, which is not installed")
    rows = [
        Found(Wanted("all_reduce", "f32", "sum", -1, size, 2), {"symm": {"in_place": figure()}, "gloo": {}}, {}, 5.0)
        for size in (KB, 4 * KB)
    ]
    for ending in plot.ENDINGS:
        plot.draw(rows, "here", tmp_path / f"run{ending}")
    page = (tmp_path / "run.html").read_text()
    assert "limit of memory" in page and "out-of-place" in page

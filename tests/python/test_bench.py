"""``torch-symm bench``: sizes and columns as in nccl-tests, every row checked, missing sides named."""

from __future__ import annotations

import csv
import itertools
import json
import multiprocessing
import os
import signal
import threading
import time
from collections import namedtuple
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import pytest
import targets
import torch
import torch.distributed as dist
from faults.resource_leaks import children
from torch.multiprocessing.spawn import ProcessRaisedException
from torch_symm import __main__ as entry
from torch_symm.launch.ranks import Ended
from torch_symm.launch.watch import Progress, RankActivity
from torch_symm.tools.bench import axes, columns, command, cuda, launch, limits, links, machine, ops, plot, request
from torch_symm.tools.bench.background_load import BackgroundLoad, running
from torch_symm.tools.bench.ops import DTYPES, OPS, PLACEMENTS, REDOPS
from torch_symm.tools.bench.pattern import TILE, Pattern, WrongResult, check_parts, largest
from torch_symm.tools.bench.record import Absent, Figure, Found, quantile, read
from torch_symm.tools.bench.request import ROOTED, Wanted
from torch_symm.tools.bench.timing import FIXED_ROUNDS, MAX_BURST, MAX_ROUNDS, MAX_SAMPLES, fixed, plan
from torch_symm.tools.bench.units import format_size, parse_size

BACKEND = os.environ.get("SYMM_TEST_BACKEND", "symm")
KB, MB = 1 << 10, 1 << 20
pytestmark = pytest.mark.usefixtures("forked")
needs_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")


def figure(us: float = 10.0, wrong: int | None = 0) -> Figure:
    return Figure(us, us, us, us, 20, wrong)


def test_sizes_rise_by_a_factor_or_a_step() -> None:
    texts = {"8": 8, "64K": 64 * KB, "64KB": 64 * KB, "16 MB": 16 * MB, "1GiB": 1 << 30, "8b": 8}
    assert {text: parse_size(text) for text in texts} == texts
    assert [format_size(size) for size in (0, 8, 64 * KB, 16 * MB)] == ["-", "8 B", "64 KB", "16 MB"]
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
    barriers = request.rows(["barrier"], ["f32", "bf16"], ["sum"], [0], [8, KB], 4)
    assert barriers == [Wanted("barrier", "f32", "none", -1, 0, 4)]


def test_bus_bandwidth_has_the_factors_of_nccl_tests() -> None:
    factors = {op: Wanted(op, "f32", "sum", 0, 8, 4).bus_factor for op in PLACEMENTS}
    whole = dict.fromkeys(("broadcast", "reduce", "send_recv"), 1.0)
    parts = dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"), 0.75)
    assert factors == {"all_reduce": 1.5} | parts | whole
    found = Found(Wanted("all_reduce", "f32", "sum", -1, 1_000_000, 4), {"symm": {"in_place": figure(100.0)}})
    record = found.records()[0]
    assert (record["algbw"], record["busbw"]) == (pytest.approx(10.0), pytest.approx(15.0))


@pytest.mark.parametrize("estimate", [0.01, 1.0, 5.0, 9.9, 10.0, 700.0, 4_999.0, 5_000.0, 10_000.0, 300_000.0])
@pytest.mark.parametrize("world", [2, 3, 4, 8, 16])
def test_the_rhythm_fits_the_shared_and_the_exponent(estimate: float, world: int) -> None:
    for rounds in (3, 5, MAX_ROUNDS):
        rhythm = plan(estimate, 1.5, world, least=20, rounds=rounds)
        assert 20 <= rhythm.rounds * rhythm.bursts * rhythm.samples <= MAX_SAMPLES + MAX_ROUNDS
        calls = rhythm.samples * rhythm.batch + int(rhythm.lead)
        assert torch.isfinite(torch.tensor(256.0 * float(world) ** (calls - 1), dtype=torch.bfloat16))
    for calls in (1, 2, 7, 20, 100, 1000):
        rhythm = fixed(calls, estimate, world)
        assert calls <= rhythm.iterations <= calls + FIXED_ROUNDS * (calls // MAX_BURST + 16)
        assert rhythm.samples + rhythm.lead <= MAX_BURST


@pytest.mark.parametrize("redop", list(REDOPS))
@pytest.mark.parametrize("dtype", list(DTYPES.values()))
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8, 12, 16, 17, 64, 127, 128])
def test_what_reductions_give_is_exact(redop: str, dtype: torch.dtype, world: int) -> None:
    inputs = []
    for rank in range(world):
        part = torch.empty(3000, dtype=dtype)
        Pattern([rank], 5, 3000, world, dtype, redop).fill(part)
        inputs.append(part.double())
    stacked = torch.stack(inputs)
    names = {"sum": "sum", "avg": "mean", "prod": "prod", "min": "amin", "max": "amax"}
    wanted = getattr(stacked, names[redop])(0)
    # In int8, the average of more than 126 ranks varies only if its sum overflows.
    assert len(wanted.unique()) > 1 or (redop, dtype, world > 126) == ("avg", torch.int8, True)
    if redop in ("sum", "avg"):
        # A backend may sum in the type itself, in any order.
        assert stacked.abs().sum(0).max() <= largest(dtype) or not wanted.any()
        assert len(stacked.unique()) > 1
    assert torch.equal(wanted.to(dtype).double(), wanted)
    Pattern(range(world), 5, 3000, world, dtype, redop).check(wanted.to(dtype), redop)


def test_all_wrong_elements_are_counted_and_the_first_is_named() -> None:
    patterns = [Pattern([rank], 0, TILE + 10, 2, torch.float32) for rank in range(2)]
    parts = [torch.empty(TILE + 10), torch.empty(TILE + 10)]
    for pattern, part in zip(patterns, parts, strict=True):
        pattern.fill(part)
    check_parts(patterns, parts, "right")
    parts[0][TILE + 3] += 1
    parts[1][:2] += 1
    with pytest.raises(WrongResult, match=f"here, part of rank 0: element {TILE + 3} of {TILE + 10}") as found:
        check_parts(patterns, parts, "here")
    assert found.value.count == 3


def test_targets_follow_the_bands() -> None:
    ratios = {("all_reduce", 8, 4): 50, ("all_gather", 64 * MB, 4): 6, ("all_gather", 256 * MB, 4): 6}
    ratios |= {("barrier", 0, 4): 40, ("all_reduce", 4 * MB, 4): None, ("all_reduce", 8, 2): None}
    assert {cell: targets.ratio_target(*cell) for cell in ratios} == ratios
    assert targets.is_met("all_reduce", 8, 4, 14.0, 60.0) is True
    assert targets.is_met("all_reduce", 8, 4, 16.0, 60.0) is False
    assert targets.is_met("send_recv", MB, 4, 1.0, 3.9) is False
    assert targets.is_met("send_recv", MB, 4, 1.0, None) is None


def test_a_run_is_judged_by_its_targets() -> None:
    def row(ours: float, theirs: float, others: float = 0.0) -> Found:
        sides = {side: {"in_place": Figure(us, us, us, us, 20, 0)} for side, us in (("symm", ours), ("gloo", theirs))}
        return Found(Wanted("all_reduce", "f32", "sum", -1, MB, 4), sides, {}, None, None, others)

    assert targets.verdicts([row(10.0, 110.0)]) == [("all_reduce f32 1 MB in_place: 11.0 of 10", True)]
    assert targets.verdicts([row(10.0, 90.0, 0.6)]) == [("all_reduce f32 1 MB in_place: 9.0 of 10 ?", False)]


def test_limits_of_memory() -> None:
    for op, world in itertools.product(OPS.keys() - {"barrier"}, (2, 4, 8)):
        floor, staged = (limits.limit_us(op, 64 * MB, world, 80e9, staged=staged) for staged in (False, True))
        assert floor is not None and staged is not None and floor < staged, (op, world)
    assert limits.limit_us("all_reduce", MB, 4, 80e9, staged=False) is None, "it is in the cache"
    assert limits.limit_us("all_reduce", 16 * MB, 4, 80e9, staged=False) == pytest.approx(8 * 16 * MB / 80e9 * 1e6)


@pytest.mark.parametrize(
    ("backend", "output"),
    [
        ("sym", "no backend 'sym'; did you mean symm?"),
        ("cpu:zzz", "no backend 'zzz'; torch knows gloo"),
        ("nccl", "'nccl' serves no CPU tensors; for GPUs there is --device cuda"),
        ("cuda:nccl", "serves no CPU tensors"),
        ("symm", None),
        ("gloo", None),
        ("cpu:gloo,cuda:nccl", None),
    ],
)
def test_a_backend_that_cannot_be_measured_is_refused_in_one_sentence(backend: str, output: str | None) -> None:
    if backend == "nccl" and not dist.is_nccl_available():
        output = "this torch was built without 'nccl'"
    found = launch.unusable(backend)
    assert found is None if output is None else found is not None and output in found and "\n" not in found


def test_a_lack_of_memory_is_reported_in_one_line() -> None:
    for text, rank, output in (
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 800 bytes. Error code 12", 1, "800 bytes"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has", 0, "20.00 GiB"),
    ):
        error = ProcessRaisedException(f"Traceback\n{text}", rank, 4711)
        assert command._out_of_memory(error) == f"rank {rank} could not allocate {output}: use smaller sizes (-e)"
    assert command._out_of_memory(RuntimeError("another error")) == ""


def test_what_runs_beside_is_read() -> None:
    found = [BackgroundLoad.parse(text) for text in ("0", "3", "loader", "matmul")]
    loaders = BackgroundLoad(machine.usable_cores(), loaders=True)
    assert found == [BackgroundLoad(), BackgroundLoad(3), loaders, BackgroundLoad(products=True)]


@pytest.mark.timed
@pytest.mark.parametrize("beside", [BackgroundLoad(2), BackgroundLoad(1, loaders=True)])
def test_what_runs_beside_is_busy_and_ends(beside: BackgroundLoad) -> None:
    before = children()
    with running(beside):
        mine = children() - before
        assert len(mine) == beside.count
        until = time.monotonic() + 20
        while not all(_cpu_ticks(child) > 5 for child in mine):
            assert time.monotonic() < until, "they do nothing"
            time.sleep(0.05)
    assert not children() & mine


def _cpu_ticks(process: int) -> int:
    """Ticks of CPU time that a process has spent in its own code."""
    return int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[11])


def test_columns_are_those_of_nccl_tests() -> None:
    wanted = Wanted("all_reduce", "bf16", "sum", -1, KB, 2)
    both = Found(wanted, {"symm": {"in_place": figure()}, "gloo": {"in_place": figure(25.0, 7)}}, {"mpi": "not here"})
    ours, theirs, note = columns.lines(both, True)
    assert " ".join(ours.split()) == "1024 512 bfloat16 sum -1 N/A N/A N/A N/A 10.00 0.10 0.10 0 symm 1.00"
    assert theirs.split()[-3:] == ["7", "gloo", "2.50"]
    assert note == "# mpi: not here"
    alone = Found(wanted, {"symm": {"in_place": figure(wrong=None)}})
    (line,) = columns.lines(alone, False)
    head = columns.headings(False)
    assert len(line) == len(head[1]) and line.endswith("N/A")
    assert head[1].split()[1:] == ["size", "count", "type", "redop", "root", *("time", "algbw", "busbw", "#wrong") * 2]
    assert columns.closing([both], True)[0] == "# Out of bounds values : 7 FAILED"
    assert columns.closing([alone], False)[0].endswith("not checked (-c 0)")
    assert columns.closing([], True) == ["# Out of bounds values : not checked (no row was measured)"]


def test_quantiles_are_values_of_the_list() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (quantile(values, 0.5), quantile(values, 0.99), quantile([7.0], 0.99)) == (50.0, 99.0, 7.0)


def test_a_run_of_all_operations_is_right_and_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, table, beside = tmp_path / "bench.json", tmp_path / "rows.csv", list[BackgroundLoad]()
    monkeypatch.setattr(launch, "running", lambda wanted: nullcontext(beside.append(wanted)))
    typed = ["--sizes", "20K", "-w", "1", "-o", "avg", "-r", "1", "--seconds", "4", "--background-load", "1"]
    typed += ["--backend", BACKEND, "--against", "gloo,nccl,vllm,flashinfer", "--device", "cpu", "--csv", str(table)]
    assert entry.main(["bench", *OPS, *typed, "--json", str(path)]) == 0
    found, said = json.loads(path.read_text()), capsys.readouterr().out
    for side, absent in zip(("nccl", "vllm", "flashinfer"), found["absent"], strict=True):
        assert absent == {"side": side, "reason": "serves CUDA tensors only"}
        assert said.count(f"{side}: serves CUDA tensors only") == 1, said
    assert beside == [BackgroundLoad(1)] and found["failure"] is None and found["machine"]["cores"] >= 1
    rows, here = read(path)
    assert list(dict.fromkeys(row.wanted.op for row in rows)) == list(OPS) and here["cpu"] == machine.cpu_model()
    assert [record for row in rows for record in row.records()] == found["rows"]
    for row in rows:
        assert set(row.sides) == {BACKEND, "gloo"} and row.other_cores is not None
        assert row.wanted.root == (1 if row.wanted.op in ROOTED else -1)
        for placement, figure in (pair for placed in row.sides.values() for pair in placed.items()):
            assert figure.wrong == 0 and figure.iterations >= 5 and figure.median_us > 0
            assert row.ratio("gloo", placement) > 0
    placed = {(row.wanted.op, placement) for row in rows for placement in row.sides[BACKEND]}
    assert ("reduce_scatter", "in_place") in placed and ("reduce", "out_of_place") not in placed
    with table.open() as file:
        assert len(list(csv.DictReader(file))) == len(found["rows"])


def test_the_time_of_a_call_is_known_without_untimed_calls(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    typed = ["--sizes", "4M", "-w", "0", "--seconds", "0.001", "--backend", BACKEND, "--device", "cpu"]
    assert entry.main(["bench", "reduce", *typed, "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    # The fewest samples of one call each: no time is left, and a call takes longer than one that is timed in batches.
    assert row["iterations"] <= 20


def test_a_short_run_says_what_out_of_place_is_and_that_the_machine_is_busy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called = []
    monkeypatch.setattr(os, "getloadavg", lambda: (1000.0, 0.0, 0.0))
    monkeypatch.setattr(launch, "measure", lambda world, sides, rows, *how: called.extend(rows) or iter([]))
    assert entry.main(["bench", "all_reduce", "-b", "8", "--device", "cpu"]) == 0
    assert "# warning: load average 1000.0 on " in capsys.readouterr().out and len(called) == 1
    text = [columns.opening(op, False) for op in ("all_reduce", "broadcast", "reduce")]
    assert "torch.ops.symm.all_reduce on symm, torch's functional all_reduce on others" in text[0][2]
    assert "functional broadcast" in text[1][2] and len(text[2]) == len(text[0]) - 1


def test_out_of_place_is_the_operator_of_symm_where_the_group_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    Group = namedtuple("Group", "group_name")
    made = []

    def reduced(tensor: torch.Tensor, op: str, group: str) -> torch.Tensor:
        made.append((op, group))
        return tensor

    monkeypatch.setattr(ops.torch.ops.symm, "all_reduce", reduced)
    monkeypatch.setattr(ops, "is_symm", lambda group, device: group.group_name == "ours")
    monkeypatch.setattr(ops.funcol, "all_reduce", lambda tensor, op, group: reduced(tensor, op, "functional"))
    monkeypatch.setattr(ops.funcol, "wait_tensor", lambda tensor: tensor)
    out_of_place, _ = ops.OPS["all_reduce"].builds
    assert out_of_place is not None
    work = out_of_place(ops.Shape(0, 2, torch.float32, 4, "prod"))
    ours, theirs = Group("ours"), Group("theirs")
    for group in (ours, theirs, ours):
        work.call(group)  # type: ignore[arg-type]
    assert made == [("product", "ours"), ("product", "functional"), ("product", "ours")]


def test_what_gpus_do_is_shown_in_the_same_columns() -> None:
    rows = [
        *request.rows(["all_reduce", "all_gather"], ["f32"], ["sum"], [0], [KB], 2),
        # A cell that not all sides measure, with exact values.
        *request.rows(["all_reduce", "reduce"], ["i8"], ["max"], [1], [KB], 2),
        *request.rows(["gather", "scatter", "broadcast"], ["f16"], ["sum"], [1], [KB], 2),
    ]
    how = cuda.How(calls=1, warmup=1, checks=2, device="cpu")
    found = list(cuda.run(rows, ["gloo", "torch"], how))
    assert [one for one in found if isinstance(one, Absent)] == [Absent("torch", "is not measured on cpu tensors")]
    measured: Sequence[Found] = [one for one in found if isinstance(one, Found)]
    assert [one.wanted for one in measured] == rows
    assert all(one.sides["symm"] and one.sides["gloo"] and not one.wrong for one in measured)


def test_a_wrong_result_on_gpus_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_symm.tools.bench.gpu import exact_inputs
    from torch_symm.tools.bench.gpu.inputs import Inputs, Place, Setting
    from torch_symm.tools.bench.gpu.record import Cell

    cell = Cell("all_reduce", "i32", 2, KB, KB, "max")
    assert exact_inputs.wanted(cell) and not exact_inputs.wanted(Cell("all_reduce", "f32", 2, KB, KB))
    nothing = torch.empty(0)
    inputs = Inputs(2, KB // 4, torch.int32, torch.device("cpu"), 1)
    call = exact_inputs.builder(cell)(Setting(0, inputs, nothing, None, Place(nothing, nothing)))  # type: ignore[arg-type]
    call.reset()
    # If no call was made, the tensor holds this rank's own values.
    assert "elements wrong: all_reduce: element" in str(call.check(1))
    assert call.check(2) is None


def test_the_limit_of_links_is_that_of_the_slowest_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {(0, 0): 900.0, (0, 1): 90.0, (1, 0): 80.0, (0, 2): 10.0}
    found = [{"from": one, "to": to, "gb_per_s": rate} for (one, to), rate in rates.items()]
    monkeypatch.setattr(links, "measured", lambda: Ended(found, "", 0))
    assert cuda._link_rate(2) == 80e9 and cuda._link_rate(3) == 10e9
    monkeypatch.setattr(links, "measured", lambda: Ended([{"error": "no GPU"}], "", 1))
    assert cuda._link_rate(2) == 0.0


def test_a_peer_that_hangs_ends_the_run_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notes: list[Progress] = []
    ranks: list[int] = []

    def noted(world: int) -> Progress:
        notes.append(Progress(world))
        return notes[-1]

    def stop_one() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (notes and notes[0].doing().steps > 8):
            time.sleep(0.02)
        ranks.extend(sorted(child.pid for child in multiprocessing.active_children() if child.pid))
        os.kill(ranks[1], signal.SIGSTOP)

    monkeypatch.setattr(launch, "Progress", noted)
    thread = threading.Thread(target=stop_one)
    thread.start()
    # Not the functional form, whose first call may spend seconds on imports.
    typed = ["bench", "reduce", "-b", "64K", "-e", "64K", "-n", "100000", "--limit", "3", "--device", "cpu"]
    assert entry.main(typed) == 1
    thread.join()
    said = capsys.readouterr().err
    assert "symm, reduce f32 64 KB: rank 1 of 2 stopped for 3 s (--limit)" in said, said
    for pid in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_who_stands_still_is_named() -> None:
    rows = request.rows(["all_reduce"], ["f32"], ["sum"], [0], [64 * KB], 2)
    assert launch._place(RankActivity(5, 0, 1), ["symm", "gloo"], rows) == "gloo, all_reduce f32 64 KB"
    assert launch._place(RankActivity(5, None, None), ["symm"], rows) == "before the first row"
    assert launch._who(RankActivity(5, 0, 1, behind=(1, 2)), (), 4) == "ranks 1, 2 of 4 did not get on"
    assert launch._who(RankActivity(5, 0, 1, behind=(1,)), (3,), 4) == "rank 3 of 4 stopped"
    assert launch._who(RankActivity(5, 0, 1), (), 4) == "none of 4 ranks got on"


def test_a_barrier_is_measured_but_not_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = request.rows(["barrier"], ["f32"], ["sum"], [0], [KB], 2)
    monkeypatch.setattr(launch, "measure", lambda *_: iter([Found(row, {"symm": {"in_place": figure()}})]))
    # matplotlib is not needed, because nothing is drawn.
    monkeypatch.setattr(command, "_check_outputs", lambda *_: None)
    picture = tmp_path / "barrier.svg"
    assert entry.main(["bench", "barrier", "-g", "2", "--device", "cpu", "--plot", str(picture)]) == 0
    assert "--plot: no row with a size was measured" in capsys.readouterr().out and not picture.exists()


@needs_matplotlib
def test_curves_of_all_sides_are_drawn(tmp_path: Path) -> None:
    rows = [
        Found(Wanted("all_reduce", "f32", "sum", -1, size, 2), {"symm": {"in_place": figure()}, "gloo": {}}, {}, 5.0)
        for size in (KB, 4 * KB)
    ]
    for ending in plot.ENDINGS:
        plot.draw(rows, "here", tmp_path / f"run{ending}")
    with pytest.raises(ValueError, match="no row with a size was measured"):
        plot.draw([], "here", tmp_path / "none.svg")
    run = tmp_path / "run.json"
    here = {"date": "2026-11-28", "cpu": "a CPU", "cores": 2, "torch": "2.15"}
    run.write_text(json.dumps({"machine": here, "rows": [record for row in rows for record in row.records()]}))
    assert entry.main(["bench", "--draw", str(run), "--plot", str(tmp_path / "again.svg")]) == 0
    assert "2026-11-28, a CPU, 2 cores, torch 2.15" in (tmp_path / "again.svg").read_text()
    page = (tmp_path / "run.html").read_text()
    assert "limit of memory" in page and "out-of-place" in page


def drawn(sizes: list[int], folder: Path) -> str:
    """A page of a run of every operation."""
    rows = [
        Found(wanted, {"symm": {"in_place": figure(600.0 + wanted.size / KB)}, "gloo": {"in_place": figure(900.0)}})
        for wanted in request.rows(list(PLACEMENTS), ["f32"], ["sum"], [0], sizes, 2)
    ]
    plot.draw(rows, "here", folder / "all.html")
    return (folder / "all.html").read_text()


@needs_matplotlib
def test_a_page_names_operations_and_has_plain_numbers_and_one_size_is_bars(tmp_path: Path) -> None:
    page = drawn([KB, 4 * KB], tmp_path)
    table = page[page.index("<pre>") :]
    assert [line[2:] for line in table.splitlines() if line[2:] in PLACEMENTS] == list(PLACEMENTS)
    picture = page[: page.index("<pre>")]
    assert "500" in picture and "1,000" in picture
    assert "10^" not in picture and "times 10" not in picture and "× 10" not in picture
    page = drawn([KB], tmp_path)
    # Two plots for all operations, each bar with its value.
    assert page.count('id="axes_') == 2
    assert page.count(">601<") == len(PLACEMENTS) and page.count(">900<") == len(PLACEMENTS)


def test_ticks_enclose_the_range_and_are_few() -> None:
    assert axes.ticks(601, 901) == [500, 1000]
    assert axes.ticks(4, 45) == [2, 5, 10, 20, 50]
    assert axes.ticks(1, 1) == [1, 2] and axes.ticks(5, 5) == [5, 10]
    assert axes.ticks(0.3, 90_000) == [10.0**power for power in range(-1, 6)]
    assert [axes.plain(number) for number in (0.5, 600, 20_000, 1e6)] == ["0.5", "600", "20,000", "1,000,000"]

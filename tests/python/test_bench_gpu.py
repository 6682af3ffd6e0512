"""The GPU benchmark's arithmetic and checks on CPU tensors, and one short run of it against Gloo."""

from __future__ import annotations

import io
import json
from pathlib import Path

import gpu_collectives as command
import gpu_host
import pytest
import torch
from gpu_table import progress_line, write_tables
from torch_symm.tools.bench.gpu import inputs
from torch_symm.tools.bench.gpu.calls import OPS
from torch_symm.tools.bench.gpu.cell import calls_for
from torch_symm.tools.bench.gpu.contenders import cpu_sides, is_timeout
from torch_symm.tools.bench.gpu.inputs import Inputs
from torch_symm.tools.bench.gpu.launch import Options, cells
from torch_symm.tools.bench.gpu.rank import turns_for
from torch_symm.tools.bench.gpu.record import Cell, Figure, Measured

CPU = torch.device("cpu")
KB, MB = 1 << 10, 1 << 20


def whole(given: Inputs, rank: int) -> torch.Tensor:
    tensor = torch.empty(given.count, dtype=given.dtype)
    given.fill(tensor, rank)
    return tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("start", [0, 100, 777])
def test_sums_and_copies_are_compared_across_pieces(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, start: int
) -> None:
    monkeypatch.setattr(inputs, "PIECE", 256)
    given = Inputs(3, 1000, dtype, CPU, seed=5)
    tensors = [whole(given, rank) for rank in range(3)]
    assert not torch.equal(tensors[0], tensors[1])
    total = sum(tensor.double() for tensor in tensors)[start:].to(dtype)
    assert given.compare_sum(total, start) is None
    assert given.compare_sum(total * 9, start, calls=3) is None
    assert given.compare_copy(tensors[2][start:], 2, start) is None
    total[200] += 1
    assert given.compare_sum(total, start).startswith(f"1 elements wrong, the first is 200 of {1000 - start}: ")
    total[200] = float("nan")
    assert "nan" in given.compare_sum(total, start)
    tensors[2][start + 3] += 1
    assert "the first is 3 of" in given.compare_copy(tensors[2][start:], 2, start)


def test_cells_are_rounded_up_to_whole_shares() -> None:
    options = Options(
        3, "cpu", cpu_sides, ("symm",), ("all_reduce", "all_gather", "barrier"), ("bf16", "f32"), (KB,), 1, 1
    )
    found = [(cell.op, cell.dtype, cell.bytes) for cell in cells(options)]
    assert found == [
        ("all_reduce", "bf16", 1024),
        ("all_reduce", "f32", 1024),
        ("all_gather", "bf16", 1026),
        ("all_gather", "f32", 1032),
        ("barrier", "bf16", 0),
    ]


def test_calls_and_turns() -> None:
    assert [calls_for(size) for size in (0, KB, 4 * MB - 1, 4 * MB)] == [20, 20, 20, 5]
    assert turns_for(7, elapsed=10, budget=100, done=0, total=100) == 7
    assert turns_for(7, elapsed=60, budget=100, done=50, total=100) == 3
    assert turns_for(7, elapsed=54, budget=100, done=50, total=100) == 7
    assert turns_for(2, elapsed=99, budget=100, done=0, total=100) == 2
    assert turns_for(7, elapsed=100, budget=100, done=99, total=100) == 0


def test_the_best_peer_is_never_our_own() -> None:
    figures = {
        "symm": Figure(graph_us=10.0, eager_us=20.0),
        "symm pool": Figure(graph_us=5.0, eager_us=10.0),
        "nccl": Figure(graph_us=30.0, eager_us=15.0),
        "nccl window": Figure(graph_us=20.0, eager_us=30.0, host_us=9.0),
        "torch one-shot": Figure(note="NotImplementedError: no"),
        "torch low contention": Figure(graph_us=25.0, eager_us=12.5),
    }
    measured = Measured(Cell("all_reduce", "bf16", 4, KB, KB), 20, figures)
    assert measured.best_peer("graph") == ("nccl window", 20.0)
    assert measured.best_peer("eager") == ("torch low contention", 12.5)
    assert (measured.ratio("symm", "graph"), measured.ratio("symm pool", "graph")) == (2.0, 4.0)
    assert measured.ratio("symm", "eager") == 0.625
    assert measured.ratio("symm", "host") is None
    assert "torch one-shot: NotImplementedError: no" in progress_line(measured, 1, 2)
    text = io.StringIO()
    write_tables([measured], text)
    assert "nccl window" in text.getvalue() and "2.00" in text.getvalue()


def test_host_time_is_told_apart() -> None:
    figures = {
        "symm": Figure(eager_us=20.0, host_us=12.0, group_us=9.0, backend_us=7.5, launch_us=5.0, operator_us=10.0),
        "nccl": Figure(eager_us=30.0, host_us=25.0, group_us=22.0, backend_us=21.0),
        "torch two-shot": Figure(eager_us=10.0),
    }
    other = {"nccl": Figure(eager_us=30.0, host_us=26.0)}
    cells = [("all_reduce", figures), ("broadcast", other)]
    text = io.StringIO()
    write_tables([Measured(Cell(op, "bf16", 4, 64 * KB, 64 * KB), 20, found) for op, found in cells], text)
    lines = [line.split() for line in text.getvalue().splitlines()]
    assert ["all_reduce", "symm", "12.00", "3.00", "1.50", "7.50", "5.00", "10.00"] in lines
    assert ["all_reduce", "nccl", "25.00", "3.00", "1.00", "21.00"] in lines
    assert lines[-1] == ["broadcast", "nccl", "26.00"]


@pytest.mark.parametrize(
    "error",
    [
        "SymmTimeoutError: all_reduce #3 did not end within 20 s",
        "RuntimeError: [../pair.cc:534] Timed out waiting 20000ms for recv operation to complete",
        "GroupFailed: ErrorType.TIMEOUT",
        "DistBackendError: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)",
    ],
)
def test_timeouts_are_recognised(error: str) -> None:
    assert is_timeout(error)
    assert not is_timeout(error.replace("ime", "one").replace("IME", "ONE"))


def test_without_gpus_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit):
        command.main([])
    assert "--device cpu needs none" in capsys.readouterr().err


@pytest.mark.usefixtures("forked")
def test_a_short_run_on_cpu_tensors_with_host_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bench.json"
    monkeypatch.setattr(command, "QUICK_TURNS", 1)
    typed = ["--device", "cpu", "--quick", "--sizes", "64K", "--ops", ",".join(OPS), "--json", str(path)]
    assert command.main(typed) == 0
    found = json.loads(path.read_text())
    assert len(found["cells"]) == found["cells_wanted"] == len(OPS)
    assert found["failure"] is None and found["absent"] == []
    hosted = set()
    for measured in found["cells"]:
        assert set(measured["figures"]) == {"symm", "gloo"}
        for side, figure in measured["figures"].items():
            assert figure["eager_us"] > 0 and figure["note"] is None
            if measured["cell"]["op"] == "all_reduce":
                entrances = ("group_us", "backend_us", *(["operator_us"] if side == "symm" else []))
                assert all(figure[entrance] > 0 for entrance in entrances)
            hosted |= {measured["cell"]["op"]} if figure["host_us"] else set()
    assert hosted == set(gpu_host.OPS)


def test_host_times_alone_are_asked_for() -> None:
    options, _ = command.options_from(["--device", "cpu", "--host"])
    assert options.ops == gpu_host.OPS == ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
    assert (options.sizes, options.dtypes, options.sides) == ((64 * KB,), ("bf16",), ("symm", "gloo"))

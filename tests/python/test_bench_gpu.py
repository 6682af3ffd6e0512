"""The GPU benchmark on CPU tensors: its arithmetic and checks, short runs against Gloo, and runs that are disturbed.

Sides hang, exit or time out, the time is over, or a user ends the run.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import gpu_collectives as command
import gpu_host
import pytest
import torch
import torch.distributed as dist
from gpu_shared import write_json
from gpu_table import progress_line, write_tables
from ranks import backend_of, spawn_rank
from torch_symm.launch import ranks as launched
from torch_symm.launch.watch import Progress, RankActivity
from torch_symm.tools.bench.gpu import inputs, launch
from torch_symm.tools.bench.gpu.calls import OPS
from torch_symm.tools.bench.gpu.cell import calls_for
from torch_symm.tools.bench.gpu.contenders import ORDINARY, GpuSide, Maker, Makers, cpu_sides, is_timeout
from torch_symm.tools.bench.gpu.inputs import GpuCall, Inputs, Setting
from torch_symm.tools.bench.gpu.launch import GpuOptions, cells
from torch_symm.tools.bench.gpu.rank import turns_for
from torch_symm.tools.bench.gpu.record import Cell, GpuFigure, Measured

CPU = torch.device("cpu")
KB, MB = 1 << 10, 1 << 20
pytestmark = pytest.mark.usefixtures("forked")


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
    ops = ("all_reduce", "all_gather", "barrier")
    found = cells(GpuOptions(3, "cpu", cpu_sides, ("symm",), ops, ("bf16", "f32"), (KB,), 1, 1))
    assert [(cell.op, cell.dtype, cell.bytes) for cell in found] == [
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
        "symm": GpuFigure(graph_us=10.0, eager_us=20.0),
        "symm pool": GpuFigure(graph_us=5.0, eager_us=10.0),
        "nccl": GpuFigure(graph_us=30.0, eager_us=15.0),
        "nccl window": GpuFigure(graph_us=20.0, eager_us=30.0, host_us=9.0),
        "torch one-shot": GpuFigure(note="NotImplementedError: no"),
        "torch low contention": GpuFigure(graph_us=25.0, eager_us=12.5),
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
        "symm": GpuFigure(eager_us=20.0, host_us=12.0, group_us=9.0, backend_us=7.5, launch_us=5.0, operator_us=10.0),
        "nccl": GpuFigure(eager_us=30.0, host_us=25.0, group_us=22.0, backend_us=21.0),
        "torch two-shot": GpuFigure(eager_us=10.0),
    }
    other = {"nccl": GpuFigure(eager_us=30.0, host_us=26.0)}
    cells = [("all_reduce", figures), ("broadcast", other)]
    text = io.StringIO()
    write_tables([Measured(Cell(op, "bf16", 4, 64 * KB, 64 * KB), 20, found) for op, found in cells], text)
    lines = [line.split() for line in text.getvalue().splitlines()]
    assert ["all_reduce", "symm", "12.00", "3.00", "1.50", "7.50", "5.00", "10.00"] in lines
    assert ["all_reduce", "nccl", "25.00", "3.00", "1.00", "21.00"] in lines
    assert lines[-1] == ["broadcast", "nccl", "26.00"]


def test_timeouts_are_recognised() -> None:
    for error in (
        "SymmTimeoutError: all_reduce #3 did not end within 20 s",
        "RuntimeError: [../pair.cc:534] Timed out waiting 20000ms for recv operation to complete",
        "GroupFailed: ErrorType.TIMEOUT",
        "DistBackendError: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)",
    ):
        assert is_timeout(error) and not is_timeout(error.replace("ime", "one").replace("IME", "ONE"))


def test_without_gpus_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit):
        command.main([])
    assert "--device cpu needs none" in capsys.readouterr().err


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


def broken(name: str, op: str, run: Callable[[Setting], None], timeout_s: float = 20.0) -> Maker:
    """A side of symm whose rank 1 runs ``run`` instead of ``op``."""

    def build(at: Setting) -> GpuCall:
        usual = OPS[op].build(at)
        return GpuCall(usual.reset, (lambda: run(at)) if at.rank == 1 else usual.run, usual.check)

    def make(device: torch.device, size: int) -> GpuSide:
        group = dist.new_group(backend="symm", timeout=timedelta(seconds=20))
        backend_of(group)._set_default_timeout(timedelta(seconds=timeout_s))
        usual = cpu_sides()["symm"](device, size)
        return GpuSide(name, group, usual.place, builders={**ORDINARY, op: build}, keep=[usual])

    return make


def die_when_made(_device: torch.device, _size: int) -> GpuSide:
    if dist.get_rank() == 1:
        os._exit(8)
    raise RuntimeError("not made here either")


#: The reason why each side is lost.
REASONS = {
    "cannot be made": "while it was made: process 1 terminated with exit code 8",
    "dies": "at all_gather bf16 1 KB: process 1 terminated with exit code 7",
    "hangs": "at all_gather bf16 1 KB: nothing happened for 6 s",
    "times out": "given up: SymmTimeoutError: ",
    "dies alone": "at all_reduce bf16 1 KB: process 1 terminated with exit code 7",
}


def some_broken() -> Mapping[str, Maker]:
    """The function with which each rank makes its own sides."""
    return {
        **cpu_sides(),
        "cannot be made": die_when_made,
        "dies": broken("dies", "all_gather", lambda _: os._exit(7)),
        "hangs": broken("hangs", "all_gather", lambda _: time.sleep(1000)),
        "times out": broken("times out", "all_gather", lambda _: None, timeout_s=3.0),
    }


def alone() -> Mapping[str, Maker]:
    """A side that exits."""
    return {"dies alone": broken("dies alone", "all_reduce", lambda _: os._exit(7))}


@pytest.mark.parametrize("sides", [some_broken, alone])
def test_broken_sides_do_not_cost_the_run_but_show_in_its_status(
    sides: Makers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, measure, broken = tmp_path / "bench.json", launch.measure, sides().keys() - cpu_sides().keys()
    monkeypatch.setattr(command, "cpu_sides", sides)
    monkeypatch.setattr(command, "measure", lambda options: measure(replace(options, turns=1, still_s=6.0)))
    ops = ["all_reduce", "all_gather", "barrier"]
    typed = ["--device", "cpu", "--quick", "--ops", ",".join(ops), "--sizes", "1K", "--json", str(path)]
    assert command.main(typed) == 1
    found, said = json.loads(path.read_text()), capsys.readouterr()
    assert {lost["side"] for lost in found["absent"]} == broken, said
    for lost in found["absent"]:
        assert lost["reason"].startswith(REASONS[lost["side"]]) and lost["lost"]
        assert f"left out: {lost['side']}: {REASONS[lost['side']]}" in said.out
    if sides is alone:
        assert found["failure"] == "no side is left" and "failed: no side is left" in said.err
        return
    assert found["failure"] is None and [cell["cell"]["op"] for cell in found["cells"]] == ops
    for cell in found["cells"]:
        for kind in broken:
            figure = cell["figures"].pop(kind, {"eager_us": None, "note": "is absent"})
            works = cell["cell"]["op"] == "all_reduce" and kind != "cannot be made"
            assert (figure["eager_us"] is not None, figure["note"] is None) == (works, works)
        assert set(cell["figures"]) == {"symm", "gloo"}
        assert all(figure["note"] is None and figure["eager_us"] > 0 for figure in cell["figures"].values())


def test_the_rank_that_got_farthest_tells_what_they_were_at() -> None:
    progress = Progress(2)
    assert progress.doing() == RankActivity(0, None, None)
    progress.enter(0, 4, 1)
    assert progress.doing() == RankActivity(1, 4, 1, behind=(1,))
    progress.enter(1, 4, 1)
    progress.enter(1, 4, None)
    assert progress.doing() == RankActivity(3, 4, None, behind=(0,))
    progress.enter(0, 4, None)
    assert progress.doing().behind == ()
    progress.enter(0, None, 2)
    assert progress.doing() == RankActivity(5, None, 2, behind=(1,))


def test_when_the_time_is_over_the_rest_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bench.json"
    typed = ["--device", "cpu", "--quick", "--sizes", "1K,64K", "--seconds", "0.001", "--json", str(path)]
    assert command.main(typed) == 0
    found = json.loads(path.read_text())
    assert found["cells"] == [] and found["cells_wanted"] == 13 and found["failure"] is None
    assert "0 of 13 cells" in (said := capsys.readouterr().out) and "the time was over" in said


def run_until_it_is_ended(_rank: int, _world: int, path: Path, output: int) -> None:
    """Runs the command, which measures two cells and then waits until it is ended."""
    measure = launch.measure

    def two(options: launch.GpuOptions) -> Iterator[object]:
        for number, message in enumerate(measure(options), 1):
            yield message
            while number == 2:
                # pause() would sleep on after a signal that arrives just before it.
                time.sleep(0.01)

    for stream in (1, 2):
        os.dup2(output, stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    # SIGINT may be ignored, if a shell has started the tests in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    command.measure = two  # type: ignore[assignment]
    launched.ANEW = "fork"
    status = command.main(["--device", "cpu", "--quick", "--sizes", "1K", "--json", str(path)])
    sys.stdout.flush()
    os._exit(status)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_ended_run_leaves_what_it_has(tmp_path: Path, number: signal.Signals) -> None:
    path, (read, write) = tmp_path / "bench.json", os.pipe()
    pid = spawn_rank(run_until_it_is_ended, 0, 1, path, write)
    os.close(write)
    with os.fdopen(read) as output:
        assert any(line.startswith("[2/7]") for line in output)
        # The line is printed before the file is written.
        while len(json.loads(path.read_text())["cells"]) < 2:
            time.sleep(0.01)
        os.kill(pid, number)
        rest, status = output.read(), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    found = json.loads(path.read_text())
    assert len(found["cells"]) == 2
    if number == signal.SIGKILL:
        assert status == -number and found["failure"] == "not finished"
    else:
        assert status == 1 and found["failure"] == "interrupted"
        assert "all_reduce, 2 ranks" in rest and "2 of 7 cells" in rest


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "found.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 2} and os.listdir(path.parent) == ["found.json"]

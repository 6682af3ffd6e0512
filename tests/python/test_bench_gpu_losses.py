"""The GPU benchmark on CPU tensors when sides hang, die or time out, its time is over, or somebody ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch_symm.bench.gpu.__main__ as command_line
from torch_symm.bench.gpu.calls import OPS, Call, Setting
from torch_symm.bench.gpu.launch import Options, measure
from torch_symm.bench.gpu.record import Absent, Measured, write_json
from torch_symm.bench.gpu.sides import ORDINARY, Maker, Side, cpu_sides
from torch_symm.bench.progress import Doing, Progress, StandsStill

KB = 1 << 10


def broken(op: str, run: Callable[[Setting], None], timeout_s: float = 20.0) -> Maker:
    """A side of symm, of which rank 1 does ``run`` instead of ``op``."""

    def build(at: Setting) -> Call:
        usual = OPS[op].build(at)
        return Call(usual.reset, (lambda: run(at)) if at.rank == 1 else usual.run, usual.check)

    def make(device: torch.device, size: int) -> Side:
        group = dist.new_group(backend="symm", timeout=timedelta(seconds=timeout_s))
        usual = cpu_sides()["symm"](device, size)
        return Side("broken", group, usual.place, builders={**ORDINARY, op: build}, keep=[usual])

    return make


def die(_at: Setting) -> None:
    os._exit(7)


def hang(_at: Setting) -> None:
    time.sleep(1000)


def stay_away(_at: Setting) -> None:
    pass


def die_when_made(_device: torch.device, _size: int) -> Side:
    if dist.get_rank() == 1:
        os._exit(8)
    raise RuntimeError("not made here either")


def sides_of_which_one_dies() -> Mapping[str, Maker]:
    return {**cpu_sides(), "broken": broken("all_gather", die)}


def sides_of_which_one_hangs() -> Mapping[str, Maker]:
    return {**cpu_sides(), "broken": broken("all_gather", hang)}


def sides_of_which_one_times_out() -> Mapping[str, Maker]:
    return {**cpu_sides(), "broken": broken("all_gather", stay_away, timeout_s=1.0)}


def sides_of_which_one_cannot_be_made() -> Mapping[str, Maker]:
    return {**cpu_sides(), "broken": die_when_made}


def only_one_that_dies() -> Mapping[str, Maker]:
    return {"broken": broken("all_reduce", die)}


def run(makers: Callable[[], Mapping[str, Maker]]) -> tuple[list[Measured], list[Absent]]:
    options = Options(
        world=2,
        device="cpu",
        makers=makers,
        sides=tuple(makers()),
        ops=("all_reduce", "all_gather", "broadcast"),
        dtypes=("f32",),
        sizes=(KB, 8 * KB),
        seconds=100.0,
        turns=1,
        still_s=10.0,
    )
    found = list(measure(options))
    return [each for each in found if isinstance(each, Measured)], [each for each in found if isinstance(each, Absent)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("makers", "reason"),
    [
        (sides_of_which_one_dies, "at all_gather f32 1 KB: process 1 terminated with exit code 7"),
        (sides_of_which_one_hangs, "at all_gather f32 1 KB: nothing happened for 10 s"),
        (sides_of_which_one_times_out, "given up: SymmTimeout: "),
        (sides_of_which_one_cannot_be_made, "while it was made: process 1 terminated with exit code 8"),
    ],
)
def test_a_broken_side_does_not_cost_the_run(makers: Callable[[], Mapping[str, Maker]], reason: str) -> None:
    cells, absent = run(makers)
    assert [(cell.cell.op, cell.cell.size) for cell in cells] == [
        (op, size) for op in ("all_reduce", "all_gather", "broadcast") for size in (KB, 8 * KB)
    ]
    (lost,) = absent
    assert lost.side == "broken" and lost.reason.startswith(reason) and lost.lost
    for cell in cells:
        for side in ("symm", "gloo"):
            figure = cell.figures[side]
            assert figure.note is None and figure.eager_us is not None
        broken = cell.figures.get("broken")
        if cell.cell.op == "all_reduce":
            assert makers is sides_of_which_one_cannot_be_made or (broken is not None and broken.eager_us is not None)
        else:
            assert broken is None or (broken.eager_us is None and broken.note is not None)


@pytest.mark.slow
def test_a_lost_side_shows_in_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(command_line, "cpu_sides", sides_of_which_one_dies)
    before = signal.getsignal(signal.SIGTERM)
    path = tmp_path / "bench.json"
    try:
        requested = ["--device", "cpu", "--quick", "--ops", "all_gather,barrier", "--sizes", "1K", "--json", str(path)]
        assert command_line.main(requested) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    found = json.loads(path.read_text())
    assert len(found["cells"]) == 2 and found["failure"] is None
    assert [(side["side"], side["lost"]) for side in found["absent"]] == [("broken", True)]
    assert "left out: broken: at all_gather bf16 1 KB: process 1 terminated" in capsys.readouterr().out


def test_without_any_side_the_run_has_failed() -> None:
    with pytest.raises(StandsStill, match="no side is left"):
        run(only_one_that_dies)


def test_the_rank_that_got_farthest_tells_what_they_were_at() -> None:
    progress = Progress(2)
    assert progress.doing() == Doing(0, None, None)
    progress.enter(0, 4, 1)
    assert progress.doing() == Doing(1, 4, 1, behind=(1,))
    progress.enter(1, 4, 1)
    progress.enter(1, 4, None)
    assert progress.doing() == Doing(3, 4, None, behind=(0,))
    progress.enter(0, 4, None)
    assert progress.doing().behind == ()
    progress.enter(0, None, 2)
    assert progress.doing() == Doing(5, None, 2, behind=(1,))


COMMAND = (sys.executable, "-m", "torch_symm.bench.gpu", "--device", "cpu", "--quick", "--sizes", "1K,64K")


@pytest.mark.slow
def test_when_the_time_is_over_the_rest_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    command = [*COMMAND, "--seconds", "0.001", "--json", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(path.read_text())
    assert found["cells"] == [] and found["cells_wanted"] == 13 and found["failure"] is None
    assert "0 of 13 cells" in result.stdout and "the time was over" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_ended_run_leaves_what_it_has(tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "bench.json"

    def attentive() -> None:
        # Whoever runs the tests in the background may have it ignored.
        signal.signal(number, signal.SIG_DFL)

    command = [*COMMAND, "--json", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=attentive) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("[2/13]"):
                break
        process.send_signal(number)
        rest = process.stdout.read()
        assert process.wait(60) == 1
    found = json.loads(path.read_text())
    assert found["failure"] == "interrupted" and 2 <= len(found["cells"]) < 13
    assert "all_reduce, 2 ranks" in rest and f"{len(found['cells'])} of 13 cells" in rest


@pytest.mark.slow
def test_a_killed_launcher_leaves_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    command = [*COMMAND, "--json", str(path)]
    # Its orphans complain.
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("[3/13]"):
                break
        process.kill()
    found = json.loads(path.read_text())
    assert found["failure"] == "not finished" and 2 <= len(found["cells"]) < 13


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "found.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 2} and os.listdir(path.parent) == ["found.json"]

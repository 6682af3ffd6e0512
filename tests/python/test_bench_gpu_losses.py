"""The GPU benchmark on CPU tensors when sides hang, exit or time out, its time is over, or a user ends it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import gpu_collectives as command_line
import pytest
import torch
import torch.distributed as dist
from gpu_shared import write_json
from ranks import spawn_rank
from torch_symm.launch import ranks as launched
from torch_symm.launch.watch import Progress, RankActivity
from torch_symm.tools.bench.gpu import launch
from torch_symm.tools.bench.gpu.calls import OPS
from torch_symm.tools.bench.gpu.contenders import ORDINARY, Maker, Makers, Side, cpu_sides
from torch_symm.tools.bench.gpu.inputs import Call, Setting

pytestmark = pytest.mark.usefixtures("forked")


def broken(name: str, op: str, run: Callable[[Setting], None], timeout_s: float = 20.0) -> Maker:
    """A side of symm whose rank 1 runs ``run`` instead of ``op``."""

    def build(at: Setting) -> Call:
        usual = OPS[op].build(at)
        return Call(usual.reset, (lambda: run(at)) if at.rank == 1 else usual.run, usual.check)

    def make(device: torch.device, size: int) -> Side:
        group = dist.new_group(backend="symm", timeout=timedelta(seconds=timeout_s))
        usual = cpu_sides()["symm"](device, size)
        return Side(name, group, usual.place, builders={**ORDINARY, op: build}, keep=[usual])

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


BROKEN: Mapping[str, Maker] = {
    "dies": broken("dies", "all_gather", die),
    "hangs": broken("hangs", "all_gather", hang),
    "times out": broken("times out", "all_gather", stay_away, timeout_s=1.0),
    "cannot be made": die_when_made,
    "dies alone": broken("dies alone", "all_reduce", die),
}


#: The reason why each side is lost.
REASONS = {
    "cannot be made": "while it was made: process 1 terminated with exit code 8",
    "dies": "at all_gather bf16 1 KB: process 1 terminated with exit code 7",
    "hangs": "at all_gather bf16 1 KB: nothing happened for 6 s",
    "times out": "given up: SymmTimeoutError: ",
    "dies alone": "at all_reduce bf16 1 KB: process 1 terminated with exit code 7",
}


def some_broken() -> Mapping[str, Maker]:
    """A function that each rank gets, to make its own sides."""
    return {**cpu_sides(), **{kind: BROKEN[kind] for kind in ("cannot be made", "dies", "hangs", "times out")}}


def alone() -> Mapping[str, Maker]:
    """A side that exits."""
    return {"dies alone": BROKEN["dies alone"]}


@pytest.mark.parametrize("sides", [some_broken, alone])
def test_broken_sides_do_not_cost_the_run_but_show_in_its_status(
    sides: Makers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, measure, broken = tmp_path / "bench.json", launch.measure, sides().keys() - cpu_sides().keys()
    monkeypatch.setattr(command_line, "cpu_sides", sides)
    monkeypatch.setattr(command_line, "measure", lambda options: measure(replace(options, turns=1, still_s=6.0)))
    ops = ["all_reduce", "all_gather", "barrier"]
    typed = ["--device", "cpu", "--quick", "--ops", ",".join(ops), "--sizes", "1K", "--json", str(path)]
    assert command_line.main(typed) == 1
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
    assert command_line.main(typed) == 0
    found = json.loads(path.read_text())
    assert found["cells"] == [] and found["cells_wanted"] == 13 and found["failure"] is None
    assert "0 of 13 cells" in (said := capsys.readouterr().out) and "the time was over" in said


def run_until_it_is_ended(_rank: int, _world: int, path: Path, output: int) -> None:
    """Runs the command, which measures two cells and then waits until it is ended."""
    measure = launch.measure

    def two(options: launch.Options) -> Iterator[object]:
        for number, message in enumerate(measure(options), 1):
            yield message
            while number == 2:
                signal.pause()

    for stream in (1, 2):
        os.dup2(output, stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    # The shell starts it in the background, where the signal may be ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    command_line.measure = two  # type: ignore[assignment]
    launched.ANEW = "fork"
    status = command_line.main(["--device", "cpu", "--quick", "--sizes", "1K", "--json", str(path)])
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

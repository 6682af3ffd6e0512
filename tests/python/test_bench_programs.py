"""The programs in ``benches`` for single questions: a decoder's layers, first calls of fresh processes, Intel MPI."""

from __future__ import annotations

import json
import re
from pathlib import Path

import decoder
import first_call
import mpi_torch as mpi
import pytest
from decoder_rank import Finished, distinct_layers
from torch_symm.launch.watch import StalledError
from torch_symm.tools.bench import request
from torch_symm.tools.bench.ops import PLACEMENTS
from torch_symm.tools.bench.request import Wanted

KB, MB = 1 << 10, 1 << 20
pytestmark = pytest.mark.usefixtures("forked")


def test_figures_are_medians_and_differences_by_all_reduce() -> None:
    turns = {"without": [7000.0, 7100.0, 9000.0], "symm": [7740.0, 7900.0, 7500.0], "nccl": []}
    found = Finished(8, 128 << 10, turns, {"fused": "wrong"})
    assert found.us("without") == 7100.0 and found.us("symm") == 7740.0 and found.us("nccl") is None
    assert found.more_us("symm", 160) == 4.0
    line = decoder.row(found, ("without", "symm", "nccl", "fused"), layers=80)
    assert line == ["8", "128 KB", "7100.0", "7740.0", "-", "-", "4.00", "-", "-"]
    # There is no other side to compare with.
    assert Finished(8, 8, {"symm": [1.0]}, {}).more_us("symm", 160) is None


def test_weights_exceed_the_cache_between_two_uses() -> None:
    for layer_bytes in (10 * MB, 75 * MB, 302 * MB):
        layers = distinct_layers(layer_bytes, 50 * MB)
        assert layers >= 2 and layers * layer_bytes >= 4 * 50 * MB


def test_arguments_name_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    task, path = decoder.task_from(["--device", "cpu", "--batches", "2,16", "--sides", "without,fused", "--quick"])
    assert (task.world, task.batches, task.layers, task.sides) == (2, (2, 16), 80, ("without", "fused"))
    assert task.turns == 5 and path == Path("out/bench-decoder.json")
    wrong = (["--sides", "nccl"], ["--ranks", "3"], ["--batches", "1,x"], ["--turns", "17"], ["--layers", "0"])
    for arguments in wrong:
        with pytest.raises(SystemExit):
            decoder.task_from(["--device", "cpu", *arguments])
        assert arguments[0].lstrip("-") in capsys.readouterr().err


def test_every_side_gives_the_same_rows(tmp_path: Path) -> None:
    path = tmp_path / "decoder.json"
    code = decoder.main(["--device", "cpu", "--layers", "2", "--batches", "1,3", "--turns", "1", "--json", str(path)])
    found = json.loads(path.read_text())
    assert code == 0 and found["failure"] is None, found
    assert [batch["batch"] for batch in found["batches"]] == [1, 3]
    for batch in found["batches"]:
        assert batch["notes"] == {} and batch["bytes"] == batch["batch"] * 512
        assert list(batch["turns"]) == ["without", "symm", "gloo", "fused"]
        assert all(len(turns) == 1 and turns[0] > 0 for turns in batch["turns"].values())


def test_first_calls_of_fresh_processes(tmp_path: Path) -> None:
    path = tmp_path / "first.json"
    assert first_call.main(["--device", "cpu", "--starts", "2", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert [figure["kind"] for figure in found["figures"]] == ["symm cold", "symm warm", "gloo"]
    for figure in found["figures"]:
        assert len(figure["starts"]) == 2
        for step, name in enumerate(("init_s", "first_s", "second_s")):
            times = [start[step] for start in figure["starts"]]
            assert min(times) > 0 and figure[name] == pytest.approx(sum(times) / 2)
    assert found["failures"] == {}


def test_a_kind_of_start_that_fails_does_not_cost_the_others() -> None:
    found = list(first_call.measure(2, "cpu", ("nobody", "gloo"), starts=2))
    assert [kind for kind, _ in found] == ["nobody", "gloo", "gloo"]
    assert isinstance(found[0][1], str) and "nobody" in found[0][1]
    assert all(len(spent) == 3 and min(spent) > 0 for _, spent in found[1:])


def test_without_mpi_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mpi, "missing", lambda: f"needs mpi4py, which is not installed: {mpi.NEEDS}")
    with pytest.raises(SystemExit) as ended:
        mpi.main([])
    assert ended.value.code == 2
    assert "pip install impi-rt mpi4py" in capsys.readouterr().err


def test_rows_that_mpi_lacks_are_told() -> None:
    assert "no type for bf16" in str(mpi.unmeasured(Wanted("broadcast", "bf16", "none", 0, 8, 2)))
    assert "no reduction avg" in str(mpi.unmeasured(Wanted("reduce", "f32", "avg", 0, 8, 2)))
    assert mpi.unmeasured(Wanted("all_gather", "f32", "none", -1, 8, 2)) is None


@pytest.mark.skipif(mpi.missing() is not None, reason=str(mpi.missing()))
def test_mpi_is_measured_in_the_same_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert mpi.main(["all", "-b", "4K", "-n", "2", "-w", "1", "-d", "f32,bf16"]) == 0
    said = capsys.readouterr().out
    assert {line[2:] for line in said.splitlines() if line.startswith("# ")} >= set(PLACEMENTS)
    rows = [line for line in said.splitlines() if re.search(r"  mpi( |$)", line)]
    assert len(rows) >= len(PLACEMENTS) and all(" float " in row for row in rows)
    assert "Out of bounds values : 0 OK" in said and said.count("# mpi: MPI has no type for bf16") == len(PLACEMENTS)


def test_mpi_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "mpiexec"
    program.write_text("#!/bin/sh\necho starting\nexec sleep 100\n")
    program.chmod(0o700)
    monkeypatch.setattr(mpi, "_mpiexec", lambda: str(program))
    rows = request.rows(["all_reduce"], ["f32"], ["sum"], [0], [KB], 2)
    with pytest.raises(StalledError, match=r"mpi, all_reduce f32 1 KB: nothing for 0.5 s"):
        mpi.measure(2, rows, 1, 1, 1, 0.5)
    program.write_text("#!/bin/sh\necho out of luck\nexit 3\n")
    with pytest.raises(RuntimeError, match="mpi ended with status 3: out of luck"):
        mpi.measure(2, rows, 1, 1, 1, 5.0)

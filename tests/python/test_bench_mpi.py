"""Intel MPI in the rows of ``torch-symm bench``, where it is installed; and how a program that hangs is ended."""

from __future__ import annotations

import re
from pathlib import Path

import mpi_torch as mpi
import pytest
from torch_symm.launch.watch import StalledError
from torch_symm.tools.bench import request
from torch_symm.tools.bench.ops import PLACEMENTS
from torch_symm.tools.bench.request import Wanted

KB = 1 << 10


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
    assert {line.split()[-1] for line in said.splitlines() if line.startswith("# ") and line[2:] in PLACEMENTS} == set(
        PLACEMENTS
    )
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

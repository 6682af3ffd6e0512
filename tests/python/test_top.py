"""``SYMM_STATS``, ``torch-symm top`` and ``print(torch_symm.stats())``: calls of all ranks, and who was waited for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
import torch_symm
from ranks import run_ranks
from torch_symm import __main__ as entry
from torch_symm._trace.dump import Dump, parse
from torch_symm._trace.report import merge
from torch_symm.top import files, live, table

WORLD = 2


def call(number: int, started: int, ended: int, op: str = "all_reduce", size: int = 1000) -> dict[str, Any]:
    """One of rank's calls, as a dump has it; times in µs."""
    return {
        "group": 1, "number": number, "op": op, "call": op, "sequence": number, "dtype": "float32", "itemsize": 4,
        "elements": size, "peer": None, "far": False, "even": True, "bytes_in": 4 * size, "bytes_out": 4 * size,
        "device": "cpu", "timeout_ms": 1000, "created_ns": started * 1000, "started_ns": started * 1000,
        "ended_ns": ended * 1000, "state": "completed", "outcome": None,
    }  # fmt: skip


def dump(rank: int, calls: list[dict[str, Any]]) -> Dump:
    members = [{"rank": one, "global_rank": one, "pid": 100 + one} for one in range(WORLD)]
    group = {
        "id": 1, "memory": 7, "name": "default", "rank": rank, "members": members, "joined_ns": 1, "left_ns": None,
        "begun": len(calls), "launched": None, "failure": None, "peers": [],
    }  # fmt: skip
    head = {
        "format": "torch-symm trace",
        "version": 1,
        "library": "0",
        "host": "here",
        "boot_id": "b",
        "pid": 100 + rank,
    }
    return parse(
        {**head, "calls_made": 9, "calls_kept": 2000, "written_ns": 10**9, "groups": [group], "calls": calls}, "x"
    )


def test_the_rank_that_was_waited_for_is_named() -> None:
    early = [call(number, 1000 * number, 1000 * number + 500) for number in (1, 2, 3, 4)]
    late = [call(number, 1000 * number + (400 if number < 4 else 1), 1000 * number + 500) for number in (1, 2, 3, 4)]
    (line,) = table.lines(merge([dump(0, early), dump(1, late)]))
    assert (line.op, line.size, line.calls, line.total) == ("all_reduce", 4096, 8, 8 * 4000)
    assert line.straggler == (1, 0.75)
    # Of 4 × 500 µs and 3 × 100 + 499 µs, rank 0 waited 3 × 400 + 1.
    assert line.waiting == pytest.approx(1201 / 2799)
    said = table.render([dump(0, early), dump(1, late)])
    assert "the last 8 calls of 2 processes on here" in said
    assert "rank 1 (75%)" in said and "43%" in said


def test_one_rank_alone_tells_no_waiting() -> None:
    (line,) = table.lines(merge([dump(0, [call(1, 10, 20)])]))
    assert line.waiting is None and line.straggler is None
    assert line.us == [10.0]


def test_lines_are_by_size_and_those_that_took_longest_are_first() -> None:
    calls = [call(1, 10, 20, size=1), call(2, 30, 90, size=1024), call(3, 100, 105, "barrier", 0)]
    assert [(line.op, line.size) for line in table.lines(merge([dump(0, calls)]))] == [
        ("all_reduce", 4096),
        ("all_reduce", 4),
        ("barrier", 0),
    ]


def printed(rank: int, world: int) -> str:
    for _ in range(3):
        dist.all_reduce(torch.ones(1000))
    counted = torch_symm.stats()
    assert counted == {} and json.dumps(counted) == "{}"
    return str(counted)


def test_statistics_are_a_table_when_printed() -> None:
    for said in run_ranks(printed, WORLD):
        heading, names, *rows = said.splitlines()
        assert heading.startswith("the last 3 calls of this process on ")
        assert names.split()[:3] == ["collective", "bytes", "calls"]
        assert rows[0].split()[:4] == ["all_reduce", "3.91", "KiB", "3"] or rows[0].split()[:4] == [
            "all_reduce", "4", "KiB", "3",
        ]  # fmt: skip


def watched(rank: int, world: int, place: str) -> tuple[int, str]:
    """Rank 1 is late at every call; rank 0 looks with ``top`` while the job runs."""
    said, status = "", 0
    until = time.monotonic() + 2.2
    more = torch.ones(1)
    while more.item():
        if rank == 1:
            time.sleep(0.01)
        dist.all_reduce(torch.ones(1000))
        more.fill_(time.monotonic() < until)
        dist.broadcast(more, 0)
    # The files of both are there until the processes end.
    ranks.meet("watched", rank, world)
    if rank == 0:
        command = [sys.executable, "-m", "torch_symm", "top", str(os.getpid()), "--json", "--dir", place]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        said, status = result.stdout + result.stderr, result.returncode
    ranks.meet("seen", rank, world)
    return status, said


def test_a_running_job_shows_its_straggler(tmp_path: Path) -> None:
    found = run_ranks(watched, WORLD, str(tmp_path), env={"SYMM_STATS": "1", "SYMM_TRACE_DIR": str(tmp_path)})
    status, said = found[0]
    assert status == 0, said
    seen = json.loads(said)
    assert len(seen["pids"]) == WORLD
    line = next(line for line in seen["lines"] if line["op"] == "all_reduce")
    assert line["straggler"] == 1 and line["last_share"] > 0.5
    assert line["waiting"] > 0.1
    assert "all_reduce" in found.logs[0] and "rank 1 (" in found.logs[0]
    assert "collective" not in found.logs[1]


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ([], "no running process leaves statistics in"),
        ([str(os.getpid())], "start the job with SYMM_STATS=2"),
        (["4194304000"], "there is no process 4194304000"),
    ],
)
def test_what_is_missing_is_said(
    typed: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        entry.main(["top", *typed, "--dir", str(tmp_path)])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.slow
def test_a_file_is_removed_at_the_end_of_its_process(tmp_path: Path) -> None:
    code = "import torch_symm; from torch_symm.top import live; from torch_symm._native import load;"
    code += "own, path = live.write(load()); print(path, path.exists())"
    environment = {**os.environ, "SYMM_TRACE_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment, check=True
    )
    path, existed = result.stdout.split()
    assert existed == "True" and Path(path).parent == tmp_path
    assert not Path(path).exists()


def test_the_folder_is_that_of_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYMM_TRACE_DIR", "/somewhere")
    assert files.folder() == Path("/somewhere")
    monkeypatch.setenv("SYMM_TRACE_DIR", "relative")
    monkeypatch.setenv("TMPDIR", "/scratch")
    assert files.folder() == Path(f"/scratch/torch-symm-{os.geteuid()}")


def test_only_the_first_rank_prints() -> None:
    assert live._first(dump(0, []))
    assert not live._first(dump(1, []))

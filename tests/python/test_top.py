"""``SYMM_STATS_INTERVAL``, ``torch-symm top`` and ``print(torch_symm.stats())``: calls of all ranks, and the awaited
ranks."""

from __future__ import annotations

import atexit
import io
import json
import os
import time
from contextlib import redirect_stdout
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import dumps
import pytest
import ranks
import torch
import torch.distributed as dist
import torch_symm
from ranks import run_ranks
from torch_symm import __main__ as entry
from torch_symm._live import files, publisher, summary, table
from torch_symm._native import load
from torch_symm._trace.dump import Dump, parse
from torch_symm._trace.report import merge

WORLD = 2


def call(number: int, started: int, ended: int, op: str = "all_reduce", size: int = 1000) -> dict[str, Any]:
    """One of a rank's calls; times in µs."""
    times = {"started_ns": started * 1000, "ended_ns": ended * 1000}
    return dumps.call(number, started * 1000, **times, op=op, elements=size, bytes_in=4 * size, bytes_out=4 * size)


def dump(rank: int, calls: list[dict[str, Any]]) -> Dump:
    return parse(dumps.dump(*calls, rank=rank), "x")


def test_the_rank_that_was_waited_for_is_named() -> None:
    early = [call(number, 1000 * number, 1000 * number + 500) for number in (1, 2, 3, 4)]
    late = [call(number, 1000 * number + (400 if number < 4 else 1), 1000 * number + 500) for number in (1, 2, 3, 4)]
    (line,) = table.lines(merge([dump(0, early), dump(1, late)]))
    assert (line.op, line.size, line.calls, line.total) == ("all_reduce", 4096, 8, 8 * 4000)
    assert line.straggler == (1, 0.75)
    # Of 4 × 500 µs and 3 × 100 + 499 µs, rank 0 waited for 3 × 400 + 1 µs.
    assert line.waiting == pytest.approx(1201 / 2799)
    said = table.render([dump(0, early), dump(1, late)])
    assert "the last 8 calls of 2 processes on here" in said
    assert "rank 1 (75%)" in said and "43%" in said


def test_lines_are_by_size_and_those_that_took_longest_are_first() -> None:
    calls = [call(1, 10, 20, size=1), call(2, 30, 90, size=1024), call(3, 100, 105, "barrier", 0)]
    found = table.lines(merge([dump(0, calls)]))
    assert [(line.op, line.size, line.us) for line in found] == [
        ("all_reduce", 4096, [60.0]),
        ("all_reduce", 4, [10.0]),
        ("barrier", 0, [5.0]),
    ]
    # The calls of one rank say nothing about waiting.
    assert all(line.waiting is None and line.straggler is None for line in found)


def test_gathers_of_multi_node_groups_count_the_ranks_of_all_nodes() -> None:
    data = [dumps.dump(call(1, 10, 20, "gather"), call(2, 30, 40), rank=rank) for rank in range(WORLD)]
    for one in data:
        one["groups"][0].update(other_nodes='node "b" (ranks 2 and 3)', world=4, global_ranks=[0, 1, 2, 3])
    seen = [parse(one, "x") for one in data]
    assert {(line.op, line.size, line.calls, line.compared) for line in table.lines(merge(seen))} == {
        ("gather", 16384, 2, 1),
        ("all_reduce", 4096, 2, 1),
    }


@pytest.mark.ranks(WORLD)
def test_statistics_are_a_table_when_printed_with_the_sizes_of_the_benchmark(rank: int) -> None:
    for _ in range(3):
        dist.all_reduce(torch.ones(1000))
    counted = torch_symm.stats()
    assert counted == {"zero_copy": 0, "inter_node": {}} and json.loads(json.dumps(counted)) == counted
    heading, names, *rows = str(counted).splitlines()
    assert len(rows) == 1
    assert heading.startswith("the last 3 calls of this process on ")
    assert names.split()[:3] == ["collective", "bytes", "calls"]
    assert rows[0].split()[:4] == ["all_reduce", "4", "KiB", "3"]

    dist.all_gather_into_tensor(torch.empty(8), torch.ones(4))
    dist.reduce_scatter_tensor(torch.empty(4), torch.ones(8))
    dist.gather(torch.ones(4), [torch.empty(4) for _ in range(WORLD)] if rank == 0 else None)
    dist.scatter(torch.empty(4), [torch.ones(4) for _ in range(WORLD)] if rank == 0 else None)
    dist.all_to_all_single(torch.empty(8), torch.ones(8))
    dist.all_reduce(torch.ones(8))
    lines = table.lines(merge([parse(torch_symm.trace(), "this process")]))
    ops = ("all_gather", "reduce_scatter", "gather", "scatter", "all_to_all", "all_reduce")
    assert {(line.op, line.size) for line in lines} == {("all_reduce", 4096), *((op, 32) for op in ops)}


def watched(rank: int, world: int, place: str) -> tuple[int, str]:
    """Rank 1 is late at every call; rank 0 calls ``top`` while the job runs."""
    said, status = "", 0
    until = time.monotonic() + 2.2
    more = torch.ones(1)
    while more.item():
        if rank == 1:
            time.sleep(0.01)
        dist.all_reduce(torch.ones(1000))
        more.fill_(time.monotonic() < until)
        dist.broadcast(more, 0)
    # Both ranks' files exist until the processes end.
    ranks.meet("watched", rank, world)
    if rank == 0:
        with redirect_stdout(io.StringIO()) as output:
            status = entry.main(["top", str(os.getpid()), "--json", "--dir", place])
        said = output.getvalue()
    ranks.meet("seen", rank, world)
    return status, said


def test_a_running_job_shows_its_straggler(tmp_path: Path) -> None:
    found = run_ranks(watched, WORLD, str(tmp_path), env={"SYMM_STATS_INTERVAL": "1", "SYMM_TRACE_DIR": str(tmp_path)})
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
        ([str(os.getpid())], "start the job with SYMM_STATS_INTERVAL=2"),
        (["4194304000"], "there is no process 4194304000"),
    ],
)
def test_what_is_missing_is_said(
    typed: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Files of no process.
    (tmp_path / "stats-².json").touch()
    (tmp_path / "stats-x.json").touch()
    with pytest.raises(SystemExit) as ended:
        entry.main(["top", *typed, "--dir", str(tmp_path)])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def counted(rank: int, world: int, backend: str) -> None:
    """More calls than a trace keeps. The rank exits like a program, but without the exit functions of its parent."""
    atexit._clear()
    if backend == "gloo":
        torch_symm.replace_gloo()
    ranks.init(rank, world, backend)
    tensor = torch.ones(1000)
    for _ in range(2100):
        dist.all_reduce(tensor)
    dist.gather(tensor, [torch.empty(1000) for _ in range(world)] if rank == 0 else None)
    dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)
    _, written = publisher.write(load())
    assert written.exists()
    dist.destroy_process_group()
    atexit._run_exitfuncs()
    assert not written.exists()


@pytest.mark.parametrize("backend", ["symm", "gloo"])
def test_a_job_ends_with_the_counts_of_all_its_calls_and_without_files(backend: str, tmp_path: Path) -> None:
    """Also if symm stands in the place of Gloo."""
    env = {"SYMM_STATS_INTERVAL": "3600", "SYMM_TRACE_DIR": str(tmp_path)}
    said = run_ranks(counted, WORLD, backend, backend=None, env=env).logs[0].splitlines()
    (head,) = [number for number, line in enumerate(said) if "calls of rank" in line]
    assert said[head].startswith("all 2102 calls of rank 0 (pid ")
    assert said[head + 1].split("  ")[0] == "collective"
    found = {line.split()[0]: line.split() for line in said[head + 2 : head + 5]}
    assert found["all_reduce"][1:6] == ["4", "KiB", "cpu", "2100", "8.01"]
    assert found["gather"][1:6] == ["8", "KiB", "cpu", "1", "7.81"]
    assert found["send"][1:6] == ["4", "KiB", "cpu", "1", "3.91"]
    total, mean, longest, rate = map(float, found["all_reduce"][-4:])
    assert 0 < mean <= longest and total > 0 and rate > 0


def ends_in_multiprocessing(place: str) -> None:
    os.environ.update(SYMM_STATS_INTERVAL="3600", SYMM_TRACE_DIR=place)
    dist.init_process_group("symm", store=torch_symm.MemoryStore(), rank=0, world_size=1)
    _, written = publisher.write(load())
    assert written.parent == Path(place) and written.exists()


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_process_of_multiprocessing_leaves_no_file(method: str, tmp_path: Path) -> None:
    # The other tests of this process use the same fork server. They need torch in it (launch/ranks.py).
    get_context("forkserver").set_forkserver_preload(["torch", "torch.distributed.tensor"])
    child = get_context(method).Process(target=ends_in_multiprocessing, args=(str(tmp_path),))
    child.start()
    child.join(120)
    assert child.exitcode == 0 and list(tmp_path.iterdir()) == []


def test_counts_without_times_have_none() -> None:
    line = {"op": "all_reduce", "device": "cuda", "size": 8, "calls": 3, "bytes": 24, "timed": 0, "ns": 0}
    timed = {"timed": 2, "ns": 3000, "longest_ns": 2000}
    short = {**line, "op": "barrier", "device": "cpu", "size": 0, "bytes": 0, **timed}
    totals = {"since_ns": 0, "lines": [{**line, "longest_ns": 0}, short]}
    text = summary.render({"totals": totals, "written_ns": 2 * 10**9, "pid": 7, "host": "here"}, 4)
    assert [" ".join(line.split()) for line in text.splitlines()] == [
        "all 6 calls of rank 4 (pid 7) on here, 2.0 s",
        "collective size device calls total total ms mean µs longest µs GB/s",
        "barrier 0 B cpu 3 0 B 0.0 1.5 2.0 -",
        "all_reduce 8 B cuda 3 24 B - - - -",
    ]


def test_only_private_folders_and_files_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, name = tmp_path / "traces", files.name(os.getpid())
    folder.mkdir(mode=0o700)
    file = folder / name
    file.write_text(json.dumps(dumps.dump(pid=os.getpid())))
    file.chmod(0o600)

    def top(place: Path) -> str:
        status = entry.main(["top", str(os.getpid()), "--once", "--dir", str(place)])
        said = capsys.readouterr()
        assert status == (2 if said.err else 0)
        return said.out + said.err

    assert "no call has been made" in top(folder)
    (tmp_path / "link").symlink_to(folder)
    assert "link" in top(tmp_path / "link") and "no call" not in top(tmp_path / "link")
    folder.chmod(0o777)
    assert "traces can be written by others (mode 777)" in top(folder)
    folder.chmod(0o700)
    file.chmod(0o622)
    assert f"{name} can be written by others (mode 622)" in top(folder)
    file.rename(folder / "moved")
    (folder / "moved").chmod(0o600)
    file.symlink_to("moved")
    assert name in top(folder) and "no call" not in top(folder)
    file.unlink()
    os.mkfifo(file, 0o600)
    assert "is not a regular file" in top(folder)
    if os.geteuid() == 0:
        os.chown(folder, 12345, -1)
        assert "traces belongs to user 12345, this process to 0" in top(folder)

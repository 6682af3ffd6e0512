"""The flight recorder of multi-node groups: a dump has the phase of a call, its rail and the awaited node."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
import torch_symm
from launch import on_nodes, run_nodes
from torch.distributed.flight_recorder.fr_trace import main as analyse
from torch_symm.__main__ import main


def phases(state: str) -> list[tuple[str, str]]:
    """Operation and phase of this process's calls in ``state`` that have a phase."""
    calls = torch_symm.trace()["calls"]
    return [(call["op"], call["phase"]) for call in calls if call["state"] == state and call["phase"]]


def stop(rank: int, world_size: int, count: int) -> tuple[str, list[tuple[str, str]], list[tuple[str, str]]] | None:
    """A call while the second node is stopped: its error, its phase before the error, and its phase after it."""
    dist.all_reduce(torch.ones(count))
    pids: list[Any] = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    assert phases("completed") == [], "a call that is over is in no phase"
    ranks.meet("begun", rank, world_size)
    if rank >= 2:
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    try:
        work = dist.all_reduce(torch.ones(count), async_op=True)
        until = time.monotonic() + 1
        # Only the last poll counts, because the first phases are short.
        while time.monotonic() < until:
            seen = phases("started")
            time.sleep(0.05)
        assert work is not None
        with pytest.raises(torch_symm.SymmTimeoutError) as caught:
            work.wait()
        return str(caught.value), seen, phases("failed")
    finally:
        ranks.meet("over", rank, 2)
        if rank == 0:
            for pid in pids[2:]:
                os.kill(pid, signal.SIGCONT)


@pytest.mark.timed
@pytest.mark.parametrize("count", [4, 1 << 20])
def test_a_stopped_node_is_named_with_its_rail(count: int, capsys: pytest.CaptureFixture[str]) -> None:
    results = run_nodes(stop, (2, 2), count, timeout=2)
    waiting = 'rail 0, waiting for node "b" (ranks 2 and 3)'
    text, seen, failed = results[0]
    assert 'on rail 0, waiting for node "b" (ranks 2 and 3)' in text, text
    assert seen == failed == [("all_reduce", waiting)]
    # Rank 1 waits for rank 0, which compares calls with the other node.
    _, seen, failed = results[1]
    assert seen == failed == [("all_reduce", "inside the node")]
    (path,) = results.dumps[0]
    (group,) = json.loads(path.read_text())["groups"]
    assert group["other_nodes"] == 'node "b" (ranks 2 and 3)' and group["world"] == 4
    capsys.readouterr()
    assert main(["trace", str(path)]) == 0
    report = capsys.readouterr().out
    assert f"rank 0: all_reduce({count} × float32, {4 * count} bytes, SUM) #" in report, report
    assert f": {waiting}, for " in report, report


@pytest.mark.timed
@pytest.mark.parametrize(
    ("layout", "late", "node"),
    [((1, 1, 1), 2, 'node "c" (rank 2)'), ((1, 1, 1), 0, 'node "a" (rank 0)'), ((2, 1, 1), 2, 'node "b" (rank 2)')],
    ids=str,
)
@on_nodes(timeout=2)
def test_of_several_nodes_the_late_one_is_named(
    rank: int, world_size: int, layout: tuple[int, ...], late: int, node: str
) -> None:
    dist.all_reduce(torch.ones(4))
    ranks.meet("begun", rank, world_size)
    if rank != late:
        work = dist.all_reduce(torch.ones(4), async_op=True)
        time.sleep(1)
        seen = phases("started")
        assert work is not None
        with pytest.raises(torch_symm.SymmTimeoutError) as caught:
            work.wait()
        # Any rank may fail first.
        assert f"on rail 0, waiting for {node}" in str(caught.value), caught.value
        waiting = "inside the node" if (layout, rank) == ((2, 1, 1), 1) else f"rail 0, waiting for {node}"
        assert seen == [("all_reduce", waiting)], (rank, seen)
    ranks.meet("over", rank, world_size)


def numbers() -> None:
    for _ in range(3):
        dist.all_reduce(torch.ones(50_000))
    calls = torch_symm.trace()["calls"][-3:]
    first = calls[0]
    assert [(call["op"], call["number"] - first["number"], call["sequence"] - first["sequence"]) for call in calls] == [
        ("all_reduce", place, place) for place in range(3)
    ], calls
    assert all(call["phase"] is None and call["algorithm"] == "two_level" for call in calls), calls


def test_what_serves_a_call_inside_the_node_has_no_entry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def written(rank: int, world_size: int) -> str:
        numbers()
        return json.dumps(torch_symm.trace())

    path = tmp_path / "trace.json"
    path.write_text(run_nodes(written, (2, 2))[0])
    assert main(["trace", str(path)]) == 0
    report = capsys.readouterr().out
    (line,) = (line for line in report.splitlines() if "rank 0 (pid" in line)
    assert re.search(r"\): collective #(\d+) begun; last all_reduce\(.*\) #\1: completed", line), report


def pending(rank: int, world_size: int) -> str:
    """The trace of a rank while rank 3 is late for a call. Before, node b has exchanged a message."""
    dist.all_gather_into_tensor(torch.empty(4 * world_size), torch.ones(4))
    if rank >= 2:
        dist.send(torch.ones(1), 3) if rank == 2 else dist.recv(torch.ones(1), 2)
    works = [] if rank == 3 else [dist.all_reduce(torch.ones(4), async_op=True)]
    while works and torch_symm.trace()["calls"][-1]["state"] != "started":
        time.sleep(0.01)
    ranks.meet("begun", rank, world_size)
    trace = json.dumps(torch_symm.trace())
    ranks.meet("traced", rank, world_size)
    works = works or [dist.all_reduce(torch.ones(4), async_op=True)]
    works[0].wait()
    return trace


def test_ranks_have_their_numbers_in_the_group_on_every_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    paths = [tmp_path / f"rank{rank}.json" for rank in range(4)]
    for path, written in zip(paths, run_nodes(pending, (2, 2)), strict=True):
        path.write_text(written)
    first, last = (json.loads(path.read_text()) for path in (paths[0], paths[3]))
    group = last["groups"][0]
    assert (group["rank"], group["world"], group["global_ranks"]) == (3, 4, [0, 1, 2, 3])
    assert [member["rank"] for member in group["members"]] == [2, 3] == [peer["rank"] for peer in group["peers"]]
    assert group["memory"] == first["groups"][0]["memory"]
    assert [call["peer"] for call in last["calls"] if call["op"] == "recv"] == [2]

    assert main(["trace", *map(str, paths)]) == 0
    report = capsys.readouterr().out
    assert 'group "default" of 4 ranks; dumps of ranks 0, 1, 2 and 3\n' in report and report.count("group ") == 1, (
        report
    )
    assert re.search(r"rank 3 has not begun all_reduce\(.*; ranks 0, 1 and 2 waited", report), report
    assert main(["trace", str(paths[2])]) == 0
    report = capsys.readouterr().out
    assert 'group "default" of 4 ranks; dumps of rank 2\n' in report, report
    assert re.search(r"  rank 3 \(pid \d+\): no dump; .*, as others saw\n", report), report
    assert "  ranks 0 and 1: no dump of their nodes\n" in report and "not begun" not in report, report

    folder = tmp_path / "converted"
    assert main(["trace", "--torch", str(folder), *map(str, paths)]) == 0
    analyse([str(folder)])
    output = "\n".join(caplog.messages) + capsys.readouterr().out
    assert "missing ranks: {3}" in output and "has errors" not in output and "mismatch in" not in output, output


@on_nodes(2, 2)
def test_calls_on_one_node_have_no_phases() -> None:
    group = torch_symm.intra_node_group()
    dist.all_reduce(torch.ones(4), group=group)
    trace = torch_symm.trace()
    assert trace["calls"][-1]["phase"] is None and trace["groups"][-1]["other_nodes"] is None
    assert trace["groups"][0]["timeout_ms"] == 60_000, "not the time that was left to join"

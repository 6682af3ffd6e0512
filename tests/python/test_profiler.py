"""The events that ``torch_symm.annotate_profiler_trace`` adds to traces of ``torch.profiler``."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import dumps
import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch_symm
from dumps import call
from ranks import meet, run_ranks
from torch.profiler import ProfilerActivity, profile
from torch_symm import __main__ as entry

LATE = 0.03


def traced(rank: int, world: int) -> dict[str, list[dict[str, Any]]]:
    """The arguments of each event of a profile in which the last rank is late for one call, by name in order."""
    long, short = torch.ones(1 << 16), torch.ones(4)
    gathered = torch.empty(world * 4)
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        dist.all_reduce(short)
        if rank == world - 1:
            time.sleep(LATE)
        dist.all_reduce(long)
        first, second = dist.all_reduce(short, async_op=True), dist.all_reduce(long, async_op=True)
        assert first is not None and second is not None
        second.wait()
        first.wait()
        dist.all_gather_into_tensor(gathered, short)
        funcol.wait_tensor(funcol.all_reduce(short, "sum", dist.group.WORLD))
        dist.barrier()
    path = ranks.scratch / f"profile-{rank}.json"
    recorded.export_chrome_trace(str(path))
    before = json.loads(path.read_text())
    assert torch_symm.annotate_profiler_trace(path) == 7
    after = json.loads(path.read_text())
    assert len(before["traceEvents"]) == len(after["traceEvents"])
    dist.all_reduce(short)
    assert "waited_ns" not in {name for name, value in torch_symm.trace()["calls"][-1].items() if value is not None}
    found: dict[str, list[dict[str, Any]]] = {}
    for event in sorted(after["traceEvents"], key=lambda event: float(event.get("ts", 0))):
        if str(event.get("name")).startswith("symm:"):
            found.setdefault(event["name"], []).append(event["args"])
    meet("annotated", rank, world)
    return found


@pytest.mark.timed
@pytest.mark.parametrize("world", [2, 4])
def test_each_event_has_algorithm_bytes_bandwidth_and_who_was_waited_for(world: int) -> None:
    results = run_ranks(traced, world)
    for rank in range(world):
        found = results[rank]
        sums = found["symm:all_reduce"]
        assert [one["bytes"] for one in sums] == [16, 1 << 18, 16, 1 << 18, 16], "sync, async and functional"
        assert [one["algorithm"] for one in sums] == ["inline", "staged", "inline", "staged", "inline"]
        assert [one["sequence"] for one in sums] == sorted(one["sequence"] for one in sums)
        assert {one["group"] for one in sums} == {"default"}
        for one in sums:
            assert one["algbw_gb_per_s"] == pytest.approx(one["bytes"] / one["us"] / 1e3, abs=1e-3)
            assert one["busbw_gb_per_s"] == pytest.approx(one["algbw_gb_per_s"] * 2 * (world - 1) / world, abs=2e-3)
            assert 0 <= one["waited_us"] <= one["us"]
        late = sums[1]
        if rank < world - 1:
            assert late["waited_for"] == world - 1 and late["waited_us"] > 0.5 * LATE * 1e6
        else:
            assert late["waited_us"] < 0.5 * LATE * 1e6
        (gathered,), (barrier,) = found["symm:all_gather"], found["symm:barrier"]
        assert gathered["bytes"] == 16 * world and gathered["call"].startswith("all_gather(")
        assert "busbw_gb_per_s" not in barrier and barrier["algorithm"] == "inline"


def dump(folder: Path, *calls: dict[str, Any]) -> Path:
    path = folder / "trace-7-rank0.json"
    path.write_text(json.dumps(dumps.dump(*calls, pid=7)))
    return path


def event(start_us: float, dur_us: float, name: str = "symm:all_reduce", pid: int = 7) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": pid, "tid": 1, "ts": start_us, "dur": dur_us}


def test_overlapping_and_coalesced_calls_find_their_events(tmp_path: Path) -> None:
    dumped = dump(
        tmp_path,
        call(1, 1_005_000, waited_ns=2000, waited_for=1),
        call(2, 1_020_000, sequence=None, state="failed", ended_ns=None),
        call(3, 2_005_000),
        call(4, 2_006_000, waited_ns=50, waited_for=0),
        call(5, 900_000_000),
    )
    # Two events that overlap, one that has two calls, one of another process, and one without a call.
    events = [event(1000, 90), event(1015, 90), event(2000, 10), event(1000, 90, pid=8), event(5000, 1)]
    path = tmp_path / "profile.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": [*events, {"ph": "M", "name": "process_name"}], "baseTimeNanoseconds": 0}, file)
    assert torch_symm.annotate_profiler_trace(path, [dumped]) == 3
    with gzip.open(path, "rt") as file:
        seen = [one.get("args") for one in json.load(file)["traceEvents"]]
    assert [args and args["sequence"] if args and "sequence" in args else None for args in seen[:3]] == [1, None, 3]
    assert (seen[0]["waited_us"], seen[0]["waited_for"], seen[0]["us"]) == (2.0, 1, 0.1)
    assert "us" not in seen[1], "a call that failed has no bandwidth"
    assert (seen[2]["bytes"], seen[2]["call"]) == (32, "all_reduce(4) and 1 more")
    assert seen[3:] == [None, None, None]
    assert [file.name for file in tmp_path.iterdir() if "tmp" in file.name] == []


def test_the_figures_of_a_multi_node_group_count_the_ranks_of_all_nodes(tmp_path: Path) -> None:
    ops = ("all_reduce", "broadcast", "send", "gather")
    data = dumps.dump(*(call(n, n * 1_000_000 + 5000, op=op) for n, op in enumerate(ops, 1)), pid=7)
    data["groups"][0].update(other_nodes='node "b" (ranks 2 and 3)', world=4, global_ranks=[0, 1, 2, 3])
    dumped, path = tmp_path / "trace-7-rank0.json", tmp_path / "profile.json"
    dumped.write_text(json.dumps(data))
    path.write_text(json.dumps({"traceEvents": [event(n * 1000, 90, f"symm:{op}") for n, op in enumerate(ops, 1)]}))
    assert torch_symm.annotate_profiler_trace(path, [dumped]) == len(ops)
    figures = ("bytes", "algbw_gb_per_s", "busbw_gb_per_s")
    seen = [[one["args"].get(name) for name in figures] for one in json.loads(path.read_text())["traceEvents"]]
    assert seen == [[16, 0.16, 0.24], [16, 0.16, 0.16], [16, 0.16, 0.16], [64, 0.64, 0.48]]


def test_the_command_annotates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dumped, path = dump(tmp_path, call(1, 1_005_000)), tmp_path / "profile.json"
    path.write_text(json.dumps({"traceEvents": [event(1000, 90)]}))
    assert entry.main(["trace", "--annotate", str(path), str(dumped)]) == 0
    assert "profile.json: 1 events have got arguments" in capsys.readouterr().out
    assert json.loads(path.read_text())["traceEvents"][0]["args"]["algorithm"] == "inline"
    path.write_text("[]")
    assert entry.main(["trace", "--annotate", str(path), str(dumped)]) == 2
    assert "it is no trace of torch.profiler" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", '{"traceEvents": 1}', '{"traceEvents": [{"ph": "X", "name": "symm:x"}]}'])
def test_what_is_no_trace_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"no trace of torch\.profiler"):
        torch_symm.annotate_profiler_trace(path)
    with pytest.raises(OSError, match="profile"):
        torch_symm.annotate_profiler_trace(tmp_path / "no-profile.json")
    path.write_text('{"traceEvents": []}')
    with pytest.raises(ValueError, match="dump"):
        torch_symm.annotate_profiler_trace(path, [path])


def test_sizes_are_those_of_nccl_tests() -> None:
    from torch_symm._trace.dump import _call

    one = _call(call(1, 5, op="gather"))
    assert (one.size(4), _call(call(1, 5)).size(4)) == (64, 16)

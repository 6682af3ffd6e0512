"""The flight recorder (P24): always on, written when a group fails, and read to name the missing rank and call (P6)."""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import stat
import time
from datetime import timedelta
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
import torch_symm
from dumps import dump
from ranks import meet, on_threads, run_ranks
from torch.distributed.flight_recorder.fr_trace import main as analyse
from torch_symm.__main__ import main


def zeros(count: int) -> torch.Tensor:
    return torch.zeros(count)


def report(capsys: pytest.CaptureFixture[str], *arguments: Path | str) -> str:
    assert main(["trace", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def killed(rank: int, world: int) -> int:
    dist.all_reduce(zeros(3))
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(torch_symm.SymmPeerError) as error:
        while True:
            dist.all_reduce(zeros(1000))
    failure = torch_symm.trace()["groups"][0]["failure"]
    assert (failure["kind"], failure["message"]) == ("SymmPeerError", str(error.value))
    # Without this wait, the later dump would show that the rank of the earlier one has left.
    meet("reported", rank, 2)
    return os.getpid()


def test_p24_a_death_is_written_down_without_a_switch(capsys: pytest.CaptureFixture[str]) -> None:
    results = run_ranks(killed, 3, expect_killed=(2,))
    for rank in (0, 1):
        (path,) = results.dumps[rank]
        assert path.name == f"trace-{results[rank]}-rank{rank}.json", "told once"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        dump = json.loads(path.read_text())
        (group,) = dump["groups"]
        assert dump["pid"] == results[rank] == group["members"][rank]["pid"]
        assert group["failure"]["kind"] == "SymmPeerError"
        assert "has ended" in group["peers"][2]["absence"]
        assert {peer["absence"] for peer in group["peers"][:2]} == {None}
        first, *_, last = dump["calls"]
        assert (first["op"], first["sequence"], first["state"], first["elements"]) == ("all_reduce", 1, "completed", 3)
        assert first["created_ns"] <= first["started_ns"] < first["ended_ns"] <= time.time_ns()
        assert (last["call"], last["state"]) == ("all_reduce(1000 × float32, 4000 bytes, SUM)", "failed")
        assert last["outcome"] == "SymmPeerError"
        text = report(capsys, path)
        assert f"rank 2 (pid {group['members'][2]['pid']})" in text and "no dump; has ended" in text, text
        assert "failed, as rank" in text and group["failure"]["message"] in text, text
        assert json.loads(report(capsys, "--json", path))["groups"]


def stopped(rank: int, world: int) -> None:
    dist.all_reduce(zeros(3))
    pids = [None] * world
    dist.all_gather_object(pids, os.getpid())
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises(torch_symm.SymmTimeoutError):
        dist.all_gather_into_tensor(zeros(30), zeros(10))
    (ranks.scratch / f"done-{rank}").touch()
    if rank == 0:
        while not (ranks.scratch / "done-1").exists():
            time.sleep(0.01)
        os.kill(pids[2], signal.SIGKILL)


def test_p6_who_never_began_what_the_others_waited_in(capsys: pytest.CaptureFixture[str]) -> None:
    results = run_ranks(stopped, 3, group_timeout=2, expect_killed=(2,))
    paths = [results.dumps[rank][0] for rank in (0, 1)]
    numbers = set()
    for path in paths:
        (group,) = json.loads(path.read_text())["groups"]
        assert group["failure"]["kind"] == "SymmTimeoutError"
        assert group["peers"][2]["process"] == "alive, stopped (T)"
        assert group["peers"][2]["begun"] == group["begun"] - 1
        numbers.add(group["begun"])
    (number,) = numbers
    call = f"all_gather(30 × float32, 120 bytes) #{number}"
    alone = report(capsys, paths[0])
    assert f"rank 2 never began {call}; rank 0 waited " in alone and "no dump; alive, stopped (T)" in alone, alone
    together = report(capsys, *paths)
    assert f"rank 2 never began {call}; ranks 0 and 1 waited " in together, together


def on_demand(rank: int, world: int, folder: Path) -> None:
    pair, alone = dist.new_group([0, 1]), dist.new_group([rank])
    dist.broadcast(torch.zeros(4, dtype=torch.int64), 1, group=pair)
    dist.all_reduce(zeros(2), dist.ReduceOp.MAX, group=alone)
    message = torch.zeros(3, dtype=torch.bfloat16)
    if rank == 0:
        dist.send(message, 1, tag=7)
    else:
        dist.recv(message, tag=7)
    kept = torch_symm.trace()
    names = {group["id"]: group["name"] for group in kept["groups"]}
    assert [len(group["members"]) for group in kept["groups"]] == [2, 2, 1]
    assert len(set(names.values())) == 3 and all(group["failure"] is None for group in kept["groups"])
    found = {call["op"]: (names[call["group"]], call) for call in kept["calls"]}
    group, call = found["broadcast"]
    assert (group, call["root"], call["elements"], call["dtype"]) == (pair.group_name, 1, 4, "int64")
    group, call = found["all_reduce"]
    assert (group, call["reduce_op"], call["device"]) == (alone.group_name, "MAX", "cpu")
    group, call = found["send" if rank == 0 else "recv"]
    assert (call["peer"], call["tag"], call["state"]) == (1 - rank, 7, "completed")
    assert (call["bytes_in"], call["bytes_out"]) == ((6, 0) if rank == 0 else (0, 6))

    path = folder / f"own-{rank}.json"
    assert torch_symm.dump_trace(path) == str(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    dump = json.loads(path.read_text())
    assert [group["name"] for group in dump["groups"]] == list(names.values())
    assert dump["calls_made"] == len(dump["calls"]) == len(torch_symm.trace()["calls"])
    with pytest.raises(ValueError, match="No such file"):
        torch_symm.dump_trace(folder / "none" / "own.json")
    with pytest.raises(ValueError, match="format"):
        torch_symm.dump_trace(path, format="pickle")
    assert Path(torch_symm.dump_trace()).parent == Path(os.environ["SYMM_TRACE_DIR"])

    for _ in range(2100):
        dist.all_reduce(message, group=alone)
    kept = torch_symm.trace()
    assert len(kept["calls"]) == kept["calls_kept"] == 2000 < kept["calls_made"]
    numbers = [call["number"] for call in kept["calls"]]
    assert numbers == list(range(kept["calls_made"] - 1999, kept["calls_made"] + 1))
    assert {call["state"] for call in kept["calls"]} == {"completed"}

    child = os.fork()
    if child == 0:
        empty = False
        try:
            kept = torch_symm.trace()
            empty = kept["calls"] == kept["groups"] == [] and kept["pid"] == os.getpid()
        finally:
            os._exit(not empty)
    assert os.waitpid(child, 0)[1] == 0, "a forked child begins with none"


# proves P24
def test_on_demand_of_three_groups_a_full_ring_and_a_forked_child(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = run_ranks(on_demand, 2, tmp_path)
    assert results.dumps == [[], []], "nothing failed"
    text = report(capsys, tmp_path / "own-0.json", tmp_path / "own-1.json")
    assert text.count("\ngroup ") + text.startswith("group ") == 4 and "never" not in text and "disagree" not in text


def threads(rank: int, world: int) -> None:
    store = torch_symm.MemoryStore()
    limit = torch_symm.Options(timeout=timedelta(seconds=20), group_name="threads")

    def body(rank: int) -> None:
        group = torch_symm.ProcessGroupSymm(store, rank, 2, limit)
        with pytest.raises(torch_symm.SymmMismatchError):
            group.allreduce([zeros(2 + rank)]).wait()

    on_threads([lambda rank=rank: body(rank) for rank in range(2)])
    with pytest.raises(ValueError, match="2 ranks"):
        torch_symm.dump_trace(format="torch")


def test_ranks_that_are_threads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = run_ranks(threads, 1, backend=None)
    assert [path.name.split("-")[-1] for path in sorted(results.dumps[0])] == ["rank0.json", "rank1.json"]
    text = report(capsys, *results.dumps[0])
    assert "dumps of ranks 0 and 1" in text, text
    lines = text.splitlines()
    place = next(index for index, line in enumerate(lines) if line.endswith("ranks disagree on collective #1:"))
    assert lines[place + 1].endswith("rank 0: all_reduce(2 × float32, 8 bytes, SUM)"), text
    assert lines[place + 2].endswith("rank 1: all_reduce(3 × float32, 12 bytes, SUM)"), text
    calls = json.loads(results.dumps[0][0].read_text())["calls"]
    # Another thread's call may not have ended yet.
    assert (True, "SymmMismatchError") in {(call["async"], call["outcome"]) for call in calls}
    assert main(["trace", "--torch", str(tmp_path / "torch"), *map(str, results.dumps[0])]) == 0
    assert sorted(path.name for path in (tmp_path / "torch").iterdir()) == ["torch_rank_0", "torch_rank_1"]


def no_dump(rank: int, world: int, file_bytes: int | None) -> float:
    dist.barrier()
    if file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, resource.RLIM_INFINITY))
    start = time.monotonic()
    with pytest.raises(torch_symm.SymmMismatchError):
        dist.all_reduce(zeros(4 + rank))
    taken = time.monotonic() - start
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return taken


# proves P24
@pytest.mark.timed
@pytest.mark.parametrize(
    ("kind", "says"), [("link", "symbolic link"), ("read only", "/proc/self"), ("full", "too large")]
)
def test_a_dump_that_cannot_be_written_is_a_line_in_the_log(kind: str, says: str, tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir(mode=0o700)
    link.symlink_to(real)
    folder = {"link": link, "read only": Path("/proc/self"), "full": real}[kind]
    results = run_ranks(no_dump, 2, 1000 if kind == "full" else None, env={"SYMM_TRACE_DIR": str(folder)})
    for log in results.logs:
        (line,) = log.splitlines()
        assert "could not be written" in line and says in line, log
    assert max(results) < 1
    assert list(real.iterdir()) == [] and results.dumps == [[], []]


def skipped(rank: int, world: int, folder: Path) -> None:
    """Every collective, then one that rank 2 does not call."""
    n, pieces = 5, [zeros(r + 1) for r in range(world)]
    dist.all_reduce(zeros(n))
    dist.barrier()
    dist.broadcast(zeros(n), 3)
    dist.reduce(zeros(n), 1)
    dist.all_gather(pieces, zeros(rank + 1))
    dist.all_gather_into_tensor(zeros(n * world), zeros(n))
    dist.gather(zeros(n), [zeros(n) for _ in range(world)] if rank == 1 else None, dst=1)
    dist.scatter(zeros(n), [zeros(n) for _ in range(world)] if rank == 1 else None, src=1)
    dist.reduce_scatter_tensor(zeros(n), zeros(n * world))
    dist.reduce_scatter(zeros(rank + 1), pieces)
    dist.all_to_all_single(zeros(world), zeros(world))
    dist.all_to_all([zeros(rank + 1) for _ in range(world)], pieces)
    if rank == 2:
        meet("given up", rank, world)
    with pytest.raises(torch_symm.SymmTimeoutError):
        if rank == 2:
            dist.all_reduce(zeros(n))
        else:
            dist.reduce_scatter_tensor(zeros(n), zeros(n * world))
    if rank != 2:
        meet("given up", rank, world)
    torch_symm.dump_trace(folder / f"torch_rank_{rank}", format="torch")


# proves P24
def test_torchs_own_analyser_names_the_rank_and_the_collective(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    direct, converted = tmp_path / "direct", tmp_path / "converted"
    direct.mkdir()
    results = run_ranks(skipped, 4, direct, group_timeout=2)
    paths = [str(path) for paths in results.dumps for path in paths]
    assert len(paths) == 4
    text = report(capsys, *paths)
    assert "rank 2 never began reduce_scatter(20 × float32, 80 bytes, SUM) #13; ranks 0, 1 and 3 waited" in text, text
    assert main(["trace", "--torch", str(converted), *paths]) == 0
    assert capsys.readouterr().err == ""
    for folder in (direct, converted):
        analyse([str(folder)])
    output = "\n".join(caplog.messages) + capsys.readouterr().out
    assert output.count("Not all ranks joining collective, sequence number: 13") == 2, output
    assert output.count("collective: nccl:reduce_scatter") == 2 and output.count("missing ranks: {2}") == 2, output
    assert "has errors" not in output and "mismatch in" not in output, output


def test_what_is_no_dump_is_said_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = json.dumps({**dump(), "groups": []})
    odd = [whole.replace("1000000000", value) for value in ("1e999", "NaN", "1" + "0" * 400)]
    odd += [whole[:40], '{"traceEvents": []}', "[1, 2]", "7", "[" * 100_000, "", whole.replace(": []", ': {"a": 1}', 1)]
    odd += [whole.replace('"version": 1', '"version": 2'), '{"format": "torch-symm trace", "version": 1}']
    pickled = pickle.dumps({"version": "2.10", "entries": []})
    paths = [tmp_path / f"trace-{number}-rank0.json" for number in range(1 + len(odd))]
    for path, content in zip(paths, [pickled, *map(str.encode, odd)], strict=True):
        path.write_bytes(content)
        assert main(["trace", str(path)]) == 2, content
        output = capsys.readouterr()
        assert output.out == "" and output.err.startswith(f"{path}: ") and output.err.count("\n") == 1, output
    (tmp_path / "trace-100-rank0.json").write_text(whole)
    assert main(["trace", str(tmp_path), "--json"]) == 2
    output = capsys.readouterr()
    found = json.loads(output.out)
    assert found["groups"] == [], "the readable one is shown"
    assert all(f"{path}: " in output.err and f"{path}: " in found["error"] for path in paths), output.err
    (tmp_path / "nothing").mkdir()
    for path in (tmp_path / "nothing", tmp_path / "none"):
        assert main(["trace", str(path)]) == 2
        assert capsys.readouterr().err.count("\n") == 1

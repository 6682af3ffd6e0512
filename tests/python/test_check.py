"""``torch-symm check``: its reference is right, it notices errors, and it reports what it checked."""

from __future__ import annotations

import io
import json
import os
import signal
from contextlib import redirect_stdout
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expected import reduced as expected_reduction
from ranks import run_ranks
from torch_symm import __main__ as entry
from torch_symm._torch_compat import set_timeout
from torch_symm.launch import ranks as launched
from torch_symm.tools.check import command, faults
from torch_symm.tools.check import rank as rank_process
from torch_symm.tools.check.cases import LENGTHS, OPS, Case, Covered, blocks
from torch_symm.tools.check.exercise import Exercise
from torch_symm.tools.check.faults import FAULTS, RANKS, Told, judged
from torch_symm.tools.check.rank import CheckDone
from torch_symm.tools.check.reference import DTYPES, FACTOR, REDOPS, difference, reduced, served, values

PAIRS = [(redop, dtype) for dtype in DTYPES for redop in REDOPS if served(redop, dtype)]


@pytest.mark.parametrize("world", [2, 3, 8])
def test_the_reference_is_that_of_the_other_tests(world: int) -> None:
    for redop, dtype in PAIRS:
        inputs = [values(dtype, 600, rank) for rank in range(world)]
        wanted = expected_reduction(redop, inputs, [FACTOR] * world)
        assert difference(reduced(redop, inputs), wanted) is None, (redop, dtype)
        assert world > 3 or wanted.reshape(-1).view(torch.uint8).unique().numel() > 1, (redop, dtype)


def test_every_collective_type_and_length_is_there() -> None:
    cases = [case for block in blocks(OPS, quick=False) for case in block]
    assert {case.op for case in cases} == set(OPS)
    assert {case.dtype for case in cases if case.op == "scatter"} == set(DTYPES)
    assert {case.count for case in cases if case.op == "all_reduce"} >= set(LENGTHS)
    assert {(case.redop, case.dtype) for case in cases if case.op == "reduce"} == set(PAIRS)
    assert {(case.asynchronous, case.offset) for case in cases} == {(a, o) for a in (False, True) for o in (0, 1)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_wrong_element_is_found(dtype: torch.dtype) -> None:
    right = values(dtype, 40, 3)
    wrong = right.clone()
    wrong[17:18] = torch.zeros(1, dtype=torch.uint8).to(dtype) if dtype != torch.bool else ~right[17:18]
    if difference(wrong[17:18], right[17:18]) is None:
        wrong[17:18] = torch.ones(1, dtype=torch.uint8).to(dtype)
    assert difference(right, right) is None
    assert str(difference(wrong, right)).startswith("element 17 of 40 is ")


@pytest.mark.ranks(2)
def test_wrong_results_and_writes_beside_tensors_are_found(rank: int) -> None:
    """The calls write zero to the last element, or to the one before the tensor."""

    def broken(sound: Any, place: int) -> Any:
        def call(tensor: torch.Tensor, *given: object, **options: object) -> None:
            work = sound(tensor, *given, **options)
            if work is not None:
                work.wait()
            tensor.as_strided((1,), (1,), tensor.storage_offset() + place).zero_()

        return call

    found = []
    for op, place in (("all_reduce", 16), ("broadcast", 16), ("all_reduce", -1)):
        case = Case(op, torch.float32, "SUM" if op == "all_reduce" else "", 17, 5)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, op, broken(getattr(dist, op), place))
            found.append(Exercise(case, rank, 2, dist.group.WORLD, torch.device("cpu")).finding())
    *wrong, beside = found
    assert all(finding.startswith("element 16 of 17 is 0.0, should be ") for finding in wrong)
    assert beside == "the element beside a tensor was written"


def test_faults_are_judged_by_exception_and_name() -> None:
    killed = FAULTS[0]
    right = [Told(rank, "SymmPeerError", f"rank {RANKS - 1} (pid 1) has ended", 0.1) for rank in range(RANKS - 1)]
    assert judged(killed, right).right
    assert not judged(killed, right[:1]).right
    assert not judged(killed, [right[0], Told(1, "SymmTimeoutError", f"rank {RANKS - 1}", 0.1)]).right
    assert not judged(killed, [right[0], Told(1, "SymmPeerError", "somebody", 0.1)]).right


def test_a_check_says_what_it_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["check", "--quick", "--ranks", "2", "--ops", "all_reduce,send_recv,barrier", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and found["findings"] == [] and found["left"] == 0
    calls = {(row["op"], row["ranks"]) for row in found["calls"]}
    assert calls == {(op, 2) for op in ("all_reduce", "send_recv", "barrier")}
    assert len(found["covered"]["all_reduce"]["dtypes"]) == len(DTYPES)
    assert found["covered"]["send_recv"]["redops"] == [] and found["covered"]["barrier"]["counts"] == []
    assert sum(row["calls"] for row in found["calls"]) == 3 * len(PAIRS) + 3 * len(DTYPES) + 4


def test_a_whole_check_with_faults(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["check", "--faults", "--quick", "--seconds", "200"]) == 0
    said = capsys.readouterr().out
    assert f"what I checked: {len(OPS)} of {len(OPS)} collectives, 19 types, 9 reductions" in said
    assert all(fault.does in said for fault in faults.FAULTS)
    assert f"and {len(faults.FAULTS)} faults right" in said


@pytest.mark.parametrize("made", [0, 5])
@pytest.mark.parametrize("as_json", [False, True])
def test_a_run_without_time_for_all_calls_does_not_succeed(
    made: int, as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = CheckDone(0, left=900)
    for number in range(made):
        case = Case("all_reduce", torch.float32, "SUM", 7 * number, 0)
        done.calls[case.op, 2] += 1
        done.covered.setdefault(case.op, Covered()).add(case)
    monkeypatch.setattr(command, "_check", lambda *_: ([done], ""))
    assert entry.main(["check", "--ranks", "2", *["--json"] * as_json]) == command.UNFINISHED
    said = capsys.readouterr().out
    if as_json:
        found = json.loads(said)
        assert not found["ok"] and found["left"] == 900 and len(found["covered"]) == bool(made)
        return
    checked = f"1 of {len(OPS)} collectives, 1 type, 1 reduction, 0 to 28 elements a rank, aligned, blocking, bit"
    assert f"what I checked: {checked if made else 'nothing'}" in said
    assert said.count("NOT CHECKED") == len(OPS) - bool(made)
    assert said.splitlines()[-1].startswith(f"NOT FINISHED: {made} calls right, 900 not made")


def test_what_time_does_not_allow_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["check", "--quick", "--ranks", "2", "--seconds", "0.000001"]) == command.UNFINISHED
    assert "calls were left out, since the time was over" in capsys.readouterr().out


def check_with_stopped_ranks(_rank: int, _world: int, halted: tuple[int, ...]) -> tuple[int, str]:
    def main(rank: int, *given: Any) -> None:
        given[1].wait()
        if rank in halted:
            os.kill(os.getpid(), signal.SIGSTOP)
        given[-1].put(CheckDone(rank, findings=[f"rank {rank}: what it found"]))

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        patch.setattr(launched, "WARM", "fork")
        patch.setattr(rank_process, "main", main)
        patch.setattr(rank_process, "GROUP_TIMEOUT", timedelta(seconds=1))
        patch.setattr(rank_process, "MEETING_S", 1.0)
        patch.setattr(command, "SECONDS", 20.0 if len(halted) == 1 else 1.0)
        status = entry.main(["check", "--ranks", "2", "--ops", "barrier", "--seconds", "1"])
    return status, printed.getvalue()


@pytest.mark.parametrize(("halted", "says"), [((1,), "2 s: rank 1 of 2"), ((0, 1), "3 s: ranks 0, 1 of 2")])
def test_a_rank_that_stops_ends_the_check(halted: tuple[int, ...], says: str) -> None:
    ((status, printed),) = run_ranks(check_with_stopped_ranks, 1, halted, backend=None)
    assert status == 1 and f"WRONG: no message for {says}" in printed
    assert ("WRONG: rank 0: what it found" in printed) == (0 not in halted)


@pytest.mark.ranks(2)
def test_the_timeout_of_faults_is_set_where_torch_has_no_function_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist, "set_timeout", raising=False)
    set_timeout(timedelta(seconds=3))
    group: Any = dist.group.WORLD
    assert group._get_backend(torch.device("cpu")).options.timeout == timedelta(seconds=3)

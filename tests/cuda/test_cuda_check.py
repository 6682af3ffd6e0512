"""``torch-symm check`` and ``torch-symm bench`` on GPUs: every fault is reported to all ranks, every type measured."""

from __future__ import annotations

import json

import pytest
import torch
from pool import GPUS, needs_unshared_gpus
from torch_symm import __main__ as entry
from torch_symm.tools.bench.ops import PLACEMENTS
from torch_symm.tools.check import faults

pytestmark = needs_unshared_gpus


@pytest.mark.parametrize("fault", faults.FAULTS, ids=[fault.name for fault in faults.FAULTS])
def test_every_fault_is_told(fault: faults.Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "FAULTS", (fault,))
    (seen,) = faults.play("cuda", min(faults.RANKS, GPUS))
    assert seen.right, seen.text


def test_a_check_on_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["check", "--quick", "--device", "cuda", "--ranks", "2", "--ops", "all_reduce,broadcast", "--json"]
    assert entry.main(typed) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and {row["op"] for row in found["calls"]} == {"all_reduce", "broadcast"}


def test_all_operations_types_and_reductions_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    typed = "bench all -b 64K -g 2 -n 20 -w 2 -c 2 -d bf16,half,int32 -r 1 -o sum,max --against nccl"
    assert entry.main([*typed.split(), "--device", "cuda", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = [row for row in found["rows"] if row["side"] == "symm"]
    assert {row["op"] for row in rows} == set(PLACEMENTS)
    assert {row["dtype"] for row in rows} == {"bf16", "f16", "i32"}
    assert {row["redop"] for row in rows if row["op"] == "reduce"} == {"sum", "max"}
    assert all(row["wrong"] == 0 and row["median_us"] > 0 for row in rows)


def test_nothing_is_compared_without_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["bench", "-b", "1M", "-g", "2", "-c", "0", "-d", "half", "--device", "cuda", "--json"]) == 0
    assert all(row["wrong"] is None for row in json.loads(capsys.readouterr().out)["rows"])


def test_the_limit_of_the_link_is_measured() -> None:
    from torch_symm.tools.bench import cuda

    # No link between two GPUs is slower than a lane of PCIe.
    assert cuda._link_rate(2) > 1e9
    assert torch.cuda.device_count() == GPUS

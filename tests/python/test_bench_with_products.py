"""``torch-symm bench --background-load matmul``: its arithmetic, its arguments, and a run on CPU tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_symm import __main__ as entry
from torch_symm.tools.bench import cuda, with_products
from torch_symm.tools.bench.gpu import overlap
from torch_symm.tools.bench.gpu.copies import builders
from torch_symm.tools.bench.gpu.inputs import Inputs, Place, Setting
from torch_symm.tools.bench.gpu.record import Cell, GpuAbsent, GpuFigure, Measured, Overlap
from torch_symm.tools.bench.request import Wanted

KB = 1 << 10
CELL = Cell("all_gather", "bf16", 2, 16 << 20, 16 << 20)


@pytest.mark.parametrize(
    ("alone", "products", "together", "lost"),
    [
        (7000.0, 9000.0, 9000.0, 0.0),
        (7000.0, 9000.0, 16000.0, 1.0),
        (9000.0, 7000.0, 16000.0, 1.0),
        (8000.0, 10000.0, 14000.0, 0.5),
        (8000.0, 10000.0, 22000.0, 1.5),
        (8000.0, 10000.0, 9600.0, -0.05),
    ],
)
def test_lost_time(alone: float, products: float, together: float, lost: float) -> None:
    found = Overlap(100, alone, products, together)
    assert found.lost == pytest.approx(lost)
    assert found.call_us == alone / 100
    assert found.record()["lost"] == found.lost and found.record()["together_us"] == together


def test_chains_take_about_as_long_as_the_products() -> None:
    assert [overlap.chain_for(us) for us in (7.0, 70.0, 729.0, 9000.0, 0.0)] == [1000, 100, 10, 2, 2000]


def test_lines_and_records() -> None:
    found = GpuFigure(overlap=Overlap(200, 7000.0, 8800.0, 14960.0))
    measured = Measured(CELL, 5, {"symm": found, "nccl": GpuFigure(note="in a graph: lost")})
    lines = list(with_products.lines(measured, None))
    assert lines[0] == "# all_gather bf16" and lines[1].split()[-1] == "lost"
    assert lines[2].split() == ["16", "MB", "symm", "35.0", "200", "7.00", "8.80", "14.96", "88%"]
    assert lines[3:] == ["# nccl: in a graph: lost"]
    assert list(with_products.lines(measured, CELL)) == lines[2:], "the heading of an operation comes once"
    symm, nccl = with_products.records(measured)
    assert symm["lost"] == pytest.approx(0.88) and symm["calls"] == 200 and symm["size"] == 16 << 20
    assert nccl["note"] == "in a graph: lost" and "lost" not in nccl


@pytest.mark.parametrize(("op", "trips"), [("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)])
def test_the_bound_copies_what_a_rank_receives(op: str, trips: int) -> None:
    peers = {rank: torch.full((48,), rank, dtype=torch.uint8) for rank in (0, 2)}
    target = torch.full((48,), 9, dtype=torch.uint8)
    inputs = Inputs(3, 12, torch.float32, torch.device("cpu"), 0)
    at = Setting(1, inputs, torch.empty(0), None, Place(torch.empty(0, dtype=torch.uint8), target))  # type: ignore[arg-type]
    copied: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        own = torch.Tensor.copy_
        patch.setattr(torch.Tensor, "copy_", lambda to, given: (copied.append(given.numel()), own(to, given))[1])
        builders(peers)[op](at).run()
    assert target.tolist() == [0] * 16 + [9] * 16 + [2] * 16 and copied == [16, 16] * trips


@pytest.mark.usefixtures("forked")
def test_a_run_on_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU tensors, products and collectives run one after the other."""
    monkeypatch.setattr(overlap, "CHAIN_US", 300.0)
    monkeypatch.setattr(cuda, "PRODUCT_TURNS", 2)
    rows = [Wanted("all_gather", "bf16", "none", -1, 4 * KB, 2), Wanted("all_reduce", "f32", "sum", -1, 4 * KB, 2)]
    cells: Any = list(cuda.run_with_products(rows, ["gloo"], cuda.How(calls=1, warmup=1, checks=1, device="cpu")))
    assert [cell.cell.op for cell in cells] == ["all_gather", "all_reduce"]
    for cell in cells:
        assert list(cell.figures) == ["symm", "gloo"]
        for figure in cell.figures.values():
            found = figure.overlap
            assert found and figure.note is None
            assert found.calls >= overlap.MIN_CALLS and min(found.alone_us, found.products_us, found.together_us) > 0


@pytest.mark.parametrize("complete", [True, False])
def test_the_command(
    complete: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a double of the GPUs. A row without symm gives exit status 1."""

    def run(rows: list[Wanted], against: list[str], how: cuda.How) -> list[Any]:
        assert [row.size for row in rows] == [16 << 20] and against == ["torch"] and how.calls == 20
        figure = GpuFigure(overlap=Overlap(200, 7000.0, 8800.0, 14960.0)) if complete else GpuFigure(note="timed out")
        return [GpuAbsent("nccl", "not built"), Measured(CELL, 5, {"symm": figure})]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(cuda, "run_with_products", run)
    path = tmp_path / "load.json"
    typed = ["bench", "all_gather", "--device", "cuda", "--sizes", "16M", "-d", "bf16", "--against", "torch"]
    assert entry.main([*typed, "--background-load", "matmul", "--json", str(path)]) == (0 if complete else 1)
    said = capsys.readouterr().out
    assert "# background load: matmul" in said and "# left out: nccl: not built" in said
    assert ("88%" in said) == complete and ("# symm: timed out" in said) != complete
    found = json.loads(path.read_text())
    assert found["absent"][0]["side"] == "nccl" and found["failure"] is None
    assert ("lost" in found["rows"][0]) == complete
    with pytest.raises(SystemExit):
        entry.main([*typed, "--background-load", "3"])
    assert "on CPU tensors only" in capsys.readouterr().err

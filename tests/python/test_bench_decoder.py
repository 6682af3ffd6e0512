"""The decoder's benchmark: its arguments and arithmetic, and one short run on CPU tensors."""

from __future__ import annotations

import json
from pathlib import Path

import decoder
import pytest
from decoder_rank import Finished, distinct_layers

MB = 1 << 20


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


@pytest.mark.usefixtures("forked")
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

"""How long fresh processes take until their first collectives have finished, on CPU tensors."""

from __future__ import annotations

import json
from pathlib import Path

import first_call
import pytest

pytestmark = pytest.mark.usefixtures("forked")


def test_first_calls_of_fresh_processes(tmp_path: Path) -> None:
    path = tmp_path / "first.json"
    assert first_call.main(["--device", "cpu", "--starts", "2", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert [figure["kind"] for figure in found["figures"]] == ["symm cold", "symm warm", "gloo"]
    for figure in found["figures"]:
        assert len(figure["starts"]) == 2
        for step, name in enumerate(("init_s", "first_s", "second_s")):
            times = [start[step] for start in figure["starts"]]
            assert min(times) > 0 and figure[name] == pytest.approx(sum(times) / 2)
    assert found["failures"] == {}


def test_a_kind_of_start_that_fails_does_not_cost_the_others() -> None:
    found = list(first_call.measure(2, "cpu", ("nobody", "gloo"), starts=2))
    assert [kind for kind, _ in found] == ["nobody", "gloo", "gloo"]
    assert isinstance(found[0][1], str) and "nobody" in found[0][1]
    assert all(len(spent) == 3 and min(spent) > 0 for _, spent in found[1:])

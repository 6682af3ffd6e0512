"""A part of the fault matrix over hosts (`python tests/faults --hosts`), for symm alone: what was promised was seen.

Limits of time are ten times as long here, where other tests may run beside this one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults import stage
from faults.case import broken
from faults.cases import all_cases
from faults.hosts import over_hosts
from faults.runner import guarded

CASES = {case.name: case for case in over_hosts(all_cases())}
PATIENCE = 10.0


@pytest.mark.timed
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    (
        "killed rank 0",
        "segmentation fault",
        "stopped, short timeout",
        "mismatch: dtype of the same width",
        "mismatch: one call left out",
        "argument: freed storage",
        "argument: output too short on one rank",
        "abort from a second thread",
        "all ranks of a host killed",
        "refused message between hosts",
        "100 cycles over hosts",
    ),
)
def test_what_was_seen_is_what_was_promised(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # What the flight recorder writes is meant to stay.
    monkeypatch.setenv("SYMM_TRACE_DIR", str(tmp_path))
    monkeypatch.setattr(stage, "HOSTS", 2)
    found = broken(CASES[name].promise, guarded(CASES[name], "symm", 60), PATIENCE)
    assert not found, "\n".join(found)

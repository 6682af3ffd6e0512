"""Unmodified training libraries on symm get the bits that Gloo gives, on every rank.

Run by `make test-clients`, which installs them in a separate environment. torchrun starts two ranks, because a sum of
two numbers does not depend on the order, so the bits can be compared.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).parent / "programs"
RANKS = 2
#: Marks libraries whose programs take minutes, mostly to compile and start.
heavy = pytest.mark.skipif(os.environ.get("CLIENTS") != "all", reason="runs with CLIENTS=all")


def told(program: str, *arguments: str, replaces: str = "0", launched: bool = True) -> list[dict[str, Any]]:
    """The output of every rank; torchrun starts the ranks if ``launched``, otherwise the program starts them."""
    command = [sys.executable]
    if launched:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SYMM_REPLACE_GLOO": replaces, "HF_HUB_OFFLINE": "1"}
    command += [str(PROGRAMS / program), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=270, env=environment, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    # Ranks share the pipe, so a line may contain the output of two ranks.
    lines = re.findall(r"told (\{.*?\})", result.stdout)
    found = sorted((json.loads(line) for line in lines), key=lambda line: int(line["rank"]))
    assert [line["rank"] for line in found] == list(range(RANKS)), result.stdout + result.stderr
    return found


def same_bits(gloo: list[dict[str, Any]], symm: list[dict[str, Any]]) -> None:
    assert not any(line["symm"] for line in gloo)
    assert all(line["symm"] and line["calls"] >= 5 for line in symm), symm
    for theirs, ours in zip(gloo, symm, strict=True):
        assert (theirs["parameters"], theirs["numbers"]) == (ours["parameters"], ours["numbers"])
    # Gradients were averaged: every rank saw different data.
    assert len({line["parameters"] for line in symm}) == 1


@pytest.mark.parametrize(
    ("library", "program", "arguments"),
    [
        # Libraries that accept only known names of backends: symm replaces Gloo.
        ("accelerate", "accelerate_trains.py", None),
        ("transformers", "trainer_trains.py", None),
        ("ignite", "ignite_trains.py", None),
        # The others get the backend's name.
        ("lightning", "fabric_trains.py", []),
        ("torchft", "torchft_reconfigures.py", []),
        ("transformers", "tensor_parallel_trains.py", []),
        *(pytest.param("deepspeed", "deepspeed_trains.py", [stage], marks=heavy) for stage in "0123"),
        pytest.param("ray", "ray_trains.py", [], marks=heavy),
    ],
)
def test_a_client(library: str, program: str, arguments: list[str] | None) -> None:
    pytest.importorskip(library)
    if arguments is None:
        gloo, symm = told(program), told(program, replaces="1")
    else:
        gloo, symm = (told(program, name, *arguments, launched=library != "ray") for name in ("gloo", "symm"))
    same_bits(gloo, symm)
    assert {line["backend"] for line in symm} == {"gloo" if arguments is None else "symm"}

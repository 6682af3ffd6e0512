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


#: Libraries whose programs take minutes, mostly to compile and start: only with CLIENTS=all.
heavy = pytest.mark.skipif(os.environ.get("CLIENTS") != "all", reason="runs with CLIENTS=all")


def told(program: str, *arguments: str, replaces: str = "0", launched: bool = True) -> list[dict[str, Any]]:
    """The output of every rank; torchrun starts the ranks if ``launched``, otherwise the program starts them."""
    command = [sys.executable]
    if launched:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SYMM_REPLACE_GLOO": replaces, "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [*command, str(PROGRAMS / program), *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    # Ranks share the pipe, so a line may contain the output of two.
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
    ("library", "program"),
    [
        ("accelerate", "accelerate_trains.py"),
        ("transformers", "trainer_trains.py"),
        ("ignite", "ignite_trains.py"),
    ],
)
def test_a_client_that_checks_names(library: str, program: str) -> None:
    pytest.importorskip(library)
    symm = told(program, replaces="1")
    same_bits(told(program), symm)
    assert {line["backend"] for line in symm} == {"gloo"}


def test_fabric_and_torchmetrics_take_the_name() -> None:
    pytest.importorskip("lightning")
    symm = told("fabric_trains.py", "symm")
    same_bits(told("fabric_trains.py", "gloo"), symm)
    assert {line["backend"] for line in symm} == {"symm"}


def test_torchft_with_ten_lines() -> None:
    pytest.importorskip("torchft")
    same_bits(told("torchft_reconfigures.py", "gloo"), told("torchft_reconfigures.py", "symm"))


def test_transformers_splits_layers_on_the_group_that_is_there() -> None:
    pytest.importorskip("transformers")
    gloo, symm = (told("tensor_parallel_trains.py", backend) for backend in ("gloo", "symm"))
    same_bits(gloo, symm)
    # Three losses, which fall, and how many parameters were split.
    first, _, last, split = symm[0]["numbers"]
    assert last < first and split > 0


@heavy
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_with_zero(stage: int) -> None:
    pytest.importorskip("deepspeed")
    gloo, symm = (told("deepspeed_trains.py", backend, str(stage)) for backend in ("gloo", "symm"))
    same_bits(gloo, symm)


@heavy
def test_ray_train() -> None:
    pytest.importorskip("ray")
    gloo, symm = (told("ray_trains.py", backend, launched=False) for backend in ("gloo", "symm"))
    same_bits(gloo, symm)

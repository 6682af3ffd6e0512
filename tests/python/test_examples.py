"""Every example succeeds and says so. The ranks are forked.

``tests/internode/test_internode_training.py`` starts one example by torchrun.

The backend is symm; SYMM_TEST_BACKEND names another one for development.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from programs import ROOT, run_program

#: The example that pytest runs, and the one that torchrun starts in the other file.
TESTS, STARTED = "15_pytest.py", "00_hello.py"
EXAMPLES = sorted({path.name for path in (ROOT / "examples").glob("[0-9][0-9]_*.py")} - {TESTS})
#: Examples that run only on GPUs.
ON_GPUS = ("09_zero_copy_fsdp2.py", "12_triton_all_reduce.py")
#: Numbers of ranks of examples that compile on each rank, need exactly two, or learn more per epoch with fewer ranks.
RANKS = {"01_ddp_digits.py": 2, "05_compile.py": 2, "13_compiled_block.py": 2, "16_llama_decoder.py": 2}
ARGUMENTS = {"01_ddp_digits.py": ("--epochs", "6")}
BACKEND = os.environ.get("SYMM_TEST_BACKEND", "symm")
LIMIT_S = 150


def run(program: str, *arguments: str, world: int = 4, **env: str) -> list[str]:
    """Returns what rank 0 prints."""
    return run_program(program, "--backend", BACKEND, *arguments, world=world, env=env)[0]


@pytest.mark.parametrize("example", [name for name in EXAMPLES if name != STARTED])
def test_example_passes(example: str) -> None:
    said = run(f"examples/{example}", *ARGUMENTS.get(example, ()), world=RANKS.get(example, 4))
    for line in said:
        if line.startswith("skipped: "):
            pytest.skip(line.removeprefix("skipped: "))
    # The output starts with progress and ends with the result.
    assert said[-1].startswith("ok: ") and len(said) > 1, said


@pytest.mark.parametrize("example", ON_GPUS)
def test_an_example_of_gpus_says_so_where_there_are_none(example: str) -> None:
    (line,) = run(f"examples/{example}", world=1, CUDA_VISIBLE_DEVICES="")
    assert line.startswith("skipped: needs 2 GPUs or more")


def subprocess_of(*command: str) -> list[str]:
    """Returns the lines that a program prints; the program must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_example_of_tests_passes() -> None:
    said = subprocess_of(sys.executable, f"examples/{TESTS}")
    assert any("8 passed" in line for line in said) and "ok: all tests passed" in said[-1]


def test_the_index_has_every_example() -> None:
    page = (ROOT / "docs/guide/examples.md").read_text()
    assert re.findall(r"^\| `examples/(\w+\.py)` \|", page, re.MULTILINE) == sorted([*EXAMPLES, TESTS])


@pytest.mark.slow
def test_a_compiled_decoder_decodes_the_same() -> None:
    said = run("examples/16_llama_decoder.py", "--compile", "--layers", "1", "--tokens", "8", world=2)
    assert "with fused ones" in said[-2] and said[-1].startswith("ok: 16 tokens are the same")


def test_trace_is_written(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    run("examples/07_profile.py", "--trace", str(trace), world=2)
    assert f"{BACKEND}:all_reduce" in trace.read_text()


@pytest.mark.parametrize("parallel", ["fsdp", "hsdp", "ddp"])
def test_steps_in_turn_are_the_same_on_all_sides(parallel: str) -> None:
    given = ("--device", "cpu", "--model", "tiny", "--turns", "2", "--parallel", parallel)
    said = run("benches/train_transformer.py", *given, world=2)
    rows = {found[1]: found for line in said if (found := re.match(r"([a-z+]+) +([\d.]+) +([\d.]+) +([\d.]+) ", line))}
    assert list(rows) == (["gloo", "symm"] if parallel == "ddp" else ["gloo", "symm", "symm+fsdp"])
    first = next(iter(rows.values()))
    for row in rows.values():
        assert row[4] == first[4], "another loss"
        assert abs(float(row[3]) - float(first[2]) / float(row[2])) < 0.02 * float(row[3]), (
            "the ratio is not that of the times"
        )
    assert any("collectives" in line and "products" in line for line in said)


@pytest.mark.parametrize("ways", [("fsdp", "--symmetric"), ("tp",)])
def test_transformer_learns_the_same_on_another_backend(ways: tuple[str, ...]) -> None:
    given = ("--device", "cpu", "--compare", "--steps", "10", "--rate", "3e-3", "--parallel", *ways)
    said = "\n".join(run("benches/train_transformer.py", *given, world=2))
    assert "ok: loss" in said and "'s curve" in said
    shares = dict(re.findall(r"^(\w+): .* tokens/s, ([\d.]+)% communication", said, re.MULTILINE))
    assert len(shares) == 2 and all(float(share) > 0 for share in shares.values()), said

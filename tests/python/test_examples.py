"""Every example runs under torchrun with 4 ranks, ends well and says so.

The backend is symm; SYMM_TEST_BACKEND names another one for development.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: What pytest runs, not torchrun.
TESTS = "15_pytest.py"
EXAMPLES = sorted({path.name for path in (ROOT / "examples").glob("[0-9][0-9]_*.py")} - {TESTS})
#: Those that every change runs.
QUICK = ("00_hello.py", "02_fsdp2.py", "08_stores.py", "10_symmetric_memory.py")
#: Those that run on GPUs only.
ON_GPUS = ("09_zero_copy_fsdp2.py", "12_triton_all_reduce.py")
BACKEND = os.environ.get("SYMM_TEST_BACKEND", "symm")
LIMIT_S = 150


def launch(program: str, *arguments: str, ranks: int = 4, gpus: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs a program of the repository under torchrun; without ``gpus`` it sees none."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(ROOT / program), "--backend", BACKEND, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **({} if gpus else {"CUDA_VISIBLE_DEVICES": ""})}
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment, cwd=ROOT)


def test_examples_are_there() -> None:
    assert len(EXAMPLES) + 1 == 17


@pytest.mark.parametrize(
    "example", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in EXAMPLES]
)
def test_example_passes(example: str) -> None:
    result = launch(f"examples/{example}")
    assert result.returncode == 0, result.stdout + result.stderr
    said = result.stdout.splitlines()
    for line in said:
        if line.startswith("skipped: "):
            pytest.skip(line.removeprefix("skipped: "))
    # How far it is comes first, and last what it proved.
    assert said[-1].startswith("ok: ") and (len(said) > 1), result.stdout + result.stderr


@pytest.mark.parametrize("example", ON_GPUS)
def test_an_example_of_gpus_says_so_where_there_are_none(example: str) -> None:
    result = launch(f"examples/{example}", ranks=1, gpus=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "skipped: needs 2 GPUs or more" in result.stdout and "ok: " not in result.stdout


def test_the_index_has_every_example() -> None:
    page = (ROOT / "docs/guide/examples.md").read_text()
    assert re.findall(r"^\| `examples/(\w+\.py)` \|", page, re.MULTILINE) == sorted([*EXAMPLES, TESTS])


@pytest.mark.slow
def test_example_of_tests_passes() -> None:
    command = [sys.executable, str(ROOT / "examples" / TESTS)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT, check=False)
    assert result.returncode == 0 and "8 passed" in result.stdout, result.stdout + result.stderr
    assert "ok: all tests passed" in result.stdout


@pytest.mark.slow
def test_a_compiled_decoder_decodes_the_same() -> None:
    result = launch("examples/16_llama_decoder.py", "--compile", "--layers", "1", "--tokens", "8", ranks=2)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "with fused ones" in result.stdout and "ok: 16 tokens are the same" in result.stdout


@pytest.mark.slow
def test_trace_is_written(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    result = launch("examples/07_profile.py", "--trace", str(trace))
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{BACKEND}:all_reduce" in trace.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("ways", [("fsdp",), ("fsdp", "--symmetric"), ("tp",)])
def test_transformer_learns_the_same_on_another_backend(ways: tuple[str, ...]) -> None:
    result = launch("benches/train_transformer.py", "--device", "cpu", "--compare", "--parallel", *ways, ranks=2)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "ok: loss" in result.stdout and "'s curve" in result.stdout, result.stdout
    shares = dict(re.findall(r"^(\w+): .* tokens/s, ([\d.]+)% communication", result.stdout, re.MULTILINE))
    assert len(shares) == 2 and all(float(share) > 0 for share in shares.values()), result.stdout

"""Limits for every test, and a torch that may be forked."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

# Inductor reads these settings when it is imported, so ranks that are forked afterwards cannot choose them. Without
# them, each rank starts a pool of compiler processes and compiles a program that tests its processor.
os.environ.update(TORCHINDUCTOR_COMPILE_THREADS="1", TORCHINDUCTOR_VEC_ISA_OK="0")

import pytest
import torch
import torch.fx.experimental.symbolic_shapes  # sympy: once, not in each forked rank that uses symm_mem

sys.path.insert(0, str(Path(__file__).parents[2] / "benches"))
sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1]))

from dumps import temporary_folder
from limits import ends_after
from torch_symm.launch import ranks as launched

# If one of these is set, torch's run_tests needs one more package, and pytest's summary repeats each failure in full.
for name in ("CI", "BUILD_NUMBER"):
    os.environ.pop(name, None)

# Forked ranks must not inherit a pool of threads.
torch.set_num_threads(1)

# Groups fail on purpose here: their dumps go to a separate directory.
os.environ["SYMM_TRACE_DIR"] = temporary_folder()

#: Seconds that any single test may take; the ranks' own limits are shorter.
LIMIT_S = 240.0


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    """Ends a test that hangs in the parent process."""
    with ends_after(LIMIT_S):
        yield


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forks ranks of every tool from one process that has imported torch, which takes 4 s of CPU."""
    # Restored below, because the tools install a signal handler and add settings of NCCL.
    environment, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(launched, "ANEW", launched.WARM)
    yield
    signal.signal(signal.SIGTERM, handler)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]


@pytest.fixture(scope="session")
def inductor() -> None:
    """Imports Inductor in the process from which ranks are forked; each rank would spend 3 s of CPU on it."""
    importlib.import_module("torch._inductor.compile_fx")

"""Ranks of one machine as several nodes: the kit of ``tests/python``, with different limits."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo  # once, not in each forked rank that has an optimizer

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "python")]
sys.path.append(str(Path(__file__).parents[1]))

from dumps import temporary_folder  # noqa: E402 - found by the lines above
from limits import ends_after  # noqa: E402

# Forked ranks must not inherit a pool of threads.
torch.set_num_threads(1)

# Groups fail on purpose here: their dumps go to a separate directory.
os.environ["SYMM_TRACE_DIR"] = temporary_folder()


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    """Ends a test that hangs in the parent process."""
    with ends_after(150.0):
        yield

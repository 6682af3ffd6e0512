"""Ranks of one machine as several hosts: the kit of ``tests/python``, with limits of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "python")]

from limits import ends_after  # noqa: E402 - found by the line above

# Forked ranks must not inherit a pool of threads.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    """Ends a test that hangs in the parent process."""
    with ends_after(150.0):
        yield

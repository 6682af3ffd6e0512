"""Limits for every test, and one pool of rank processes for all of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "python")]

from dumps import temporary_folder  # noqa: E402 - needs the path
from limits import ends_after  # noqa: E402
from pool import Pool  # noqa: E402
from torch_symm.tools.bench.machine import MULTICAST_SETTINGS  # noqa: E402

# Groups fail on purpose here: their dumps go to a separate directory.
os.environ["SYMM_TRACE_DIR"] = temporary_folder()

#: Seconds that any single test may take; the ranks' own limits are shorter.
LIMIT_S = 300.0

for name, value in MULTICAST_SETTINGS.items():
    os.environ.setdefault(name, value)


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    """Ends a test that hangs in the parent process."""
    with ends_after(LIMIT_S):
        yield


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Rank processes that run one test after another."""
    shared = Pool()
    yield shared
    shared.stop()

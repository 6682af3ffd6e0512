"""Tests of distributed code on warm processes: ``@pytest.mark.ranks(4)``, and torch's ``MultiProcessTestCase``.

``docs/guide/testing.md`` shows how. pytest's plug-in is the module ``torch_symm_pytest``, which is installed with
torch-symm; it imports this package, and torch, when a marked test runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._rank import barrier, init_process_group, shared_tmp_path
from ._run import RanksFailedError, Results, run_ranks

if TYPE_CHECKING:
    from ._multi_process import WarmMultiProcessTestCase, skip_if_lt_x_gpu

__all__ = [
    "RanksFailedError",
    "Results",
    "WarmMultiProcessTestCase",
    "barrier",
    "init_process_group",
    "run_ranks",
    "shared_tmp_path",
    "skip_if_lt_x_gpu",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'torch_symm.testing' has no attribute {name!r}")
    # torch's own harness takes a second to import.
    from . import _multi_process

    return getattr(_multi_process, name)

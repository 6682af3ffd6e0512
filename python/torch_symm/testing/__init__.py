"""Tests of distributed code on warm processes: ``@pytest.mark.ranks(4)``, and torch's ``MultiProcessTestCase``.

``docs/guide/testing.md`` shows how. pytest's plug-in is the module ``torch_symm_pytest``, which is installed with
torch-symm; it imports this package, and torch, when a marked test runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._rank import init_process_group, meet, shared_folder
from ._run import RanksFailed, Results, run_ranks

if TYPE_CHECKING:
    from ._multi_process import WarmMultiProcessTestCase, skip_if_lt_x_gpu

__all__ = [
    "RanksFailed",
    "Results",
    "WarmMultiProcessTestCase",
    "init_process_group",
    "meet",
    "run_ranks",
    "shared_folder",
    "skip_if_lt_x_gpu",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'torch_symm.testing' has no attribute {name!r}")
    # torch's own harness takes a second to import.
    from . import _multi_process

    return getattr(_multi_process, name)

"""Loads torch's own distributed tests for a backend that they do not name.

``distributed_test.py`` checks in many places whether the backend is called "gloo" or "mpi", and skips if not. The table
``REWRITES`` opens those gates in the text of the file, line for line, before it is compiled; torch itself is not
changed. Each entry must match, so that a new version of torch with a different gate is noticed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import unittest
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

MODULE = "torch.testing._internal.distributed.distributed_test"
PACKAGE_PATH = "testing/_internal/distributed/distributed_test.py"
NAME = os.environ.get("SYMM_TEST_BACKEND", "symm")

# (text in the file, replacement, reason)
REWRITES: list[tuple[str, str, str]] = [
    (
        'BACKEND = os.environ["BACKEND"]',
        'BACKEND = __import__("backend_gates").Capable(os.environ["BACKEND"])',
        "tests limited to gloo or mpi run",
    ),
    (
        'require_backend_is_available({"gloo"})',
        'require_backend_is_available({"gloo", "symm"})',
        "tests limited to gloo run",
    ),
    ("    dist.Backend.UCC,\n]", '    dist.Backend.UCC, "symm",\n]', "profiler events are checked"),
    (
        'ddp_logging_data.get("backend_name"), dist.get_backend(group_id)',
        'ddp_logging_data.get("backend_name").replace("custom", "symm"), dist.get_backend(group_id)',
        "torch calls every backend that it does not ship custom",
    ),
    (
        "            time.sleep(0.1)\n\n\nclass TestDist",
        "            time.sleep(0.002)\n\n\nclass TestDist",
        "speed only",
    ),
    # Shorter timeouts, because a rank that waits for ranks that have raised waits until its timeout.
    (
        "backend=dist.get_backend(), timeout=timedelta(seconds=10)",
        "backend=dist.get_backend(), timeout=timedelta(seconds=2)",
        "speed only",
    ),
    (
        "timeout = timedelta(seconds=5)\n            _, group_id, _ = self._init_group_test",
        "timeout = timedelta(seconds=2)\n            _, group_id, _ = self._init_group_test",
        "speed only",
    ),
]

# Texts that exist only in some versions of torch.
OPTIONAL_REWRITES: list[tuple[str, str]] = [
    # Tests that are unreliable with gloo and nccl.
    (r'unittest\.skipIf\([^"()]*"https://github', 'unittest.skipIf(False, "https://github'),
    # The text is Gloo's. With symm, other ranks may also leave before the timeout; both errors end the wait.
    (r'"Timed out waiting 1ms"', '"(reached its timeout after|had waited) 0.0"'),
]

# GPUs by number, in tests that otherwise run on the CPU.
GPU_WORDS: list[tuple[str, str]] = [
    (r"device_ids=\[[^\]]*\]", "device_ids=None"),
    (r"\.to\((self\.)?rank\)", '.to("cpu")'),
    (r"device=(self\.)?(rank|device_id)\b", 'device="cpu"'),
]

# Tests that request GPUs but have the same meaning without.
ON_CPU = frozenset(Path(__file__).with_name("gpu_tests_on_cpu.txt").read_text().split())


class Capable(str):
    """The name of a backend that claims all capabilities of gloo and mpi."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or other in ("gloo", "mpi")

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def monitored_barrier(group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
    """``dist.monitored_barrier`` without its check that the backend is called gloo."""
    import torch.distributed as dist

    if dist.distributed_c10d._rank_not_in_group(group):
        return
    chosen = group or dist.distributed_c10d._get_default_group()
    wanted = timeout if timeout is not None else dist.distributed_c10d._get_default_timeout("gloo")
    chosen.monitored_barrier(wanted, wait_all_ranks=wait_all_ranks)


def _skip_without_gpu(test: Callable[..., Any]) -> Callable[..., Any]:
    """torch's decorators start every process of a test before they notice that there is no GPU."""
    return test if test.__name__ in ON_CPU else unittest.skip("needs a GPU a rank")(test)


def _stay_on_cpu(common: Any) -> None:
    """Redirects the ways in which torch's tests reach GPUs to the CPU."""
    import torch

    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign, assignment]
    # Two functions, because the compiler has a rule for each.
    torch.cuda.set_device = lambda *_: None  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    common.init_multigpu_helper = lambda world, _: {rank: [torch.device("cpu")] for rank in range(world)}


def _open_common_handshakes() -> None:
    """Decorators: those that need a GPU skip at once, and those that require 8 ranks no longer require them."""
    from torch.testing._internal import common_distributed as common

    for tests in common.DistTestCases.backend_feature.values():
        tests.add(NAME)
    common.skip_if_no_gpu = _skip_without_gpu
    common.skip_if_lt_x_gpu = lambda x, **_: _skip_without_gpu
    common.nccl_skip_if_lt_x_gpu = lambda backend, x: lambda function: function
    common.skip_if_small_worldsize = lambda function: function
    common.TIMEOUT_DEFAULT = 100
    _stay_on_cpu(common)


def nodes_and_ranks(world: str) -> tuple[int, int]:
    """Numbers of nodes, and of ranks on each, of a world such as ``4`` or ``2x2``."""
    nodes, _, ranks = world.rpartition("x")
    return int(nodes or 1), int(ranks)


def load(world: int) -> ModuleType:
    """Returns the module with its gates opened. It reads the world size during import: one size per process."""
    os.environ.update(BACKEND=NAME, WORLD_SIZE=str(world), INIT_METHOD="file://")
    import torch
    import torch.distributed as dist

    # Modules that tests and groups import, loaded once and not in each rank.
    import torch.testing._internal.common_device_type

    if NAME == "symm":
        import torch_symm._group
        import torch_symm.dtensor._redistribute

        torch_symm._native.load()
    _open_common_handshakes()
    dist.monitored_barrier = monitored_barrier
    path = os.path.join(os.path.dirname(torch.__file__), PACKAGE_PATH)
    with open(path) as file:
        text = file.read()
    for old, new, why in REWRITES:
        if old not in text:
            raise RuntimeError(f"{path} no longer contains {old!r}: see what replaced it ({why})")
        text = text.replace(old, new)
    for pattern, new in OPTIONAL_REWRITES:
        text = re.sub(pattern, new, text)
    for pattern, new in GPU_WORDS:
        text, count = re.subn(pattern, new, text)
        if not count:
            raise RuntimeError(f"{path} no longer contains {pattern!r}")
    spec = importlib.util.spec_from_file_location(MODULE, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    exec(compile(text, path, "exec", dont_inherit=True), module.__dict__)
    return module

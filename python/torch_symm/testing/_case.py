"""Runs a marked pytest test on its ranks, and turns their outcomes into the test's outcome and report."""

from __future__ import annotations

import unittest
import warnings
from typing import Any

import pytest

from ._rank import used_cuda
from ._report import DUMPED, Ending, describe
from ._run import run_case

_CUDA = "ask for GPUs in tests, not while modules are imported, or set PYTORCH_NVML_BASED_CUDA_CHECK=1"


def run(
    item: pytest.Function, arguments: dict[str, Any], placeholder: type, world_size: int, given: dict[str, Any]
) -> None:
    """Runs the body; ``given`` is the mark's settings, ``placeholder`` the type that stands for the rank.

    Raises the exception by which pytest reports a failure, a skip or an expected failure.
    """
    body, node, config = item.obj, item, item.config

    def on_rank(rank: int, world_size: int) -> None:
        subtests = _Subtests(config)
        try:
            result = body(**{n: rank if isinstance(value, placeholder) else value for n, value in arguments.items()})
        except (unittest.SkipTest, pytest.skip.Exception, pytest.xfail.Exception):
            subtests.check()
            raise
        subtests.check()
        if hasattr(result, "__await__") or hasattr(result, "__aiter__"):
            reason = f"@pytest.mark.ranks cannot run a coroutine: call asyncio.run in {item.nodeid}"
            raise pytest.fail.Exception(reason, pytrace=False)
        if result is not None:
            reason = f"test functions should return None, but {item.nodeid} returned {type(result)!r}"
            warnings.warn(pytest.PytestReturnNotNoneWarning(reason), stacklevel=1)

    def text(error: BaseException) -> str:
        return str(node.repr_failure(pytest.ExceptionInfo.from_exception(error)))

    def env(rank: int) -> dict[str, str]:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        return {name: str(value) for name, value in names.items()} | (given["env"] or {})

    endings = run_case(
        on_rank,
        world_size,
        backend=given["backend"],
        timeout=given["timeout"],
        group_timeout=given["group_timeout"],
        env=env,
        describe=text,
        keep_streams=not {"capsys", "capsysbinary"}.isdisjoint(item.fixturenames)
        or config.getoption("capture") == "no",
    )
    for ending in endings:
        if log := DUMPED.sub("", ending.log):
            item.add_report_section("call", f"rank {ending.rank}", log)
    _conclude(endings)


class _Subtests:
    """The failed subtests of one rank, which pytest's fixture reports through a hook."""

    def __init__(self, config: pytest.Config) -> None:
        self._failed: list[pytest.TestReport] = []
        # Unregister the inherited receivers, because they write to files of pytest's own process.
        for receiver in config.hook.pytest_runtest_logreport.get_hookimpls():
            config.pluginmanager.unregister(receiver.plugin)
        config.pluginmanager.register(self)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps the report of a subtest that failed."""
        if report.failed:
            self._failed.append(report)

    def check(self) -> None:
        """Fails the test if a subtest has failed."""
        if self._failed:
            texts = [f"{report.head_line}\n{report.longreprtext}" for report in self._failed]
            count = f"{len(texts)} failed subtest{'s' * (len(texts) > 1)}"
            raise pytest.fail.Exception("\n\n".join([f"contains {count}", *texts]), pytrace=False)


def _conclude(endings: list[Ending]) -> None:
    bad = [ending.rank for ending in endings if ending.failed]
    if bad:
        text = describe(endings, bad)
        if used_cuda():
            text += f"\n\nthe process that ranks are forked from has used CUDA, which they cannot use then: {_CUDA}"
        pytest.fail(text, pytrace=False)
    for kind, leave in (("xfailed", pytest.xfail), ("skipped", pytest.skip)):
        found = [e.outcome.reason for e in endings if e.outcome and e.outcome.kind == kind]
        if found:
            leave(found[0])

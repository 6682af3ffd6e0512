"""One marked test of pytest on its ranks: what they did becomes the test's outcome and the sections of its report."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

from ._rank import shared_folder, used_cuda
from ._report import describe
from ._run import Ending, run_case

#: The line with which symm says where a dump is; the report has its calls.
DUMPED = re.compile(r"^.*the last calls of this process are in .*\n", re.MULTILINE)

_CUDA = "ask for GPUs in tests, not while modules are imported, or set PYTORCH_NVML_BASED_CUDA_CHECK=1"


def run(
    item: pytest.Function, arguments: dict[str, Any], placeholder: type, world_size: int, given: dict[str, Any]
) -> None:
    """Runs the body; ``given`` is the mark's settings, ``placeholder`` the type that stands for the rank.

    Raises what makes pytest report a failure, a skip or an expected failure.
    """
    body, node, config = item.obj, item, item.config

    def on_rank(rank: int, world_size: int) -> None:
        body(**{name: rank if isinstance(value, placeholder) else value for name, value in arguments.items()})

    def text(error: BaseException) -> str:
        return str(node.repr_failure(pytest.ExceptionInfo.from_exception(error)))

    def env(rank: int) -> dict[str, str]:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        found = {name: str(value) for name, value in names.items()}
        # Dumps go with the case, unless somebody wants them.
        found["SYMM_TRACE_DIR"] = os.environ.get("SYMM_TRACE_DIR", str(shared_folder() / "dumps"))
        return {**found, **(given["env"] or {})}

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

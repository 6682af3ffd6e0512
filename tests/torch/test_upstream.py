"""torch's own distributed tests (``_DistTestBase``), on CPU: every one with 3 ranks, 4 ranks, and 2 on each of 2 nodes.

``make test`` runs all of them with 4 ranks, and those of ``short.txt`` in the other worlds, too. ``.ci/nightly torch``
runs the rest.
``expected_skips.txt`` lists the tests that may be skipped, one test per line with its reason. The list may only shrink:
a listed test that runs fails here until its line is removed. SYMM_TEST_BACKEND=gloo runs them on Gloo, for comparison.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import backend_gates
import pytest

HERE = Path(__file__).parent
LIMIT_S = 120
#: Numbers of ranks, or of nodes and of ranks on each.
WORLDS = ("3", "4", "2x2")
#: Tests that every run makes in all worlds: each collective, messages, groups, errors, and a few programs.
SHORT = frozenset((HERE / "short.txt").read_text().split())


def upstream_tests() -> list[str]:
    """Names of the tests, read from torch's source without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / backend_gates.PACKAGE_PATH).read_text())
    outer = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "DistributedTest")
    inner = next(node for node in outer.body if isinstance(node, ast.ClassDef) and node.name == "_DistTestBase")
    return [node.name for node in inner.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def expected_skips() -> dict[tuple[str, str], str]:
    """Reasons by test and world. A line is ``test<TAB>reason``; ``test@3`` means one world only."""
    reasons = {}
    for line in (HERE / "expected_skips.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, reason = line.split("\t", 1)
            test, _, world = name.partition("@")
            for one in [world] if world else WORLDS:
                reasons[test, one] = reason
    return reasons


class Server:
    """A process with torch and the tests loaded, which runs one test at a time."""

    def __init__(self, world: str) -> None:
        self.world = world
        self.process: subprocess.Popen[str] | None = None

    def ask(self, test: str) -> dict[str, str]:
        if self.process is None:
            self.start()
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.write(test + "\n")
        self.process.stdin.flush()
        return self.read(LIMIT_S)

    def start(self) -> None:
        command = [sys.executable, str(HERE / "server.py"), self.world]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
        answer = self.read(180)  # torch's imports
        assert "ready" in answer, answer["detail"]

    def read(self, limit_s: int) -> dict[str, str]:
        assert self.process is not None and self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], limit_s)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            self.stop()
            return {"outcome": "failed", "detail": f"no answer within {limit_s} s, or the server ended", "output": ""}
        answer: dict[str, str] = json.loads(line)
        return answer

    def stop(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Server]]:
    servers = {world: Server(world) for world in WORLDS}
    yield servers
    for server in servers.values():
        server.stop()


def all_tests() -> list[Any]:
    """Each test in each world; tests that are not required for every change are marked."""
    marks = {True: pytest.mark.everything, False: ()}
    return [
        pytest.param(test, world, marks=marks[world != "4" and test not in SHORT])
        for test, world in itertools.product(upstream_tests(), WORLDS)
    ]


@pytest.mark.parametrize(("test", "world"), all_tests())
def test_upstream(servers: dict[str, Server], test: str, world: str) -> None:
    answer = servers[world].ask(test)
    reason = expected_skips().get((test, world))
    if answer["outcome"] == "failed":
        pytest.fail(f"{test} with {world} ranks\n{answer['detail']}\n{answer['output']}", pytrace=False)
    if answer["outcome"] == "skipped":
        assert reason is not None, f"{test} is skipped with {world} ranks and not listed: {answer['detail']}"
        pytest.skip(reason)
    assert reason is None, f"{test} runs with {world} ranks: take its line out of expected_skips.txt"


def test_list_names_existing_tests() -> None:
    unknown = ({test for test, _ in expected_skips()} | SHORT) - set(upstream_tests())
    assert not unknown, f"a list names tests that torch does not have: {sorted(unknown)}"

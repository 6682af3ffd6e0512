"""The kit for tests never reports a failure as a pass: verdicts with and without the mark, and what it kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from ranks import run_ranks
from test_testing import HEAD, pytest_on, running
from torch_symm.testing import RanksFailedError

KINDS = """
import asyncio, functools, unittest, warnings

def decorated(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)
    return call

@pytest.fixture
def broken():
    raise RuntimeError("no fixture")

@pytest.fixture
def broken_at_its_end():
    yield
    raise RuntimeError("no end")

@pytest.fixture
def helper(request):
    return request.getfixturevalue("subtests") if hasattr(pytest, "Subtests") else None

def test_pass(): pass
def test_fail(): assert 1 == 2
def test_raise(): raise ValueError("wrong")
def test_broken_fixture(broken): pass
def test_broken_end_of_fixture(broken_at_its_end): pass
def test_skip(): pytest.skip("here")
def test_unittest_skip(): raise unittest.SkipTest("here")
@pytest.mark.skip
def test_marked_skip(): assert 1 == 2
def test_xfail(): pytest.xfail("known")
@pytest.mark.xfail
def test_marked_xfail(): assert 1 == 2
@pytest.mark.xfail(strict=True)
def test_strict_xfail(): assert 1 == 2
@pytest.mark.xfail
def test_xpass(): pass
@pytest.mark.xfail(strict=True)
def test_strict_xpass(): pass
@pytest.mark.xfail(raises=pytest.fail.Exception)
def test_xfail_by_another_error(): raise ValueError("wrong")
@pytest.mark.parametrize("x", [1, 2])
def test_parameters(x): assert x == 1
class TestMethods:
    def test_right(self): pass
    def test_wrong(self): assert 1 == 2
async def test_coroutine(): assert 1 == 2
@decorated
async def test_decorated_coroutine(): assert 1 == 2
async def test_asynchronous_generator():
    assert 1 == 2
    yield
@decorated
async def test_decorated_asynchronous_generator():
    assert 1 == 2
    yield
def test_run_coroutine(): asyncio.run(asyncio.sleep(0))
def test_returns(): return 1 == 2
@pytest.mark.filterwarnings("error")
def test_returns_and_warnings_are_errors(): return 1 == 2
@pytest.mark.filterwarnings("error")
def test_warning_is_error(): warnings.warn("odd")
def test_warning(): warnings.warn("odd")
def test_system_exit(): sys.exit(0)
def test_raises_base_exception():
    with pytest.raises(BaseException):
        sys.exit(0)
"""
SUBTESTS = """
def test_subtests_pass(subtests):
    with subtests.test("one"): pass
def test_subtest_fails(subtests):
    with subtests.test("one", i=1): assert 1 == 2
    with subtests.test("two"): pass
def test_subtest_of_a_helper_fails(helper):
    with helper.test("one"): raise ValueError("wrong")
def test_subtest_skips(subtests):
    with subtests.test("one"): pytest.skip("here")
def test_subtest_xfails(subtests):
    with subtests.test("one"): pytest.xfail("known")
def test_subtest_fails_before_skip(subtests):
    with subtests.test("one"): assert 1 == 2
    pytest.skip("here")
@pytest.mark.xfail
def test_subtest_fails_as_expected(subtests):
    with subtests.test("one"): assert 1 == 2
"""
VERDICTS = """
import json, pytest
kept = {}
def pytest_runtest_logreport(report):
    if hasattr(report, "context") and not report.failed:
        return  # of a subtest: reported beside the test, never instead of it
    word = "x" * hasattr(report, "wasxfail") + report.outcome
    kept.setdefault(report.nodeid, []).append(word)
def pytest_sessionfinish(session):
    order = ["failed", "xpassed", "xskipped", "skipped", "passed"]
    json.dump({n: min(found, key=order.index) for n, found in kept.items()}, open("verdicts.json", "w"))
"""


def test_every_kind_of_test_has_the_verdict_that_it_has_without_the_mark(tmp_path: Path) -> None:
    body = KINDS + (SUBTESTS if hasattr(pytest, "Subtests") else "")
    (tmp_path / "conftest.py").write_text(VERDICTS)
    (tmp_path / "test_without.py").write_text(HEAD + body)
    code, text = pytest_on(tmp_path, "pytestmark = pytest.mark.ranks(2, backend=None)\n" + body, "test_without.py")
    assert code == 1, text
    found: dict[str, dict[str, str]] = {"test_it.py": {}, "test_without.py": {}}
    for name, verdict in json.loads((tmp_path / "verdicts.json").read_text()).items():
        file, _, test = name.partition("::")
        found[file][test] = verdict
    assert found["test_without.py"] == found["test_it.py"], text
    assert set(found["test_it.py"].values()) == {"failed", "xpassed", "xskipped", "skipped", "passed"}
    assert "cannot run a coroutine" in text and "runs no coroutine" in text and "xfail with raises" in text, text


def test_a_process_group_is_killed_before_its_number_can_be_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    kill_group = os.killpg

    def checked(group: int, number: int) -> None:
        # Only the child itself, running or as a zombie, keeps other processes from getting its number.
        os.waitid(os.P_PID, group, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        killed.append(group)
        kill_group(group, number)

    def body(rank: int, world_size: int) -> tuple[int, int]:
        child = subprocess.Popen(["sleep", "600"]).pid if rank == 0 else 0
        return os.getpid(), child

    monkeypatch.setattr(os, "killpg", checked)
    (first, child), (_, _) = run_ranks(body, 2, backend=None)
    assert killed == [first]
    deadline = time.monotonic() + 30
    while running(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not running(child)


def test_a_rank_that_ran_at_the_time_limit_has_not_passed() -> None:
    def stops(rank: int, world_size: int) -> None:
        if rank == 1:
            # The request for its stacks wakes it, and it returns.
            os.kill(os.getpid(), signal.SIGSTOP)

    with pytest.raises(RanksFailedError, match=r"rank 1 of 2 did not end within \S+ s, at \S+ in stops\n"):
        run_ranks(stops, 2, backend=None, timeout=4)


def test_an_exception_that_cannot_be_printed_is_reported_with_its_line() -> None:
    class OddError(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    def raises(rank: int, world_size: int) -> None:
        raise OddError

    expected = r"rank [01] of 2 failed at \S+:\d+: OddError: <exception str\(\) failed>\n"
    with pytest.raises(RanksFailedError, match=expected):
        run_ranks(raises, 2, backend=None)


CASE = """
import os, pathlib, sys, time
from torch.testing._internal.common_utils import run_tests
from torch_symm.testing import WarmMultiProcessTestCase

class TestIt(WarmMultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_long(self):
        (pathlib.Path(sys.argv[0]).parent / f"rank-{os.getpid()}").touch()
        time.sleep(600)

run_tests()
"""


def test_ranks_of_torchs_case_class_do_not_survive_their_killed_parent(tmp_path: Path) -> None:
    case = tmp_path / "case.py"
    case.write_text(CASE)
    with (tmp_path / "said").open("w") as said:
        parent = subprocess.Popen([sys.executable, str(case)], stdout=said, stderr=said)
    ranks: list[int] = []
    try:
        deadline = time.monotonic() + 120
        while len(ranks) < 2:
            assert time.monotonic() < deadline and parent.poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.02)
            ranks = [int(path.name.removeprefix("rank-")) for path in tmp_path.glob("rank-*")]
        parent.kill()
        deadline = time.monotonic() + 30
        while any(map(running, ranks)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not [rank for rank in ranks if running(rank)]
    finally:
        parent.kill()
        parent.wait()
        for rank in filter(running, ranks):
            os.kill(rank, signal.SIGKILL)


def test_all_ranks_that_hang_are_asked_for_their_stacks_before_one_answers() -> None:
    def asks(rank: int, world_size: int) -> tuple[list[str], list[str]]:
        from torch_symm.testing import WarmMultiProcessTestCase

        steps: list[str] = []

        class Pipe:
            def send(self, _: object) -> None:
                steps.append("asked")

            def poll(self, _: float) -> bool:
                steps.append("awaited")
                return steps.count("awaited") == 1

            def recv(self) -> str:
                return "at its line"

        class Case(WarmMultiProcessTestCase):
            def runTest(self) -> None: ...

        hung = [Mock(pid=subprocess.Popen(["sleep", "60"]).pid) for _ in range(2)]
        case = Case()
        case.pid_to_pipe = {process.pid: Pipe() for process in hung}
        return case._stacks_of(dict(enumerate(hung))), steps

    ((stacks, steps),) = run_ranks(asks, 1, backend=None)
    assert steps == ["asked", "asked", "awaited", "awaited"]
    assert stacks == ["rank 0:\nat its line", "rank 1:\n"]

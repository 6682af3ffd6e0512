"""The kit for tests never reports a failure as a pass: verdicts with and without the mark, and what it kills."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from ranks import run_ranks
from test_testing import HEAD, pytest_on, running

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

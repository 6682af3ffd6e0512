"""The kit for tests of distributed code: outcomes and reports of marked tests, leftovers, torch's own case class.

Each test runs pytest in a separate process on a small file, as a user of the package would.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch_symm_pytest
from ranks import run_ranks
from torch_symm import testing
from torch_symm.testing import RanksFailedError

HEAD = """
import os, subprocess, sys, time
import pytest, torch
import torch.distributed as dist
"""


def pytest_on(folder: Path, body: str, *options: str, **env: str) -> tuple[int, str]:
    """Runs pytest on a file with this content; returns its exit code and its output."""
    (folder / "test_it.py").write_text(HEAD + textwrap.dedent(body))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *options, "test_it.py"]
    full = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    done = subprocess.run(command, cwd=folder, env=full, capture_output=True, text=True, timeout=200, check=False)
    return done.returncode, done.stdout + done.stderr


def outcomes(text: str) -> dict[str, int]:
    """The numbers in the last line, by outcome."""
    return {kind: int(count) for count, kind in re.findall(r"(\d+) (\w+)", text.strip().splitlines()[-1])}


def test_bodies_get_fixtures_parameters_and_ranks(tmp_path: Path) -> None:
    body = """
    @pytest.fixture(scope="module")
    def made():
        return {"pid": os.getpid(), "call": lambda x: x + 1}

    @pytest.fixture
    def lock():
        import threading
        return threading.Lock()

    @pytest.mark.ranks([2, 3])
    @pytest.mark.parametrize("value", [5, 7])
    def test_all(rank, world_size, value, made, lock, tmp_path):
        total = torch.tensor([rank + value])
        dist.all_reduce(total)
        assert total.item() == sum(range(world_size)) + value * world_size
        assert (rank, world_size) == (dist.get_rank(), dist.get_world_size())
        assert os.environ["RANK"] == str(rank) and dist.get_backend() == "symm"
        assert lock.acquire(blocking=False) and made["call"](1) == 2 and made["pid"] == os.getppid()
        (tmp_path / str(rank)).touch()
        dist.barrier()
        assert len(list(tmp_path.iterdir())) == world_size

    class TestMany:
        pytestmark = pytest.mark.ranks(2, backend="gloo", env={"COLOUR": "red"})

        def test_method(self):
            assert dist.get_backend() == "gloo" and os.environ["COLOUR"] == "red" and self is not None

    @pytest.mark.ranks(ranks=2, backend=None)
    def test_no_group(rank):
        from torch_symm.testing import init_process_group, barrier, shared_tmp_path
        assert not dist.is_initialized()
        (shared_tmp_path() / f"here-{rank}").touch()
        barrier("written")
        assert (shared_tmp_path() / f"here-{1 - rank}").exists()
        init_process_group("symm", timeout=20)
        dist.barrier()

    def test_here():
        assert "RANK" not in os.environ
    """
    # Two modules with tests of both kinds; each must end its own fixtures.
    first = """
    @pytest.fixture(scope="module")
    def made():
        yield 1

    def test_here(made):
        pass

    @pytest.mark.ranks(2)
    def test_on_ranks(rank, made):
        dist.barrier()
    """
    (tmp_path / "test_first.py").write_text(HEAD + textwrap.dedent(first))
    code, text = pytest_on(tmp_path, body, "test_first.py")
    assert code == 0 and outcomes(text) == {"passed": 9}, text
    assert "test_all[5-2-ranks]" in text or "test_all[2-ranks-5]" in text, text


def test_failures_name_rank_line_and_last_calls(tmp_path: Path) -> None:
    body = """
    @pytest.mark.ranks(3)
    def test_wrong(rank):
        print("this is rank", rank)
        total = torch.ones(2)
        dist.all_reduce(total)
        if rank == 1:
            assert total.tolist() == [3.0, 4.0]  # line 12
        dist.barrier()

    @pytest.mark.ranks(2)
    def test_signal(rank):
        if rank:
            os.kill(os.getpid(), 11)
        dist.barrier()

    @pytest.mark.ranks(2)
    def test_exit(rank):
        if rank:
            os._exit(7)

    @pytest.mark.ranks(2)
    def test_skip(rank):
        pytest.skip("not today")

    @pytest.mark.ranks(2)
    @pytest.mark.xfail(reason="known")
    def test_known(rank):
        assert rank > 5

    @pytest.mark.ranks(2)
    def test_told(rank):
        pytest.xfail("told")

    class TestWhatEndsPytest:
        pytestmark = pytest.mark.ranks(2, backend=None)
        def test_exit(self): pytest.exit("enough")
        def test_interrupt(self): raise KeyboardInterrupt
        def test_os_exit(self): os._exit(0)
    """
    code, text = pytest_on(tmp_path, body)
    assert code == 1 and outcomes(text) == {"failed": 6, "skipped": 1, "xfailed": 2}, text
    line = next(i for i, line in enumerate((tmp_path / "test_it.py").read_text().splitlines(), 1) if "line 12" in line)
    assert f"rank 1 of 3 failed at test_it.py:{line}: AssertionError: assert [3.0, 3.0] == [3.0, 4.0]" in text
    assert "At index 1 diff: 3.0 != 4.0" in text, "the explanation of pytest's assertions"
    assert re.search(r"rank 0 \(pid \d+\) failed at test_it.py:\d+: SymmPeerError: rank 1", text), text
    assert re.search(r"last calls:\nrank 0: all_reduce\(2 × float32.*#1 completed; barrier #2 SymmPeerError", text), (
        text
    )
    assert re.search(r"Captured rank 2 call -+\nthis is rank 2", text), text
    assert re.search(r"rank 1 of 2 was killed by SIGSEGV, at test_it.py:\d+ in test_signal", text), text
    assert "rank 1 of 2 ended with exit code 7 in the middle of the test" in text
    assert "not today" in text and "the last calls of this process are in" not in text


def test_time_limits_name_who_hangs_and_leave_nothing(tmp_path: Path) -> None:
    # The names must not look like those of a leak: a fault test or a soak may run at the same time.
    body = """
    from multiprocessing.shared_memory import SharedMemory

    @pytest.fixture(scope="module")
    def table():
        memory = SharedMemory(create=True, size=4096)
        yield memory.name
        memory.close()
        memory.unlink()

    def hangs(rank, table):
        assert os.path.exists(f"/dev/shm/{table}"), "shared memory of a fixture outlives the ranks of a test"
        shared = open(f"/dev/shm/kit-{os.getpid()}-{rank}", "w+b")
        shared.truncate(4096)
        import mmap
        mapped = mmap.mmap(shared.fileno(), 4096)
        child = subprocess.Popen(["sleep", "1000"])
        print("child", child.pid, "has", shared.name)
        dist.barrier()
        if rank == 1:
            while True:
                time.sleep(0.01)
        dist.barrier()

    @pytest.mark.ranks(3, timeout=8, group_timeout=4)
    def test_symm(rank, table):
        hangs(rank, table)

    @pytest.mark.ranks(3, timeout=8, group_timeout=4, backend="gloo")
    def test_gloo(rank, table):
        hangs(rank, table)
    """
    code, text = pytest_on(tmp_path, body)
    assert code == 1 and outcomes(text) == {"failed": 2}, text
    assert len(re.findall(r"rank 1 of 3 did not end within 8\.\d s, at test_it.py:\d+ in hangs\n", text)) == 2, text
    where = r"rank 1, where it hung:\n(?:.*\n)*?Current thread .*\n +File .*test_it.py.* in hangs\n +File .* in test_"
    assert len(re.findall(where, text)) == 2, text
    assert len(re.findall(r"rank 0 \(pid \d+\) failed at test_it.py:\d+: ", text)) == 2, text
    processes = [int(pid) for pid in re.findall(r"^child (\d+) ", text, re.MULTILINE)]
    processes += [int(pid) for pid in re.findall(r"^rank \d \(pid (\d+)\)", text, re.MULTILINE)]
    assert len(processes) == 12 and not [pid for pid in processes if running(pid)], text
    memory = [Path(name) for name in re.findall(r"/dev/shm/kit-\d+-\d", text)]
    # Ranks that were not killed had to remove their memory themselves.
    assert len(memory) == 6 and not [path for path in memory if path.name.endswith("-1") and path.exists()]
    for path in memory:
        path.unlink(missing_ok=True)


def running(pid: int) -> bool:
    """Returns true if the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("mark", "said"),
    [
        (pytest.mark.ranks(), "n must be a positive number of ranks"),
        (pytest.mark.ranks(0), "n must be a positive number of ranks"),
        (pytest.mark.ranks("4"), "n must be a positive number of ranks"),
        (pytest.mark.ranks(2, ranks=[3]), "n must be a positive number of ranks"),
        (pytest.mark.ranks(2, timeut=3), "unknown: timeut"),
        (pytest.mark.ranks(2, env={"COLOUR": 1}), "env must map strings to strings, not {'COLOUR': 1}"),
        (pytest.mark.ranks(2, env=["COLOUR"]), "env must map strings to strings, not ['COLOUR']"),
    ],
)
def test_wrong_marks_say_what_is_right(mark: pytest.MarkDecorator, said: str) -> None:
    item = Mock(nodeid="test_it.py::test_it", get_closest_marker=lambda _: mark.mark)
    with pytest.raises(pytest.UsageError) as caught:
        torch_symm_pytest.settings(item)
    assert said in str(caught.value) and "ranks(n, *, backend='symm'" in str(caught.value)


def test_the_warm_process_is_not_what_other_tests_made_of_pytest_and_some_tests_cannot_use_it(tmp_path: Path) -> None:
    body = """
    import unittest
    STATE, FOLDER = [], os.environ["FOLDER"]

    def test_first():
        STATE.append(1)

    @pytest.mark.ranks(2)
    def test_clean():
        assert STATE == []

    @pytest.fixture
    def fatal():
        # A helper, which keeps the end of each pipe open.
        if os.fork() == 0:
            deadline = time.monotonic() + 30
            while not os.path.exists(FOLDER + "/noticed") and time.monotonic() < deadline:
                time.sleep(0.01)
            if not os.path.exists(FOLDER + "/noticed"):
                open(FOLDER + "/late", "w").close()
            os._exit(0)
        os.kill(os.getpid(), 9)

    @pytest.mark.ranks(2)
    def test_fatal(fatal): pass

    def test_after_it():
        open(FOLDER + "/noticed", "w").close()
        assert not os.path.exists(FOLDER + "/late"), "pytest waited for the helper"

    @pytest.mark.ranks(2)
    def test_after():
        dist.barrier()

    class TestCase(unittest.TestCase):
        @pytest.mark.ranks(2)
        def test_it(self): pass

    @pytest.mark.ranks(2)
    async def test_coroutine(): pass

    def test_unmarked(rank): pass

    @pytest.fixture
    def early(rank):
        return [1, 2][rank]

    @pytest.mark.ranks(2)
    def test_early(early): pass

    @pytest.mark.ranks(2)
    def test_ends_the_run():
        dist.barrier()
    """
    code, text = pytest_on(tmp_path, body, FOLDER=str(tmp_path))
    assert code == 1 and outcomes(text).items() >= {"failed": 1, "passed": 5}.items(), text
    assert "WarmMultiProcessTestCase" in text and "asyncio.run" in text, text
    assert "rank is for tests with @pytest.mark.ranks(n)" in text and "only the test has a rank" in text, text
    assert "the warm process, which makes fixtures and forks ranks, ended with -9" in text, text


@pytest.mark.parametrize("group", [True, False], ids=["group", "process"])
@pytest.mark.parametrize("where", ["test_on_ranks", "test_here"])
def test_an_interrupted_run_ends_its_fixtures(tmp_path: Path, where: str, group: bool) -> None:
    body = f"""
    FOLDER = __import__("pathlib").Path({str(tmp_path)!r})

    @pytest.fixture(scope="session")
    def made():
        yield
        time.sleep(0.5)
        (FOLDER / "ended").touch()

    def hangs(name):
        (FOLDER / name).touch()
        while name == {where!r}:
            time.sleep(0.01)

    # Python loses an interrupt that arrives while a process forks; the time limit then ends the test.
    @pytest.mark.ranks(2, backend=None, timeout=15)
    def test_on_ranks(rank, made):
        from torch_symm.testing import barrier
        barrier("forked")
        time.sleep(0.2)
        hangs("test_on_ranks")

    def test_here():
        hangs("test_here")

    @pytest.mark.ranks(2, backend=None)
    def test_not_reached(made): pass
    """
    (tmp_path / "test_it.py").write_text(HEAD + textwrap.dedent(body))
    # SIGINT may be ignored, if a shell has started the tests in the background.
    start = "import signal, sys, pytest; signal.signal(signal.SIGINT, signal.default_int_handler); "
    command = [sys.executable, "-c", f"{start} sys.exit(pytest.main(sys.argv[1:]))", "-p", "no:cacheprovider"]
    with (tmp_path / "said").open("w") as said:
        ran = subprocess.Popen([*command, "test_it.py"], cwd=tmp_path, stdout=said, stderr=said, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / where).exists():
            assert time.monotonic() < deadline and ran.poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.02)
        (os.killpg if group else os.kill)(ran.pid, signal.SIGINT)
        code = ran.wait(50)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(ran.pid, signal.SIGKILL)
        ran.wait()
    text = (tmp_path / "said").read_text()
    assert code == pytest.ExitCode.INTERRUPTED and "KeyboardInterrupt" in text, text
    assert (tmp_path / "ended").exists(), text


@pytest.mark.slow
def test_workers_of_xdist_run_marked_tests(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    body = """
    @pytest.mark.ranks([2, 3])
    @pytest.mark.parametrize("value", [1, 2])
    def test_it(value, world_size):
        total = torch.tensor([value])
        dist.all_reduce(total)
        assert total.item() == value * world_size

    @pytest.mark.ranks(2)
    def test_wrong(rank):
        assert rank == 0
    """
    code, text = pytest_on(tmp_path, body, "-n", "1")
    assert code == 1 and outcomes(text).items() >= {"failed": 1, "passed": 4}.items(), text
    assert "rank 1 of 2 failed at test_it.py" in text


def test_without_a_marked_test_nothing_is_imported_and_nothing_is_forked(tmp_path: Path) -> None:
    (tmp_path / "test_plain.py").write_text("""
import os, pathlib, sys
def test_it():
    assert 'torch' not in sys.modules and 'torch_symm' not in sys.modules
    assert 'torch_symm_pytest' in sys.modules
    assert pathlib.Path(f'/proc/{os.getpid()}/task/{os.getpid()}/children').read_text() == ''
""")
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "test_plain.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


CASE = """
import gc, os, sys, time, unittest
import torch
import torch.distributed as dist
from torch_symm.testing import WarmMultiProcessTestCase, skip_if_lt_x_gpu

class TestIt(WarmMultiProcessTestCase):
    @property
    def world_size(self): return 2

    def setUp(self):
        super().setUp()
        # A store with a thread that exists in this process only, and that only the garbage collector destroys.
        gc.disable()
        cycle = [dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)]
        cycle.append(cycle)
        del cycle
        self._spawn_processes()
        gc.enable()

    def test_garbage(self):
        gc.collect()

    def tearDown(self):
        super().tearDown()
        if os.path.exists(self.file_name):
            os.unlink(self.file_name)

    def group(self):
        dist.init_process_group("gloo", store=dist.FileStore(self.file_name, 2), rank=self.rank, world_size=2)

    def test_sum(self):
        self.group()
        total = torch.tensor([self.rank + 1])
        dist.all_reduce(total)
        self.assertEqual(total.item(), 3)

    def test_wrong(self):
        if self.rank == 1:
            self.assertEqual(1, 2)

    def test_skip(self):
        self.skipTest("today")

    @skip_if_lt_x_gpu(8)
    def test_gpus(self):
        raise AssertionError("this machine has 8 GPUs")

    def test_hang(self):
        if self.rank == 1:
            time.sleep(100)

    def test_dead(self):
        if self.rank == 0:
            os._exit(3)

from torch.testing._internal import common_distributed
common_distributed.TIMEOUT_OVERRIDE["test_hang"] = 1
result = unittest.main(exit=False).result
for verdict in ("errors", "failures", "skipped"):
    print(verdict, *sorted(case._testMethodName for case, _ in getattr(result, verdict)))
"""


@pytest.mark.slow
def test_torchs_case_class_keeps_its_verdicts(tmp_path: Path) -> None:
    (tmp_path / "case.py").write_text(CASE)
    command = [sys.executable, str(tmp_path / "case.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    verdicts = ["errors test_hang test_wrong", "failures test_dead", "skipped test_gpus test_skip"]
    assert done.stdout.splitlines()[-3:] == verdicts and "Ran 7 tests" in done.stderr, done.stdout + done.stderr
    assert "ranks [1] did not end within 1 s" in done.stderr and "in test_hang" in done.stderr, done.stderr
    assert "Process 1 exited with error code 10" in done.stderr


class TwoArgumentsError(Exception):
    """An exception that can be pickled but not unpickled."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(one + two)


def test_run_ranks_reports_and_returns() -> None:
    assert run_ranks(lambda rank, world_size, text: text * rank, 3, "a", backend=None) == ["", "a", "aa"]

    def unpicklable(rank: int, world_size: int) -> object:
        return lambda: rank

    def unloadable(rank: int, world_size: int) -> object:
        return TwoArgumentsError(rank, world_size)

    def without_output(rank: int, world_size: int) -> int:
        sys.stdout, sys.stderr = None, None  # type: ignore[assignment]
        return rank

    assert run_ranks(without_output, 2, backend=None) == [0, 1]
    for body in (unpicklable, unloadable):
        with pytest.raises(RanksFailedError, match=r"rank [01] of 2 failed: what it returned cannot be pickled"):
            testing.run_ranks(body, 2, backend=None)
    for size, timeout in ((0, 60.0), (-1, 60.0), (2, 0.0), (2, -1.0), (2, float("nan"))):
        with pytest.raises(ValueError, match="timeout is" if size > 0 else "world_size is"):
            testing.run_ranks(lambda rank, world_size: None, size, backend=None, timeout=timeout)
    with pytest.raises(RuntimeError, match="not inside a test rank"):
        testing.shared_tmp_path()


def test_run_ranks_leaves_no_dump_and_knows_which_rank_made_no_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SYMM_TRACE_DIR")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    def fails(rank: int, world_size: int) -> None:
        if rank == 0:
            dist.all_reduce(torch.ones(4))
        raise ValueError(os.environ["SYMM_TRACE_DIR"])

    with pytest.raises(RanksFailedError) as failed:
        testing.run_ranks(fails, 2, group_timeout=30)
    said = str(failed.value)
    assert re.search(r"last calls:\nrank 0: all_reduce.*SymmPeerError\nrank 1: none$", said, re.MULTILINE), said
    assert re.search(r"rank 1 .*: ValueError: .*/symm-test-\w+/dumps", said), said
    assert "the last calls of this process are in" not in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
def test_no_rank_leaves_while_others_connect_their_groups_of_gloo(monkeypatch: pytest.MonkeyPatch, debug: str) -> None:
    """Under DETAIL, torch makes one for each group."""
    # Longer than the time limit of the case.
    monkeypatch.setattr("torch_symm.testing._rank.LEAVE_S", 100.0)

    def leaves(rank: int, world_size: int) -> bool:
        dist.set_debug_level(getattr(dist.DebugLevel, debug))
        dist.new_group(backend="gloo" if debug == "OFF" else "symm")
        testing.barrier("connected")
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            time.sleep(0.5)
        return (testing.shared_tmp_path() / "outcome-0").exists()

    # Without the wait, rank 0 would end at once. It does not wait for the rank that was killed.
    assert run_ranks(leaves, 3, expect_killed=(2,)) == [False, False, None]

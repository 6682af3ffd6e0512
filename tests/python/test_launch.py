"""``torch-symm hello`` and ``torch-symm run``: real ranks, and the parts left to torchrun.

In addition, ranks of all tools that cannot be started or that end within a report.
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import pickle
import signal
import struct
import subprocess
import sys
import time
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest
import torch_symm
from torch.distributed import run as torchrun
from torch.multiprocessing import ProcessExitedException
from torch_symm import __main__ as entry
from torch_symm.launch import messages
from torch_symm.launch import ranks as launched
from torch_symm.launch.ranks import Ended, Program
from torch_symm.launch.watch import StalledError, state
from torch_symm.tools import hello

PROGRAM = """
import sys
import torch, torch.distributed as dist
dist.init_process_group(sys.argv[1])
number = torch.ones(1)
dist.all_reduce(number)
backend = dist.group.WORLD._get_backend(torch.device("cpu"))
print(f"{number.item():g} {type(backend).__name__} {sys.argv[2:]}\\n", end="", flush=True)
dist.destroy_process_group()
sys.exit(3)
"""


def test_hello_says_what_was_used_and_how_fast(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, kept = hello.run_programs, list[Ended]()
    monkeypatch.setattr(hello, "run_programs", lambda *given: kept or kept.extend(run(*given)) or kept)
    assert entry.main(["hello", "--ranks", "3", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["device"], found["ranks"], found["sum"]) == ("cpu", 3, 6.0)
    assert found["torch_symm"] == torch_symm.__version__ and found["transport"].startswith("shared memory; ")
    assert set(found["us"]) == {"8", "1048576"} and all(us > 0 for us in found["us"].values())
    assert entry.main(["hello", "--device", "cpu", "--ranks", "3"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "starting 3 ranks on cpu …" and "3 ranks formed a group in " in said[2]
    assert any(line.startswith("all_reduce takes ") and "µs for 8 B" in line and "µs for 1 MB" in line for line in said)


def test_hello_has_as_many_ranks_as_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, allowed, ranks in ((1, None, 2), (3, None, 3), (64, None, 8), (64, 4.5, 4)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        monkeypatch.setattr(hello.cgroup, "cores_allowed", lambda allowed=allowed: allowed)
        assert hello.ranks_here("cpu") == ("cpu", ranks)


def test_a_rank_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ended = [Ended([], "", -9), Ended([{"step": "all_reduce", "error": "SymmPeerError: rank 0 has ended"}], "", 1)]

    def run(children: list[Program], seconds: float) -> list[Ended]:
        assert len(children) == 2 and [one.environment["RANK"] for one in children] == ["0", "1"]
        return ended

    monkeypatch.setattr(hello, "run_programs", run)
    assert entry.main(["hello", "--device", "cpu", "--ranks", "2"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("2 ranks on cpu failed: rank 1: all_reduce: SymmPeerError: rank 0 has ended\n")
    assert "torch_symm doctor" in said or "torch-symm doctor" in said


def test_a_program_of_gloo_runs_on_symm_and_its_status_is_kept(tmp_path: Path) -> None:
    (program := tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch_symm", "run", "--nproc-per-node", "2", "--replace-gloo", str(program)]
    command += ["gloo", "--replace-gloo", "--nproc-per-node"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and "exitcode  : 3" in done.stderr
    assert done.stdout.split() == ["2", "_GlooSubstitute", "['--replace-gloo',", "'--nproc-per-node']"] * 2


@pytest.mark.parametrize(
    ("words", "passed"),
    [
        (["p.py"], ["--standalone", "--nproc-per-node=2", "p.py"]),
        (["-m", "p", "--nnodes", "3"], ["--standalone", "--nproc-per-node=2", "-m", "p", "--nnodes", "3"]),
        (["--replace-gloo", "--nproc_per_node=5", "p.py"], ["--standalone", "--nproc_per_node=5", "p.py"]),
        (["--nnodes=2", "--nproc-per-node", "1", "p.py"], ["--nnodes=2", "--nproc-per-node", "1", "p.py"]),
        (["--rdzv-endpoint=a:1", "p.py", "-x"], ["--nproc-per-node=2", "--rdzv-endpoint=a:1", "p.py", "-x"]),
    ],
)
def test_options_are_torchruns(
    words: list[str], passed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(torchrun, "main", seen.append)
    monkeypatch.setattr("torch_symm.tools.run.ranks_here", lambda: ("cpu", 2))
    monkeypatch.delenv("PET_NPROC_PER_NODE", raising=False)
    monkeypatch.setenv("SYMM_REPLACE_GLOO", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.py").touch()
    assert entry.main(["run", *words]) == 0
    assert seen == [passed]
    assert os.environ["SYMM_REPLACE_GLOO"] == ("1" if words[0] == "--replace-gloo" else "")


def test_mistakes_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    for words, says in (
        (["run"], "name a program to run"),
        (["run", "--replace-gloo=1", "p.py"], "ignored explicit argument '1'"),
        (["run", "nowhere.py"], "there is no program nowhere.py"),
        (["run", "--replace-gloos", __file__], "there is no option --replace-gloos; did you mean --replace-gloo?"),
        (["run", "--nproc-per-node", "2"], "run: name a program to run"),
        (["run", "--nnodes", "x", __file__], "--nnodes x: neither a number of nodes nor a range"),
        (["run", str(Path(__file__).parent)], "is a folder without a __main__.py"),
        (["run", "--nproc-per-node", "0", __file__], "--nproc-per-node 0: must be at least 1"),
        (["run", "--nproc-per-node=two", __file__], "Unsupported nproc_per_node value: two"),
    ):
        with pytest.raises(SystemExit) as ended:
            entry.main(words)
        assert ended.value.code == 2 and says in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        entry.main(["run", "--help"])
    assert ended.value.code == 0 and "[options of torchrun] PROGRAM" in capsys.readouterr().out


def reports_blocked_signals(rank: int, results: Any) -> None:
    results.put(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def test_ranks_leave_an_interrupt_to_their_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched, "WARM", "fork")
    results = launched.queue()
    with launched.started(reports_blocked_signals, (results,), 1, warm=True) as context:
        assert list(messages.reported(context, results, 1)) == [True]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def reports_itself(rank: int, results: Any) -> None:
    results.put(os.getpid())
    time.sleep(60)


def launches(results: Any) -> None:
    with launched.started(reports_itself, (results,), 1, warm=True):
        time.sleep(60)


def test_ranks_end_with_a_launcher_that_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched, "WARM", "fork")
    results = launched.queue()
    launcher = multiprocessing.get_context("fork").Process(target=launches, args=(results,))
    launcher.start()
    rank = results.get(timeout=60)
    launcher.kill()
    launcher.join()
    deadline = time.monotonic() + 30
    while state(rank) not in ("", "Z") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert state(rank) in ("", "Z")


def waits(rank: int) -> None:
    """A rank that does not end by itself while the test runs."""
    time.sleep(60)


def test_ranks_that_were_started_end_if_a_later_one_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched, "WARM", "fork")
    processes, usual = list[Any](), ForkProcess.start

    def start(process: ForkProcess) -> None:
        if processes:
            raise BlockingIOError("no process is left")
        processes.append(process)
        usual(process)

    monkeypatch.setattr(ForkProcess, "start", start)
    with pytest.raises(BlockingIOError), launched.started(waits, (), 3, warm=True):
        pass
    (first,) = processes
    assert not first.is_alive()


def test_a_forked_process_that_cannot_be_tracked_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    forked, pids = launched.Forked(), list[int]()

    def pidfd_open(pid: int) -> int:
        pids.append(pid)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", pidfd_open)
    with pytest.raises(OSError, match="Too many open files"):
        forked.fork(lambda: time.sleep(60))
    assert not forked.running
    with pytest.raises(ChildProcessError):  # it has ended and is reaped
        os.waitpid(pids[0], os.WNOHANG)


def test_a_signal_while_a_program_starts_leaves_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    processes, usual = list[Any](), subprocess.Popen

    def starts(*arguments: Any, **options: Any) -> Any:
        processes.append(usual(*arguments, **options))
        os.kill(os.getpid(), signal.SIGTERM)
        return processes[-1]

    monkeypatch.setattr(subprocess, "Popen", starts)
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))
    try:
        with pytest.raises(SystemExit):
            launched.run([launched.Program("torch_symm.tools.hello_rank", ["cpu"], os.environ)] * 2, 30)
    finally:
        signal.signal(signal.SIGTERM, before)
        ended = [process.poll() for process in processes]
        for process in processes:
            process.kill()
    assert ended == [-signal.SIGKILL]


REPORTS = """
import os, signal, sys
from torch_symm.launch.messages import MARK, send
os.write(1, b"progress: 10%")
send({"step": 1})
os.write(1, (MARK + "is no message. " + MARK + '{"step": 2} and more').encode())
send({"text": MARK + "{"})
os.write(1, (MARK + '{"step": ').encode())
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_messages_are_kept_beside_other_output_and_after_a_kill(tmp_path: Path) -> None:
    (tmp_path / "symm_test_reports.py").write_text(REPORTS)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(paths))
    (ended,) = launched.run([Program("symm_test_reports", [], environment)], 100)
    assert ended.messages == [{"step": 1}, {"step": 2}, {"text": "torch_symm.message {"}]
    assert ended.status == -signal.SIGKILL and ended.last_words() == "was killed by SIGKILL"


def sends_half(rank: int, results: Any, status: int | None) -> None:
    """Sends a message, and the first byte of a second one of 1000 bytes."""
    results._sem.acquire()  # as `put` does
    results._writer.send_bytes(pickle.dumps(rank))
    os.write(results._writer.fileno(), struct.pack("!i", 1000) + b"x")
    if status is None:
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        os._exit(status)


@pytest.mark.parametrize(
    ("status", "error"),
    [(None, ProcessExitedException), (1, ProcessExitedException), (0, StalledError)],
)
def test_a_rank_that_ends_within_a_message_ends_the_run(
    status: int | None, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launched, "WARM", "fork")
    monkeypatch.setattr(messages, "PARTIAL_POLLS", 3)
    results, found = launched.queue(), list[int]()
    with pytest.raises(error), launched.started(sends_half, (results, status), 1, warm=True) as context:
        for message in messages.reported(context, results, 2):
            found.append(message)
    assert found == [0]
    results._writer.close()  # ends the thread that waits for the rest of the message

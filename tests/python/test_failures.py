"""When something goes wrong: every rank hears the same cause in time, nothing hangs, nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
import torch_symm
from ranks import init, meet, run_ranks


@contextmanager
def within(seconds: float) -> Iterator[None]:
    start = time.monotonic()
    yield
    taken = time.monotonic() - start
    assert taken < seconds, f"took {taken:.2f} s"


def zeros(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(count, dtype=dtype)


def first_cause_stands(cause: str) -> None:
    for call in (
        lambda: dist.all_reduce(zeros(1)),
        lambda: dist.all_reduce(zeros(1), async_op=True).wait(),
        lambda: dist.barrier(),
        lambda: dist.send(zeros(1), 1 - min(dist.get_rank(), 1)),
        lambda: dist.recv(zeros(1), 1 - min(dist.get_rank(), 1)),
    ):
        with within(1), pytest.raises(dist.DistBackendError) as again:
            call()
        assert cause in str(again.value) or str(again.value) in cause, str(again.value)


def killed(rank: int, world: int, kind: str) -> str:
    pids = [None] * world
    dist.all_gather_object(pids, os.getpid())
    tensor = torch.ones(16 << 20)
    victim = world - 1
    if rank == victim:

        def kill() -> None:
            time.sleep(0.3)
            (ranks.scratch / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=kill).start()
    with pytest.raises(torch_symm.SymmPeerError) as error:
        while True:
            if kind == "async":
                dist.all_reduce(tensor, async_op=True).wait()
            elif kind == "sync":
                dist.all_reduce(tensor)
            elif rank == victim:
                time.sleep(10)
            elif kind == "recv":
                dist.recv(tensor, victim)
            elif kind == "send":
                dist.send(tensor, victim)
            else:
                dist.barrier()
    seconds = time.time() - float((ranks.scratch / "killed").read_text())
    assert seconds < 1, f"noticed after {seconds:.2f} s"
    text = str(error.value)
    assert f"rank {victim}" in text and f"pid {pids[victim]}" in text, text
    if kind in ("sync", "async", "barrier"):
        assert ("all_reduce" if kind != "barrier" else "barrier") in text and "#" in text, text
    first_cause_stands(text)
    with within(1):
        dist.destroy_process_group()
    init(rank, world - 1, name="survivors")
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    assert (tensor == world - 1).all()
    return text


@pytest.mark.timed
@pytest.mark.parametrize("kind", ("sync", "async", "barrier", "recv", "send"))
def test_a_killed_rank(kind: str) -> None:
    results = run_ranks(killed, 3, kind, expect_killed=(2,))
    assert "".join(results.logs) == "", "quiet"


def stopped(rank: int, world: int) -> None:
    pids = [None] * world
    dist.all_gather_object(pids, os.getpid())
    if rank == 0:
        pid = os.fork()
        if pid == 0:
            time.sleep(0.3)
            os.kill(pids[1], signal.SIGSTOP)
            time.sleep(5)
            os.kill(pids[1], signal.SIGCONT)
            os._exit(0)
    longest = 0.0
    end = time.monotonic() + 6.5
    turns = torch.zeros(1, dtype=torch.int32)
    last = time.monotonic()
    while True:
        turns.fill_(last < end)
        dist.all_reduce(turns, dist.ReduceOp.MIN)
        if turns.item() == 0:
            break
        tensor = torch.full((1 << 20,), float(rank))
        dist.all_reduce(tensor)
        assert (tensor == world * (world - 1) / 2).all()
        longest = max(longest, time.monotonic() - last)
        last = time.monotonic()
    if rank == 0:
        os.waitpid(pid, 0)
    assert longest > 3, "somebody waited"


def test_a_rank_that_is_stopped_for_a_while() -> None:
    results = run_ranks(stopped, 3)
    assert results.seconds > 5


def late(rank: int, world: int, kind: str) -> None:
    dist.all_reduce(zeros(3))
    if rank == 2:
        meet("given up", rank, world)
        with pytest.raises(torch_symm.SymmTimeout):
            dist.all_reduce(zeros(1000))
        return
    start = time.monotonic()
    with pytest.raises(torch_symm.SymmTimeout) as error:
        if kind == "sync":
            dist.all_reduce(zeros(1000))
        elif kind == "async":
            dist.all_reduce(zeros(1000), async_op=True).wait()
        else:
            dist.barrier()
    taken = time.monotonic() - start
    assert 1.0 < taken < 15, taken
    text = str(error.value)
    call = "barrier" if kind == "barrier" else "all_reduce"
    parts = ("rank 2", call, "#2", "pid", "alive", "finished all_reduce #1 and began nothing since")
    for part in parts + (() if kind == "barrier" else ("4000 bytes",)):
        assert part in text, (part, text)
    first_cause_stands(text)
    meet("given up", rank, world)


@pytest.mark.timed
@pytest.mark.parametrize("kind", ("sync", "async", "barrier"))
def test_a_rank_that_never_arrives(kind: str) -> None:
    run_ranks(late, 3, kind, group_timeout=1.5)


def late_message(rank: int, world: int) -> None:
    if rank == 0:
        with within(3), pytest.raises(torch_symm.SymmTimeout, match=r"rank 1.*recv|recv.*rank 1"):
            dist.recv(zeros(3), 1)
    meet("given up", rank, world)


@pytest.mark.timed
def test_a_message_that_never_comes() -> None:
    run_ranks(late_message, 2, group_timeout=1)


def aborted(rank: int, world: int, kind: str) -> None:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    dist.barrier()
    if rank != 0:
        # Rank 0's abort reaches every rank.
        with within(3), pytest.raises(torch_symm.SymmPeerError, match=r"rank 0.*abort"):
            time.sleep(0.6)
            dist.all_reduce(zeros(3))
        return

    def abort() -> None:
        time.sleep(0.3)
        backend.abort()

    thread = threading.Thread(target=abort)
    thread.start()
    with within(1), pytest.raises(torch_symm.SymmAborted):
        if kind == "sync":
            dist.all_reduce(zeros(3))
        elif kind == "async":
            dist.all_reduce(zeros(3), async_op=True).wait()
        else:
            dist.recv(zeros(3), 1)
    thread.join()


@pytest.mark.timed
@pytest.mark.parametrize("kind", ("sync", "async", "recv"))
def test_abort_from_another_thread(kind: str) -> None:
    run_ranks(aborted, 2, kind)


def abort_and_again(rank: int, world: int) -> None:
    from torch.distributed.distributed_c10d import _abort_process_group

    dist.all_reduce(zeros(3))
    with within(1):
        _abort_process_group()
    init(rank, world, name="second")
    dist.all_reduce(zeros(3))


@pytest.mark.timed
def test_abort_process_group_and_a_new_one() -> None:
    run_ranks(abort_and_again, 2)


def leaving(rank: int, world: int) -> None:
    """A rank that destroys the group while others need it is named; after the last call any order will do."""
    dist.all_reduce(zeros(3))
    if rank == 0:
        dist.destroy_process_group()
        return
    with within(2), pytest.raises(torch_symm.SymmPeerError, match=r"rank 0.*left"):
        dist.all_reduce(zeros(3))


@pytest.mark.timed
def test_a_rank_that_leaves() -> None:
    run_ranks(leaving, 2)


def every_trace_of_a_kill(rank: int, world: int) -> None:
    dist.all_reduce(zeros(1 << 20))
    dist.new_group()
    dist.barrier()
    meet("all", rank, world)
    os.kill(os.getpid(), signal.SIGKILL)


def test_nothing_is_left_when_all_are_killed(tmp_path: Path) -> None:
    shared = {entry.name for entry in Path("/dev/shm").iterdir()}
    sockets = symm_sockets()
    # The ranks' TMPDIR, not pytest's.
    before = tempfile.tempdir
    tempfile.tempdir = str(tmp_path)
    try:
        run_ranks(every_trace_of_a_kill, 3, expect_killed=(0, 1, 2), env={"TMPDIR": str(tmp_path)})
    finally:
        tempfile.tempdir = before
    assert list(tmp_path.iterdir()) == []
    left = {entry.name for entry in Path("/dev/shm").iterdir()} - shared
    assert not [name for name in left if "symm" in name]
    # Others on this machine may have groups of their own, which come and go.
    left = symm_sockets() - sockets
    deadline = time.monotonic() + 30
    while left and time.monotonic() < deadline:
        time.sleep(0.5)
        left &= symm_sockets()
    assert not left


def symm_sockets() -> set[str]:
    return {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "@symm-" in line}


def script(body: str, directory: Path, world: int = 2, limit: float = 60) -> list[subprocess.CompletedProcess[str]]:
    """Runs ``body`` as a program on each rank, with the interpreter's own exit; there is a group."""
    preamble = f"""
        import os, sys, time, torch, torch.distributed as dist
        torch.set_num_threads(1)
        rank, world = int(sys.argv[1]), {world}
        dist.init_process_group("symm", init_method="file://{directory}/store", rank=rank, world_size=world)
        def marked():
            print("exiting", time.time(), flush=True)
        import atexit
        atexit.register(marked)
    """
    program = textwrap.dedent(preamble) + textwrap.dedent(body)
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", program]
    started = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(world)
    ]
    done = []
    for process in started:
        try:
            out, err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            for other in started:
                other.kill()
            raise
        taken = time.time() - float(out.split("exiting")[-1].split()[0]) if "exiting" in out else 0.0
        # Where several processes take turns on a core, each is later by their number.
        allowed = 2 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        assert taken < allowed, f"the exit took {taken:.1f} s, {allowed:.1f} are allowed"
        done.append(subprocess.CompletedProcess(command, process.returncode, out, ranks.DUMPED.sub("", err)))
    return done


EXITS = {
    "destroyed": "dist.all_reduce(torch.ones(3)); dist.destroy_process_group()",
    "not destroyed": "dist.all_reduce(torch.ones(3))",
    "open work": """
        work = dist.all_reduce(torch.ones(1 << 20), async_op=True)
        receive = dist.irecv(torch.ones(3), 1 - rank)
        """,
    "one rank earlier": """
        dist.all_reduce(torch.ones(3))
        if rank == 0:
            time.sleep(0.5)
        """,
    "failed": """
        try:
            dist.all_reduce(torch.ones(3 + rank))
        except dist.DistBackendError:
            pass
        """,
    "failed, destroyed": """
        try:
            dist.all_reduce(torch.ones(3 + rank))
        except dist.DistBackendError:
            pass
        dist.destroy_process_group()
        """,
    "in a thread": """
        import threading
        threading.Thread(target=lambda: dist.all_reduce(torch.ones(3)), daemon=True).start()
        time.sleep(0.3)
        """,
}


@pytest.mark.timed
@pytest.mark.parametrize("name", EXITS)
def test_exit_is_quick_and_quiet(name: str, tmp_path: Path) -> None:
    for process in script(EXITS[name], tmp_path):
        # torch itself asks for destroy_process_group() for some backends only; nothing else may be said.
        assert process.returncode == 0, process.stderr
        assert process.stderr == "", process.stderr


def detail(rank: int, world: int) -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    init(rank, world)
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, async_op=True).wait()
    assert (tensor == world**2).all()
    if rank == 0:
        dist.send(tensor, 1)
    elif rank == 1:
        dist.recv(tensor, 0)
    gathered = torch.zeros(world)
    dist.all_gather_into_tensor(gathered, torch.tensor([float(rank)]))
    assert gathered.tolist() == [float(r) for r in range(world)]
    dist.barrier(group=dist.new_group())
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    for _ in range(3):
        model(torch.full((2, 4), float(rank))).sum().backward()
    gradient = model.module.weight.grad
    others = [torch.zeros_like(gradient) for _ in range(world)]
    dist.all_gather(others, gradient)
    assert all(torch.equal(other, gradient) for other in others)
    dist.barrier()


def test_distributed_debug_detail() -> None:
    run_ranks(detail, 2, backend=None, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})


def detail_mismatch(rank: int, world: int) -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    init(rank, world, timeout=20)
    with pytest.raises(RuntimeError, match=r"(?i)mismatch|disagree|shape"):
        dist.all_reduce(zeros(3 + rank))


def test_a_mismatch_under_detail() -> None:
    run_ranks(detail_mismatch, 2, backend=None, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})


def status(rank: int, world: int) -> None:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    success = backend.get_error()
    assert "SUCCESS" in str(success)
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(zeros(3 + rank))
    assert "COMM_ERROR" in str(backend.get_error())


def test_get_error() -> None:
    run_ranks(status, 2)


def set_timeout(rank: int, world: int) -> None:
    dist.barrier()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend._set_default_timeout(timedelta(seconds=0.5))
    assert backend.options._timeout == timedelta(seconds=0.5)
    if rank == 0:
        with within(2), pytest.raises(torch_symm.SymmTimeout):
            dist.all_reduce(zeros(3))
    meet("given up", rank, world)


@pytest.mark.timed
def test_a_changed_timeout() -> None:
    run_ranks(set_timeout, 2)

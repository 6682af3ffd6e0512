"""What users see when something goes wrong: typed errors that name the culprit, in time, on every rank."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Outcome, init, meet, raises_within, run_ranks, values

MB = 1 << 18  # elements of float32


MISMATCHES: dict[str, tuple[Callable[[], Any], Callable[[], Any], str, str]] = {
    # name: (what most ranks call, what rank 1 calls, words that stand for each in the message)
    "collective": (
        lambda: dist.all_reduce(torch.ones(4)),
        lambda: dist.broadcast(torch.ones(4), 0),
        "all_reduce",
        "broadcast",
    ),
    "collective with barrier": (
        lambda: dist.all_reduce(torch.ones(4)),
        dist.barrier,
        "all_reduce",
        "barrier",
    ),
    "size": (
        lambda: dist.all_reduce(torch.ones(1024)),
        lambda: dist.all_reduce(torch.ones(2048)),
        "1024|4096",
        "2048|8192",
    ),
    "size, long": (
        lambda: dist.all_reduce(torch.ones(4 * MB)),
        lambda: dist.all_reduce(torch.ones(4 * MB + 1)),
        str(4 * MB),
        str(4 * MB + 1),
    ),
    "size, short and long": (
        lambda: dist.all_reduce(torch.ones(1)),
        lambda: dist.all_reduce(torch.ones(4 * MB)),
        "all_reduce",
        str(4 * MB),
    ),
    "dtype": (
        lambda: dist.all_reduce(torch.ones(64, dtype=torch.float32)),
        lambda: dist.all_reduce(torch.ones(64, dtype=torch.int32)),
        "f32|float",
        "i32|int",
    ),
    "op": (
        lambda: dist.all_reduce(torch.ones(64)),
        lambda: dist.all_reduce(torch.ones(64), op=dist.ReduceOp.MAX),
        "(?i)sum",
        "(?i)max",
    ),
    "root": (
        lambda: dist.broadcast(torch.ones(64), 0),
        lambda: dist.broadcast(torch.ones(64), 1),
        "root (rank )?0",
        "root (rank )?1",
    ),
    "root of reduce": (
        lambda: dist.reduce(torch.ones(64), 0),
        lambda: dist.reduce(torch.ones(64), 2),
        "root (rank )?0",
        "root (rank )?2",
    ),
    "gather size": (
        lambda: dist.all_gather_into_tensor(torch.ones(3 * 8), torch.ones(8)),
        lambda: dist.all_gather_into_tensor(torch.ones(3 * 9), torch.ones(9)),
        "8",
        "9",
    ),
    "splits": (
        lambda: dist.all_to_all_single(torch.ones(6), torch.ones(6), [2, 2, 2], [2, 2, 2]),
        lambda: dist.all_to_all_single(torch.ones(6), torch.ones(6), [2, 2, 2], [1, 2, 3]),
        "all_to_all",
        "4|1",
    ),
    "reduce_scatter size": (
        lambda: dist.reduce_scatter_tensor(torch.ones(8), torch.ones(24)),
        lambda: dist.reduce_scatter_tensor(torch.ones(16), torch.ones(48)),
        "24|8",
        "48|16",
    ),
}


@pytest.mark.parametrize("asynchronous", (False, True), ids=("sync", "after_async"))
@pytest.mark.parametrize("kind", MISMATCHES)
def test_mismatch(kind: str, asynchronous: bool) -> None:
    """All ranks raise SymmMismatch within 1 s, and the message shows both calls."""
    usual, odd, first, second = MISMATCHES[kind]

    def body(rank: int) -> str:
        import torch_symm

        dist.all_reduce(torch.ones(1))
        if asynchronous:
            # Moves the calls that follow to the group's worker.
            dist.all_reduce(torch.ones(MB), async_op=True)
        meet("start", rank, 3)
        with raises_within(1.0, torch_symm.SymmMismatch) as info:
            odd() if rank == 1 else usual()
        assert isinstance(info.value, dist.DistBackendError)
        again = time.monotonic()
        with pytest.raises(torch_symm.SymmMismatch) as later:
            dist.all_reduce(torch.ones(1))
        assert time.monotonic() - again < 0.5
        assert str(info.value)[:60] in str(later.value), "a later call does not raise the first cause"
        return str(info.value)

    for message in values(run_ranks(3, body)):
        assert re.search(first, message), f"{first!r} not in: {message}"
        assert re.search(second, message), f"{second!r} not in: {message}"
        assert "rank" in message


def test_mismatch_writes_nothing() -> None:
    """A refused call leaves every tensor as it was."""

    def body(rank: int) -> None:
        import torch_symm

        count = MB if rank == 1 else 2 * MB
        tensor = torch.full((count,), rank + 1.0)
        with pytest.raises(torch_symm.SymmMismatch):
            dist.all_reduce(tensor)
        assert bool((tensor == rank + 1).all())

    run_ranks(3, body)


def test_receive_of_another_size() -> None:
    """The receiver is told when a message is longer than its tensor."""

    def body(rank: int) -> str | None:
        if rank == 0:
            work = dist.isend(torch.ones(100), 1)
            meet("end", rank, 2)
            del work
            return None
        with raises_within(1.0, dist.DistBackendError, ValueError) as info:
            dist.recv(torch.zeros(10), 0)
        meet("end", rank, 2)
        return str(info.value)

    message = values(run_ranks(2, body, join=True))[1]
    assert "400" in message or "100" in message, message


def loop_until_it_fails(count: int, limit: float = 15) -> tuple[float, str, str]:
    """Reduces ``count`` elements again and again; returns when it failed, the kind of error and its message."""
    tensor = torch.ones(count)
    until = time.monotonic() + limit
    while time.monotonic() < until:
        tensor.fill_(1)
        try:
            dist.all_reduce(tensor)
        except dist.DistBackendError as error:
            return time.monotonic(), type(error).__name__, str(error)
    raise AssertionError(f"nothing failed within {limit} s")


@pytest.mark.parametrize("victim", (0, 1, 3))
@pytest.mark.parametrize("count", (16 * MB, 1024, 1), ids=("64MB", "4KB", "4B"))
def test_killed(count: int, victim: int) -> None:
    """SIGKILL in a loop of all_reduce: every survivor raises within 1 s and names rank and pid."""
    when: list[float] = []

    def meanwhile(pids: list[int]) -> None:
        time.sleep(1.2)
        when.append(time.monotonic())
        os.kill(pids[victim], signal.SIGKILL)

    def body(rank: int) -> tuple[float, str, str]:
        return loop_until_it_fails(count)

    outcomes = run_ranks(4, body, may_die={victim}, meanwhile=meanwhile)
    check_survivors(outcomes, victim, when[0])


def check_survivors(outcomes: list[Outcome], victim: int, killed: float) -> None:
    for outcome in outcomes:
        if outcome.rank == victim:
            assert outcome.signal == signal.SIGKILL
            continue
        failed, kind, message = outcome.value
        assert kind == "SymmPeerError", (kind, message)
        assert failed - killed < 1.0, f"rank {outcome.rank} noticed after {failed - killed:.2f} s: {message}"
        assert f"rank {victim}" in message and str(outcomes[victim].pid) in message, message
        assert "all_reduce" in message, message


def test_killed_while_others_wait() -> None:
    """The victim dies between calls; those that wait in a barrier, and those with asynchronous work, are told."""
    when: list[float] = []

    def meanwhile(pids: list[int]) -> None:
        time.sleep(1.0)
        when.append(time.monotonic())
        os.kill(pids[2], signal.SIGKILL)

    def body(rank: int) -> tuple[float, str, str]:
        dist.barrier()
        if rank == 2:
            time.sleep(30)
        try:
            dist.all_reduce(torch.ones(5), async_op=rank == 1)
            if rank == 1:
                time.sleep(0.2)
                dist.all_reduce(torch.ones(5))
        except dist.DistBackendError as error:
            return time.monotonic(), type(error).__name__, str(error)
        raise AssertionError("nothing failed")

    check_survivors(run_ranks(4, body, may_die={2}, meanwhile=meanwhile), 2, when[0])


def test_killed_between_send_and_receive() -> None:
    """A receive from a rank that died raises; so does a receive from any source once nobody is left to send."""

    def body(rank: int) -> Any:
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        try:
            dist.recv(torch.zeros(4), 1)
        except dist.DistBackendError as error:
            return time.monotonic() - started, type(error).__name__, str(error)
        raise AssertionError("nothing failed")

    outcomes = run_ranks(3, body, may_die={1})
    for rank in (0, 2):
        took, kind, message = outcomes[rank].value
        assert took < 1.0 and kind == "SymmPeerError" and "rank 1" in message, (took, kind, message)


@pytest.mark.parametrize("how", ("zero", "exit", "segfault"))
def test_other_deaths(how: str) -> None:
    """A rank that leaves in another way is named just the same."""

    def body(rank: int) -> Any:
        dist.barrier()
        if rank == 1:
            if how == "segfault":
                os.kill(os.getpid(), signal.SIGSEGV)
            os._exit({"zero": 0, "exit": 7}[how])
        started = time.monotonic()
        try:
            dist.all_reduce(torch.ones(1000))
        except dist.DistBackendError as error:
            return time.monotonic() - started, type(error).__name__, str(error)
        raise AssertionError("nothing failed")

    outcomes = run_ranks(3, body, may_die={1})
    for rank in (0, 2):
        took, kind, message = outcomes[rank].value
        assert took < 1.0 and kind == "SymmPeerError" and "rank 1" in message, (took, kind, message)


def test_killed_with_children_alive() -> None:
    """A forked child that keeps the dead rank's descriptors open does not hide the death."""

    def body(rank: int) -> Any:
        dist.barrier()
        if rank == 1:
            if os.fork() == 0:
                time.sleep(4)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        try:
            dist.all_reduce(torch.ones(1000))
        except dist.DistBackendError as error:
            return time.monotonic() - started, type(error).__name__, str(error)
        raise AssertionError("nothing failed")

    outcomes = run_ranks(3, body, may_die={1})
    for rank in (0, 2):
        took, kind, message = outcomes[rank].value
        assert took < 1.0 and kind == "SymmPeerError" and "rank 1" in message, (took, kind, message)


def test_stopped_and_continued() -> None:
    """A rank stopped for 5 s loses nothing: results stay right and nothing fails."""

    def meanwhile(pids: list[int]) -> None:
        time.sleep(0.5)
        os.kill(pids[1], signal.SIGSTOP)
        time.sleep(5)
        os.kill(pids[1], signal.SIGCONT)

    def body(rank: int) -> float:
        longest = 0.0
        until = time.monotonic() + 6.5
        go = torch.ones(1)
        turn = 0
        while bool(go):
            started = time.monotonic()
            turn += 1
            tensor = torch.full((1000 + turn % 3 * 200_000,), float(rank + turn))
            dist.all_reduce(tensor)
            assert bool((tensor == 6 + 4 * turn).all())
            longest = max(longest, time.monotonic() - started)
            go.fill_(float(time.monotonic() < until))
            dist.broadcast(go, 0)
        return longest

    assert max(values(run_ranks(4, body, meanwhile=meanwhile))) > 4


def test_late_rank_is_named() -> None:
    """A rank that never arrives: the others fail at the timeout and say who, in what, which number, how much."""

    def body(rank: int) -> str | None:
        import torch_symm

        init(rank, 4, timeout=1.5)
        for _ in range(3):
            dist.all_reduce(torch.ones(1))
        if rank in (1, 2):
            meet("end", rank, 4)
            return None
        started = time.monotonic()
        with pytest.raises(torch_symm.SymmTimeout) as info:
            dist.all_reduce(torch.ones(1000))
        took = time.monotonic() - started
        assert 1.3 < took < 1.5 + 0.6, took
        with raises_within(0.3, torch_symm.SymmTimeout):
            dist.barrier()
        meet("end", rank, 4)
        with raises_within(0.5, dist.DistBackendError):
            dist.all_reduce(torch.ones(1))
        return str(info.value)

    outcomes = run_ranks(4, body, join=False)
    for rank in (0, 3):
        message = outcomes[rank].value
        assert "all_reduce" in message and "#4" in message, message
        assert "1 and 2" in message or ("rank 1" in message and "rank 2" in message), message
        assert "rank 3" not in message.split("(")[0] or rank == 3, message
        assert "4000" in message or "1000" in message, f"the size is missing: {message}"
        assert str(outcomes[1].pid) in message, message


def test_late_stopped_rank_is_called_stopped() -> None:
    """The message says that the missing process is stopped."""

    def meanwhile(pids: list[int]) -> None:
        time.sleep(0.6)
        os.kill(pids[1], signal.SIGSTOP)
        time.sleep(2.5)
        os.kill(pids[1], signal.SIGCONT)

    def body(rank: int) -> str | None:
        init(rank, 2, timeout=1.5)
        dist.barrier()
        time.sleep(1)
        if rank == 1:
            return None
        with pytest.raises(dist.DistBackendError) as info:
            dist.all_reduce(torch.ones(1000))
        return str(info.value)

    message = values(run_ranks(2, body, join=False, meanwhile=meanwhile))[0]
    assert "stopped" in message and "rank 1" in message, message


def test_late_async_and_wait_timeout() -> None:
    """``wait(timeout)`` gives up alone: the group lives, and the same call still completes."""

    def body(rank: int) -> None:
        import torch_symm

        if rank == 1:
            meet("waited", rank, 2)
        work = dist.all_reduce(tensor := torch.ones(10), async_op=True)
        if rank == 0:
            with raises_within(0.6, torch_symm.SymmTimeout):
                work.wait(timedelta(milliseconds=200))
            meet("waited", rank, 2)
        work.wait()
        assert bool((tensor == 2).all())
        dist.all_reduce(tensor)
        assert bool((tensor == 4).all())

    run_ranks(2, body)


def test_joining_times_out_and_names_the_missing() -> None:
    def body(rank: int) -> str | None:
        if rank == 1:
            return None
        with raises_within(3.5, RuntimeError) as info:
            init(rank, 3, timeout=1.0)
        return f"{type(info.value).__name__}: {info.value}"

    outcomes = run_ranks(3, body, join=False)
    for rank in (0, 2):
        assert re.search(r"rank(s)? 1\b", outcomes[rank].value), outcomes[rank].value


def test_duplicate_rank_is_refused() -> None:
    def body(rank: int) -> str | None:
        pretended = 1 if rank == 2 else rank
        store = dist.FileStore(os.path.join(os.environ["RANKS_FOLDER"], "dup"), 2)
        try:
            dist.init_process_group(
                "symm", store=store, rank=pretended, world_size=2, timeout=timedelta(seconds=2)
            )
            dist.all_reduce(torch.ones(1))
        except (RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    messages = [message for message in values(run_ranks(3, body, join=False)) if message]
    assert messages, "two processes were rank 1 and nobody was told"
    assert any(re.search(r"rank 1|duplicate", message) for message in messages), messages


def test_rank_outside_the_world_is_refused() -> None:
    def body(rank: int) -> None:
        store = dist.HashStore()
        with pytest.raises((ValueError, dist.DistBackendError)):
            dist.init_process_group("symm", store=store, rank=3, world_size=2, timeout=timedelta(seconds=2))

    run_ranks(1, body, join=False)


def test_first_cause_stands() -> None:
    """After a death every further call of every kind raises the first cause, at once."""

    def body(rank: int) -> None:
        import torch_symm

        if rank == 1:
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        with raises_within(1.0, torch_symm.SymmPeerError) as first:
            dist.all_reduce(torch.ones(8))
        calls: list[Callable[[], Any]] = [
            lambda: dist.all_reduce(torch.ones(MB)),
            lambda: dist.all_reduce(torch.ones(1), async_op=True).wait(),
            lambda: dist.broadcast(torch.ones(1), 0),
            dist.barrier,
            lambda: dist.all_gather_into_tensor(torch.ones(3), torch.ones(1)),
            lambda: dist.group.WORLD.monitored_barrier(timedelta(seconds=5)),
            lambda: dist.send(torch.ones(1), 1),
            lambda: dist.recv(torch.ones(1), 1),
            lambda: dist.all_gather_object([None] * 3, "x"),
        ]
        for number, call in enumerate(calls):
            with raises_within(0.3, torch_symm.SymmPeerError) as later:
                call()
            assert "rank 1" in str(later.value), f"call {number}: {later.value}"
            assert str(first.value)[:40] in str(later.value) or "first" in str(later.value), (number, later.value)
        started = time.monotonic()
        dist.destroy_process_group()
        assert time.monotonic() - started < 1.0

    outcomes = run_ranks(3, body, may_die={1})
    assert all("Traceback" not in outcome.output for outcome in outcomes)


def test_survivors_make_a_new_group() -> None:
    """The survivors of a death go on in the same processes."""

    def body(rank: int) -> None:
        dist.barrier()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.DistBackendError):
            for _ in range(100):
                dist.all_reduce(torch.ones(MB))
        dist.destroy_process_group()
        place = (0, 1, None, 2)[rank]
        assert place is not None
        started = time.monotonic()
        init(place, 3, name="second")
        assert time.monotonic() - started < 1.5
        for count in (1, MB):
            tensor = torch.full((count,), float(place))
            dist.all_reduce(tensor)
            assert bool((tensor == 3).all())

    run_ranks(4, body, may_die={2})


def test_new_group_after_mismatch() -> None:
    """Nobody died: all ranks destroy and join again, several times."""

    def body(rank: int) -> None:
        for turn in range(3):
            with pytest.raises(dist.DistBackendError):
                dist.all_reduce(torch.ones(rank + 1))
            dist.destroy_process_group()
            init(rank, 3, name=f"turn-{turn}")
            dist.all_reduce(tensor := torch.ones(3))
            assert bool((tensor == 3).all())

    run_ranks(3, body)


@pytest.mark.parametrize("way", ("abort", "destroy"))
def test_abort_releases_a_blocked_call(way: str) -> None:
    """Another thread aborts the group: the blocked call raises at once."""

    def body(rank: int) -> str | None:
        if rank == 1:
            meet("released", rank, 2)
            return None
        group = dist.group.WORLD
        backend = group._get_backend(torch.device("cpu"))

        def later() -> None:
            time.sleep(0.5)
            if way == "abort":
                backend.abort()
            else:
                dist.destroy_process_group()

        thread = threading.Thread(target=later)
        thread.start()
        started = time.monotonic()
        with pytest.raises(dist.DistBackendError) as info:
            dist.all_reduce(torch.ones(10))
        took = time.monotonic() - started
        thread.join()
        meet("released", rank, 2)
        assert 0.4 < took < 0.5 + 0.4, took
        if way == "abort":
            backend.abort()
        return type(info.value).__name__

    assert values(run_ranks(2, body))[0] == "SymmAborted"


def test_destroy_with_work_outstanding() -> None:
    """Destroying while a call of ours can never finish ends within the group's timeout, without a crash."""

    def body(rank: int) -> None:
        init(rank, 2, timeout=2)
        dist.barrier()
        if rank == 0:
            work = dist.all_reduce(torch.ones(10), async_op=True)
            started = time.monotonic()
            dist.destroy_process_group()
            assert time.monotonic() - started < 2.5
            with pytest.raises(dist.DistBackendError):
                work.wait()
        meet("end", rank, 2)

    run_ranks(2, body, join=False)


ARGUMENTS: dict[str, tuple[Callable[[int], Any], tuple[type[Exception], ...], str]] = {
    "quantized": (
        lambda rank: dist.all_reduce(torch.quantize_per_tensor(torch.ones(4), 1.0, 0, torch.qint8)),
        (TypeError, ValueError, NotImplementedError),
        "(?i)qint8|quant",
    ),
    "csr": (
        lambda rank: dist.all_reduce(torch.eye(4).to_sparse_csr()),
        (TypeError, ValueError, NotImplementedError, RuntimeError),
        "(?i)csr|sparse|layout",
    ),
    "sparse broadcast": (
        lambda rank: dist.broadcast(torch.eye(4).to_sparse(), 0),
        (TypeError, ValueError, NotImplementedError, RuntimeError),
        "(?i)sparse|layout",
    ),
    "BAND on float": (
        lambda rank: dist.all_reduce(torch.ones(4), op=dist.ReduceOp.BAND),
        (TypeError, ValueError, NotImplementedError),
        "(?i)band",
    ),
    "BXOR on float16": (
        lambda rank: dist.all_reduce(torch.ones(4, dtype=torch.float16), op=dist.ReduceOp.BXOR),
        (TypeError, ValueError, NotImplementedError),
        "(?i)bxor",
    ),
    "uneven all_to_all_single": (
        lambda rank: dist.all_to_all_single(torch.ones(5), torch.ones(5)),
        (ValueError,),
        "divide|dim 0",
    ),
    "negative split": (
        lambda rank: dist.all_to_all_single(torch.ones(4), torch.ones(4), [2, 2], [5, -1]),
        (ValueError, RuntimeError),
        "(?i)split|negative",
    ),
    "splits that do not sum up": (
        lambda rank: dist.all_to_all_single(torch.ones(4), torch.ones(4), [2, 2], [2, 1]),
        (ValueError,),
        "(?i)split",
    ),
    "all_gather_into_tensor too small": (
        lambda rank: dist.all_gather_into_tensor(torch.ones(7), torch.ones(4)),
        (ValueError,),
        "7",
    ),
    "all_gather_into_tensor of another dtype": (
        lambda rank: dist.all_gather_into_tensor(torch.ones(8, dtype=torch.float64), torch.ones(4)),
        (TypeError, ValueError),
        "(?i)dtype|type",
    ),
    "reduce_scatter_tensor not divisible": (
        lambda rank: dist.reduce_scatter_tensor(torch.ones(4), torch.ones(9)),
        (ValueError,),
        "9",
    ),
    "freed storage": (
        lambda rank: dist.all_reduce(_freed()),
        (ValueError, RuntimeError, TypeError),
        "(?i)storage|bytes",
    ),
    "negative tag": (
        lambda rank: dist.send(torch.ones(4), 1 - rank, tag=-3),
        (ValueError, RuntimeError, TypeError),
        "(?i)tag",
    ),
}


def _freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_wrong_arguments_on_all_ranks(kind: str) -> None:
    """Refused by name before anything is exchanged; the group stays usable."""
    call, types, words = ARGUMENTS[kind]

    def body(rank: int) -> str:
        with raises_within(1.0, *types) as info:
            call(rank)
        assert not isinstance(info.value, dist.DistBackendError), f"{type(info.value).__name__}: {info.value}"
        dist.all_reduce(tensor := torch.ones(4))
        assert bool((tensor == 2).all()), "the group no longer works"
        return str(info.value)

    for message in values(run_ranks(2, body)):
        assert re.search(words, message), message


def test_wrong_argument_on_one_rank() -> None:
    """The others need not wait for their timeout: they are told that this rank's call was refused."""

    def body(rank: int) -> str:
        dist.barrier()
        if rank == 1:
            with pytest.raises((ValueError, TypeError)) as info:
                dist.all_gather_into_tensor(torch.ones(7), torch.ones(4))
            meet("end", rank, 2)
            return str(info.value)
        with raises_within(1.0, dist.DistBackendError) as told:
            dist.all_gather_into_tensor(torch.ones(8), torch.ones(4))
        meet("end", rank, 2)
        return str(told.value)

    assert "rank 1" in values(run_ranks(2, body, group_timeout=6))[0]


def test_exceptions_are_distributed_backend_errors() -> None:
    def body(rank: int) -> None:
        import torch_symm

        for kind in ("SymmPeerError", "SymmTimeout", "SymmMismatch", "SymmConfigError", "SymmAborted"):
            assert issubclass(getattr(torch_symm, kind), dist.DistBackendError)

    run_ranks(1, body, join=False)


def test_get_error_follows_the_failure() -> None:
    def body(rank: int) -> None:
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert "SUCCESS" in str(backend.get_error())
        with pytest.raises(dist.DistBackendError):
            dist.all_reduce(torch.ones(rank + 1))
        assert "SUCCESS" not in str(backend.get_error())

    run_ranks(2, body)


SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
from datetime import timedelta
rank = int(sys.argv[1]); world = int(sys.argv[2])
store = dist.FileStore(sys.argv[3], world)
dist.init_process_group("symm", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=20))
dist.all_reduce(torch.ones(10))
"""


def start_scripts(code: str, world: int, folder: Path) -> list[subprocess.Popen[str]]:
    environment = {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT + code, str(rank), str(world), str(folder / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(world)
    ]


ENDINGS = {
    "destroy": "dist.destroy_process_group()",
    "forgotten": "",
    "exit": "print('left', time.monotonic(), flush=True); sys.exit(0)",
    "work outstanding": "work = dist.all_reduce(torch.ones(1 << 20), async_op=True)",
    "after a failure": """
try:
    dist.all_reduce(torch.ones(rank + 1))
except dist.DistBackendError as error:
    assert "SymmMismatch" in type(error).__name__
""",
    "others leave first": "time.sleep(0.4 * rank)",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_exit_is_quick_and_quiet(ending: str, tmp_path: Path) -> None:
    """Whatever the script does last, the interpreter ends by itself with status 0 and prints nothing."""
    code = ENDINGS[ending] + "\nprint('left', time.monotonic(), flush=True)"
    processes = start_scripts(code, 2, tmp_path)
    for rank, process in enumerate(processes):
        out, err = process.communicate(timeout=30)
        ended = time.monotonic()
        assert process.returncode == 0, err
        left = float(out.split()[1])
        assert ended - left < 3, f"rank {rank} took {ended - left:.1f} s to exit"
        noise = [line for line in err.splitlines() if line and "destroy_process_group() was not called" not in line]
        assert not noise, "\n".join(noise)


def test_nothing_is_left_after_kill(tmp_path: Path) -> None:
    """SIGKILL of all ranks in the middle of the work leaves no file in /dev/shm, TMPDIR or XDG_RUNTIME_DIR."""

    def listing() -> set[str]:
        found = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}
        found |= {str(path) for path in tmp_path.rglob("*") if path.name != "store"}
        return found | {f"/tmp/{name}" for name in os.listdir("/tmp") if "symm" in name}

    before = listing()
    processes = start_scripts("print('on', flush=True)\nt = torch.ones(1 << 24)\nwhile True: dist.all_reduce(t)", 3, tmp_path)
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "on\n"
    time.sleep(0.5)
    for process in processes:
        process.kill()
    for process in processes:
        process.communicate(timeout=10)
    assert listing() - before == set()


def test_no_file_while_running(tmp_path: Path) -> None:
    """Memory is anonymous: even a live group has no name in the file system."""

    def body(rank: int) -> None:
        dist.all_reduce(torch.ones(MB))
        dist.barrier()
        assert not [name for name in os.listdir("/dev/shm") if "symm" in name]
        assert list(tmp_path.iterdir()) == []

    run_ranks(2, body, env={"TMPDIR": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)})


def test_fork_after_joining() -> None:
    """A forked child may end as it likes; using the group there is refused clearly."""

    def body(rank: int) -> None:
        import torch_symm

        dist.all_reduce(torch.ones(4))
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                dist.all_reduce(torch.ones(4))
                answer = "worked"
            except torch_symm.SymmConfigError as error:
                answer = f"refused: {error}"
            except BaseException as error:
                answer = f"{type(error).__name__}: {error}"
            os.write(writer, answer.encode())
            os._exit(0)
        os.close(writer)
        _, status = os.waitpid(pid, 0)
        answer = os.read(reader, 10_000).decode()
        assert status == 0 and answer.startswith("refused") and "fork" in answer, (status, answer)
        for _ in range(3):
            dist.all_reduce(tensor := torch.ones(4))
            assert bool((tensor == 2).all())
        for ending in ("destroy", "sys.exit", "collect"):
            pid = os.fork()
            if pid == 0:
                if ending == "destroy":
                    dist.destroy_process_group()
                elif ending == "sys.exit":
                    sys.exit(0)
                os._exit(0)
            until = time.monotonic() + 2
            while os.waitpid(pid, os.WNOHANG)[0] == 0:
                assert time.monotonic() < until, f"the child hangs in {ending}"
                time.sleep(0.01)
            dist.all_reduce(tensor := torch.ones(4))
            assert bool((tensor == 2).all())

    run_ranks(2, body)


def test_detail_debug_level_works() -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL wraps the group; calls work and mismatches are found by the wrapper or by us."""

    def body(rank: int) -> str:
        for count in (1, MB):
            tensor = torch.full((count,), float(rank))
            dist.all_reduce(tensor)
            assert bool((tensor == 3).all())
        outputs = [torch.zeros(2) for _ in range(3)]
        dist.all_gather(outputs, torch.full((2,), float(rank)))
        assert [int(output[0]) for output in outputs] == [0, 1, 2]
        if rank == 0:
            dist.send(torch.ones(3), 1)
        elif rank == 1:
            dist.recv(torch.zeros(3), 0)
        dist.barrier()
        objects: list[Any] = [None] * 3
        dist.all_gather_object(objects, {"rank": rank})
        assert [each["rank"] for each in objects] == [0, 1, 2]
        group = dist.new_group([0, 2])
        if rank != 1:
            dist.all_reduce(tensor := torch.ones(2), group=group)
            assert bool((tensor == 2).all())
        with pytest.raises(RuntimeError) as info:
            dist.all_reduce(torch.ones(rank + 1))
        return str(info.value)

    messages = values(run_ranks(3, body, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}))
    assert any("rank" in message.lower() for message in messages), messages

"""Ranks that exit or stop while kernels of every kind run: which rank is named, how soon, and what is left.

Each survivor must get the error in time, its GPU must continue computing, and the memory of an exited rank must be
freed.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext

import pool
import pytest
import torch
import torch.distributed as dist
import torch_symm
from pool import FULL, WORLDS, Pool, captured, device, init, meet, needs_gpus, needs_unshared_gpus, settle
from test_cuda_errors import rms_norm
from zero_copy import new_pool, warm

pytestmark = needs_gpus

MB = 1 << 20
TIMEOUT_S = 3.0
Call = Callable[[], object]


def ring(rank: int, world: int, count: int, group: dist.ProcessGroup | None = None) -> Call:
    with torch.cuda.use_mem_pool(new_pool()) if group else nullcontext():
        out = torch.ones(count, device=device())
    back = torch.empty(count, device=device())

    def call() -> None:
        send = dist.P2POp(dist.isend, out, (rank + 1) % world, group)
        receive = dist.P2POp(dist.irecv, back, (rank - 1) % world, group)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    return call


def symmetric_sum(count: int) -> Call:
    with torch.cuda.use_mem_pool(new_pool()):
        tensor = torch.zeros(count, device=device())
    call = lambda: dist.all_reduce(tensor)  # noqa: E731 - a body without a name of its own
    # Without this, kernels might be compiled for the first zero-copy call while a rank exits.
    warm(call)
    return call


def copied(name: str, rank: int, world: int, count: int) -> Call:
    """A call whose bytes copy engines move; the tensor for all ranks, or the sent one, is in symmetric memory."""
    zero = dist.new_group(list(range(world)), pg_options=torch_symm.Options(cta_policy="zero"))
    if name == "copied_send_recv":
        return ring(rank, world, count, zero)
    own = torch.zeros(count, device=device())
    with torch.cuda.use_mem_pool(new_pool()):
        wide = torch.zeros(count * world, device=device())
    calls: dict[str, Call] = {
        "copied_all_reduce": lambda: dist.all_reduce(own, group=zero),
        "copied_reduce_scatter": lambda: dist.reduce_scatter_tensor(own, wide, group=zero),
        "copied_all_gather": lambda: dist.all_gather_into_tensor(wide, own, group=zero),
    }
    return calls[name]


def call_of(kind: str, rank: int, world: int) -> Call:
    """Returns a call that may be repeated; ``kind`` is its collective and its number of elements."""
    name, number = kind.split()
    count = int(number)
    if name == "send_recv":
        return ring(rank, world, count)
    if name == "symmetric_all_reduce":
        return symmetric_sum(count)
    if name.startswith("copied_"):
        return copied(name, rank, world, count)
    own, wide = torch.zeros(count, device=device()), torch.zeros(count * world, device=device())
    other = torch.zeros_like(wide)
    calls: dict[str, Call] = {
        "all_reduce": lambda: dist.all_reduce(own),
        "background_all_reduce": lambda: dist.all_reduce(own, async_op=True).wait(),
        "reduce": lambda: dist.reduce(own, 0),
        "broadcast": lambda: dist.broadcast(own, 0),
        "all_gather": lambda: dist.all_gather_into_tensor(wide, own),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(own, wide),
        "all_to_all": lambda: dist.all_to_all_single(other, wide),
        "barrier": dist.barrier,
        "all_reduce_add_rms_norm": lambda: rms_norm(own.view(4, -1)),
    }
    return calls[name]


#: One call or more for every kernel: low latency, one-shot, two-shot, staged, exchanged, zero-copy, forwarded; and for
#: calls that copy engines move.
KINDS = (
    "all_reduce 4", "all_reduce 60000", "all_reduce 500000", "all_reduce 20000000", "background_all_reduce 500000",
    "copied_all_reduce 20000000", "copied_reduce_scatter 4000000", "copied_all_gather 4000000",
    "copied_send_recv 20000000", "symmetric_all_reduce 8000000", "reduce 100", "reduce 4000000", "broadcast 100",
    "broadcast 8000000", "all_gather 100", "all_gather 4000000", "reduce_scatter 100", "reduce_scatter 4000000",
    "all_to_all 100", "all_to_all 4000000", "send_recv 100", "send_recv 4000000", "barrier 1",
    "all_reduce_add_rms_norm 32768",
)  # fmt: skip


def failure_in(call: Call, limit: float) -> Exception:
    """Repeats the call until it fails; returns the error."""
    start = time.monotonic()
    while time.monotonic() - start < limit:
        try:
            call()
            settle()
        except RuntimeError as error:
            return error
    raise AssertionError(f"no failure within {limit} s")


def compute() -> None:
    """Fails unless the GPU is as usable as before."""
    assert float(torch.ones(1_000_000, device=device()).sum()) == 1_000_000


def killed(rank: int, world: int, kind: str, seed: int) -> tuple[str, float] | None:
    """Rank 1 is killed at some moment while all ranks repeat one call."""
    call = call_of(kind, rank, world)
    call()
    settle()
    meet("ready", rank, world)
    note = pool.scratch / f"killed-{pool.scenario}"
    if rank == 1:

        def end() -> None:
            time.sleep(random.Random(seed).uniform(0.05, 0.15))
            note.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=end).start()
        failure_in(call, 30)
    error = failure_in(call, 30)
    seconds = time.monotonic() - float(note.read_text())
    assert isinstance(error, torch_symm.SymmPeerError), repr(error)
    with pytest.raises(dist.DistBackendError, match="rank 1"):
        dist.all_reduce(torch.ones(3, device=device()))
    compute()
    left = [other for other in range(world) if other != 1]
    start = time.monotonic()
    dist.destroy_process_group()
    init(left.index(rank), len(left), name="survivors")
    dist.all_reduce(tensor := torch.ones(100_000, device=device()))
    assert bool((tensor == len(left)).all())
    if kind.startswith("symmetric"):
        # The survivors' new group sums the same symmetric memory.
        call()
        settle()
    assert time.monotonic() - start < 10
    return str(error), seconds


# proves P3, P13, P23
@pytest.mark.timed
@pytest.mark.parametrize("kind", KINDS)
def test_p2_p21_a_rank_killed_inside_any_kernel_is_named(pool: Pool, kind: str) -> None:
    world = max(WORLDS)
    found = pool.run(killed, world, kind, KINDS.index(kind), killed={1})
    for rank, result in enumerate(found):
        if rank != 1:
            message, seconds = result
            assert "rank 1" in message and "SIGKILL" in message, message
            # The progress of the kernels of both ranks: the one that exited, and the one that reports.
            reported = re.findall(r"\d+ CUDA collectives launched, the last all_reduce", message)
            assert len(reported) == 2 or not kind.startswith("all_reduce "), message
            assert seconds < 1, f"rank {rank} heard of it after {seconds:.2f} s"
    print(f"{kind}: heard after {max(result[1] for result in found if result) * 1e3:.0f} ms at most")


def stopped(rank: int, world: int, kinds: tuple[str, ...]) -> None:
    """Rank 1 is stopped for a while inside each kind of call; nothing fails, and nothing is lost."""
    (pool.scratch / f"pid-{pool.scenario}-{rank}").write_text(str(os.getpid()))
    meet("pids", rank, world)
    victim = int((pool.scratch / f"pid-{pool.scenario}-1").read_text())
    for number, kind in enumerate(kinds):
        call = call_of(kind, rank, world)
        call()
        settle()
        meet(f"ready-{number}", rank, world)
        if rank == 0:

            def hold() -> None:
                time.sleep(0.02)
                os.kill(victim, signal.SIGSTOP)
                time.sleep(0.2)
                os.kill(victim, signal.SIGCONT)

            holder = threading.Thread(target=hold)
            holder.start()
        # Every rank makes the same number of calls.
        for _ in range(50 if int(kind.split()[1]) > MB else 300):
            call()
        settle()
        if rank == 0:
            holder.join()
        dist.all_reduce(tensor := torch.full((5_000,), rank + 1.0, device=device()))
        assert bool((tensor == world * (world + 1) / 2).all()), kind


@pytest.mark.parametrize("world", WORLDS)
def test_p5_a_stopped_rank_is_not_a_dead_one_in_any_kernel(pool: Pool, world: int) -> None:
    pool.run(stopped, world, KINDS, group_timeout=30)


def stopped_too_long(rank: int, world: int) -> str | None:
    """Rank 1 is stopped past the timeout."""
    (pool.scratch / f"pid-{pool.scenario}-{rank}").write_text(str(os.getpid()))
    dist.all_reduce(torch.ones(5, device=device()))
    settle()
    meet("pids", rank, world)
    if rank == 1:
        meet("over", rank, world)
        return None
    victim = int((pool.scratch / f"pid-{pool.scenario}-1").read_text())
    if rank == 0:
        os.kill(victim, signal.SIGSTOP)
    meet("stopped", rank if rank == 0 else rank - 1, world - 1)
    try:
        error = failure_in(lambda: dist.all_reduce(torch.ones(5, device=device())), TIMEOUT_S + 3)
    finally:
        meet("failed", rank if rank == 0 else rank - 1, world - 1)
        if rank == 0:
            os.kill(victim, signal.SIGCONT)
    meet("over", rank, world)
    compute()
    assert isinstance(error, torch_symm.SymmTimeoutError), repr(error)
    return str(error)


def test_p5_p6_a_rank_stopped_past_the_timeout_is_called_stopped(pool: Pool) -> None:
    for rank, message in enumerate(pool.run(stopped_too_long, max(WORLDS), group_timeout=TIMEOUT_S)):
        if rank != 1:
            assert "rank 1" in message and "stopped" in message, message


def replayed(rank: int, world: int) -> tuple[str, float] | None:
    """A replay in which rank 1 does not take part."""
    tensor = torch.ones(100_000, device=device())
    graph = captured(lambda: dist.all_reduce(tensor))
    graph.replay()
    settle()
    found = None
    if rank != 1:
        start = time.monotonic()
        graph.replay()
        settle()
        seconds = time.monotonic() - start
        with pytest.raises(torch_symm.SymmTimeoutError) as raised:
            dist.all_reduce(tensor)
        found = str(raised.value), seconds
        # A replay after the failure also ends, and accesses no memory that was freed.
        graph.replay()
        settle()
    meet("over", rank, world)
    compute()
    return found


@pytest.mark.timed
@pytest.mark.parametrize("world", WORLDS)
def test_p1_p21_a_deadline_inside_a_replayed_graph(pool: Pool, world: int) -> None:
    for rank, found in enumerate(pool.run(replayed, world, group_timeout=TIMEOUT_S)):
        if rank != 1:
            message, seconds = found
            assert "rank 1" in message and "all_reduce(100000" in message, message
            assert TIMEOUT_S - 0.5 < seconds < TIMEOUT_S + 1, seconds


def replayed_after_death(rank: int, world: int) -> None:
    """A graph whose group has lost a rank may still be replayed; the replay ends and does no harm."""
    tensor = torch.ones(100_000, device=device())
    graph = captured(lambda: dist.all_reduce(tensor))
    graph.replay()
    settle()
    meet("replayed", rank, world)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    failure_in(lambda: dist.all_reduce(torch.ones(5, device=device())), 10)
    # Without the graph, the memory of the exited rank would be unmapped within this time.
    time.sleep(1)
    for _ in range(3):
        graph.replay()
    settle()
    compute()


def test_p21_a_graph_replayed_after_a_death_leaves_the_context_usable(pool: Pool) -> None:
    pool.run(replayed_after_death, max(WORLDS), killed={1})


def taken(gpu: int) -> int:
    """Bytes in use, by any process, on one of the GPUs that this process may see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpu = gpu if visible is None else int(visible.split(",")[gpu])
    command = ["nvidia-smi", f"--id={gpu}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) * MB


def mapped_by_others(rank: int, world: int, before: int) -> tuple[int, float] | None:
    """Rank 1 exits after all others have mapped its workspace and its symmetric memory; they keep their group."""
    with torch.cuda.use_mem_pool(new_pool()):
        tensor = torch.ones(128 * MB, device=device())
    for _ in range(20):
        dist.all_reduce(tensor)
        settle()
        time.sleep(0.02)
    assert torch_symm.stats().get("zero_copy", 0), "no call used the symmetric memory"
    meet("used", rank, world)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    failure_in(lambda: dist.all_reduce(torch.ones(5, device=device())), 10)
    left = taken(1) - before
    while left > 4 * MB and time.monotonic() - start < 6:
        time.sleep(0.02)
        left = taken(1) - before
    seconds = time.monotonic() - start
    compute()
    meet("measured", rank if rank == 0 else rank - 1, world - 1)
    return left, seconds


# proves P12
@needs_unshared_gpus
@pytest.mark.timed
def test_p21_the_memory_of_a_killed_rank_is_back_within_2_s_while_its_group_lives(pool: Pool) -> None:
    if FULL < 2:
        pytest.skip("needs two GPUs")
    pool.stop()
    time.sleep(1)
    before = taken(1)
    for rank, found in enumerate(pool.run(mapped_by_others, max(WORLDS), before, killed={1})):
        if rank != 1:
            left, seconds = found
            assert left <= 4 * MB, f"{left / MB:.0f} MiB are still taken after {seconds:.1f} s"
            assert seconds < 2.5, f"it took {seconds:.1f} s"
            print(f"rank {rank}: back after {seconds:.2f} s")

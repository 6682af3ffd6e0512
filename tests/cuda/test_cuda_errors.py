"""Every error becomes an exception in time that names ranks; the GPU and the process stay usable."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch_symm
from pool import DEVICE, SHARED, WORLDS, Pool, device, init, meet, needs_gpus, needs_ranks, needs_unshared_gpus, settle

#: Timeout of groups in which a rank is late.
TIMEOUT_S = 4.0
REFUSALS = (ValueError, TypeError, NotImplementedError, RuntimeError)


def failure_of(body: Callable[[], object], limit: float) -> tuple[Exception, float]:
    """The exception of a call, raised by the call, by the wait for the GPU, or by the next call on the group."""
    start = time.monotonic()
    try:
        body()
        while time.monotonic() - start < limit:
            settle()
            dist.all_reduce(torch.ones(1, device=device()))
            time.sleep(0.01)
    except REFUSALS as error:
        return error, time.monotonic() - start
    raise AssertionError(f"no exception within {limit} s")


def still_usable(rank: int, world: int, name: str = "second") -> None:
    """The GPU computes, the old group ends soon, and a new one works."""
    total = torch.ones(1_000_000, device=device()).sum()
    settle()
    assert float(total) == 1_000_000
    start = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - start < 5, "destroying a failed group took long"
    meet(name, rank, world)
    init(rank, world, name=name)
    for count in (10, 3_000_000):
        dist.all_reduce(tensor := torch.full((count,), rank + 1.0, device=device()))
        assert bool((tensor == world * (world + 1) / 2).all())


def mismatch(rank: int, world: int, what: str) -> str:
    """Rank 1 calls another collective."""
    odd = rank == 1
    dist.all_reduce(torch.ones(5, device=device()))

    def ones(count: int = 1_000, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(count, dtype=dtype, device=device())

    calls: dict[str, Callable[[], object]] = {
        "size": lambda: dist.all_reduce(ones(1_000 + odd)),
        "large size": lambda: dist.all_reduce(ones(9_000_000 + odd)),
        "dtype": lambda: dist.all_reduce(ones(dtype=torch.int32 if odd else torch.float32)),
        "op": lambda: dist.all_reduce(ones(), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM),
        "root": lambda: dist.broadcast(ones(), int(odd)),
        "collective": lambda: dist.broadcast(ones(), 0) if odd else dist.all_reduce(ones()),
    }
    error, _ = failure_of(calls[what], TIMEOUT_S + 2)
    assert isinstance(error, dist.DistBackendError), repr(error)
    still_usable(rank, world)
    return f"{type(error).__name__}: {error}"


# proves P7
@needs_ranks
@pytest.mark.parametrize("what", ["size", "large size", "dtype", "op", "root", "collective"])
def test_ranks_that_disagree_all_hear_of_it(pool: Pool, what: str) -> None:
    for message in pool.run(mismatch, max(WORLDS), what, group_timeout=TIMEOUT_S):
        assert message.startswith("SymmMismatchError"), message


def arguments(rank: int, world: int) -> None:
    """Wrong arguments are rejected on every rank before anything is exchanged; the group continues."""
    mine, elsewhere = device(), torch.device("cpu")
    calls: list[Callable[[], object]] = [
        lambda: dist.all_gather([torch.ones(3, device=elsewhere) for _ in range(world)], torch.ones(3, device=mine)),
        lambda: dist.all_gather_into_tensor(torch.ones(3 * world, device=elsewhere), torch.ones(3, device=mine)),
        lambda: dist.all_to_all_single(torch.ones(world, device=mine), torch.ones(world, device=elsewhere)),
        lambda: dist.reduce_scatter_tensor(torch.ones(2, device=mine), torch.ones(2 * world + 1, device=mine)),
        lambda: dist.all_reduce(torch.ones(1, device=mine).expand(4)),
    ]
    for call in calls if DEVICE == "cuda" else calls[3:]:
        with pytest.raises(REFUSALS):
            call()
    settle()
    dist.all_reduce(tensor := torch.ones(10, device=mine))
    assert bool((tensor == world).all())


# proves P8
@needs_ranks
def test_wrong_arguments(pool: Pool) -> None:
    pool.run(arguments, 2, group_timeout=TIMEOUT_S)


def refused_on_one(rank: int, world: int, launched: int) -> str:
    """Rank 1 rejects a call that the others have launched."""
    for _ in range(launched):
        dist.all_reduce(torch.ones(5, device=device()))
    settle()
    dist.barrier()
    gathered = torch.ones(3 * world + int(rank == 1), device=device())
    error, seconds = failure_of(
        lambda: dist.all_gather_into_tensor(gathered, torch.ones(3, device=device())), TIMEOUT_S
    )
    if rank == 1:
        assert isinstance(error, ValueError), repr(error)
    else:
        assert isinstance(error, torch_symm.SymmMismatchError) and seconds < 2, (repr(error), seconds)
    meet("reported", rank, world)
    with pytest.raises(torch_symm.SymmMismatchError) as reported:
        dist.all_reduce(torch.ones(5, device=device()))
    still_usable(rank, world)
    return str(reported.value)


# proves P9
@pytest.mark.timed
@needs_ranks
@pytest.mark.parametrize("launched", [1, 40])
def test_a_wrong_argument_on_one_rank_is_told_to_the_others(pool: Pool, launched: int) -> None:
    texts = set(pool.run(refused_on_one, max(WORLDS), launched, group_timeout=TIMEOUT_S))
    assert len(texts) == 1
    text = texts.pop()
    assert "rank 1 (pid" in text and "rejected" in text and "elements" in text, text


def other_gpu(rank: int, world: int) -> str:
    """A tensor on a GPU of another rank."""
    dist.all_reduce(torch.ones(5, device=device()))
    error, _ = failure_of(lambda: dist.all_reduce(torch.ones(5, device=f"cuda:{1 - rank}")), TIMEOUT_S + 2)
    return str(error)


@needs_unshared_gpus
def test_a_tensor_on_the_gpu_of_another_rank(pool: Pool) -> None:
    for rank, message in enumerate(pool.run(other_gpu, 2, group_timeout=TIMEOUT_S)):
        assert f"works on cuda:{rank}, this tensor is on cuda:{1 - rank}" in message, message


def one_gpu(rank: int, world: int) -> str:
    torch.cuda.set_device(0)

    def body() -> None:
        init(rank, world, timeout=20)
        dist.all_reduce(torch.ones(5, device="cuda:0"))
        torch.cuda.synchronize()

    with pytest.raises(REFUSALS) as refused:
        body()
    assert float(torch.ones(5, device="cuda:0").sum()) == 5
    return str(refused.value)


# proves P15
@needs_unshared_gpus
@pytest.mark.skipif(SHARED, reason="SYMM_ALLOW_SHARED_GPUS=1 allows it")
def test_two_ranks_on_one_gpu(pool: Pool) -> None:
    for message in pool.run(one_gpu, 2, backend=None):
        assert re.search(r"rank 0 .*and rank 1 .*use the same GPU", message), message


def tuned_apart(rank: int, world: int) -> str:
    os.environ["SYMM_CUDA_TUNING"] = f"lanes={8 + rank}"
    init(rank, world, timeout=20)
    with pytest.raises(REFUSALS) as refused:
        dist.all_reduce(torch.ones(5, device=device()))
    return str(refused.value)


@needs_gpus
def test_tunings_that_differ_are_refused() -> None:
    says = r"rank 0 .*and rank 1 .*differ in SYMM_CUDA_TUNING.* lanes: 8,.* lanes: 9,"
    # New processes, because a process reads the variable only once.
    own = Pool(2)
    try:
        for message in own.run(tuned_apart, 2, backend=None):
            assert re.search(says, message), message
    finally:
        own.stop()


def rms_norm(rows: torch.Tensor) -> None:
    weight = torch.ones(rows.shape[1], device=device())
    torch.ops.symm.all_reduce_add_rms_norm(rows, rows, weight, 1e-5, dist.group.WORLD.group_name)


def absent(rank: int, world: int, count: int, collective: str) -> tuple[str, float] | None:
    """Rank 1 never calls; it is alive."""
    dist.all_reduce(torch.ones(count, device=device()))
    settle()
    found = None
    if rank != 1:
        tensor = torch.ones(count * world, device=device())
        bodies = {
            "all_reduce": lambda: dist.all_reduce(tensor),
            "all_gather": lambda: dist.all_gather_into_tensor(
                torch.ones(count * world, device=device()), tensor[:count]
            ),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(torch.ones(count, device=device()), tensor),
            "all_to_all": lambda: dist.all_to_all_single(torch.ones_like(tensor), tensor),
            "all_reduce_add_rms_norm": lambda: rms_norm(tensor[:count].view(4, -1)),
        }
        error, seconds = failure_of(bodies[collective], TIMEOUT_S + 10)
        assert isinstance(error, dist.DistBackendError), repr(error)
        found = f"{type(error).__name__}: {error}", seconds
    meet("all failed", rank, world)
    still_usable(rank, world)
    return found


# proves P1, P6, P21
@pytest.mark.timed
@needs_ranks
@pytest.mark.parametrize(
    ("collective", "count"),
    [("all_reduce", 1_000), ("all_reduce", 30_000_000), ("all_gather", 5_000), ("reduce_scatter", 5_000_000),
     ("all_to_all", 100_000), ("all_reduce_add_rms_norm", 32_768)],
)  # fmt: skip
def test_a_rank_that_never_calls_is_named(pool: Pool, collective: str, count: int) -> None:
    results = pool.run(absent, max(WORLDS), count, collective, group_timeout=TIMEOUT_S)
    for rank, found in enumerate(results):
        if rank != 1:
            message, seconds = found
            assert message.startswith("SymmTimeoutError") and "rank 1" in message, message
            # A kernel may first be compiled, and ranks may share a GPU.
            assert TIMEOUT_S - 0.5 < seconds < TIMEOUT_S + 10, seconds

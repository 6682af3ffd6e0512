"""P9 for torch.ops.symm_mem on CPU tensors: a rejection on one rank reaches ranks that wait for its operator."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory as symm_mem
import torch_symm
from ranks import meet, run_ranks
from test_tensor_layouts import mapped
from torch_symm._native import load

ops: Any = torch.ops.symm_mem
WORLD = "0"
#: Number of rows on every rank: divisible by 2 and by 3.
ELEMENTS = 12

BARRIER = "a barrier of symmetric memory"


def symmetric(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    load()
    return symm_mem.empty(*size, dtype=dtype, device="cpu").fill_(1)


def exchanged(tensor: torch.Tensor, splits: torch.dtype) -> None:
    world = torch.distributed.get_world_size()
    counts = symmetric(world, dtype=torch.int64)
    symm_mem.rendezvous(counts, WORLD)
    out, layout = torch.empty(ELEMENTS), torch.empty(2, world, dtype=splits)
    ops.all_to_all_vdev(tensor, out, counts, layout, WORLD)


def reduced(tensor: torch.Tensor, out: torch.Tensor) -> None:
    ops.reduce_scatter_out(tensor, WORLD, False, out)


Call = Callable[[torch.Tensor, int], object]

#: The call of one rank, which rejects it; the call of the other ranks, with tensors of the same kind; the error; and
#: the name of the call in which the other ranks wait.
CASES: dict[str, tuple[Call, Call, str, str]] = {
    "dtype of the output": (
        lambda t, n: ops.one_shot_all_reduce_out(t, "sum", WORLD, t.double()),
        lambda t, n: ops.one_shot_all_reduce_out(t, "sum", WORLD, t.clone()),
        "the output Double",
        BARRIER,
    ),
    "shape of the output": (
        lambda t, n: ops.two_shot_all_reduce_out(t, "sum", WORLD, torch.empty(5)),
        lambda t, n: ops.two_shot_all_reduce_out(t, "sum", WORLD, t.clone()),
        "input/output size mismatch",
        BARRIER,
    ),
    "mapped read-only": (
        lambda t, n: reduced(t, mapped("fixed", mmap.PROT_READ)[: ELEMENTS // n]),
        lambda t, n: reduced(t, torch.empty(ELEMENTS // n)),
        "memory that may not be written",
        BARRIER,
    ),
    "reduce op": (
        lambda t, n: ops.two_shot_all_reduce_(t, "max", WORLD),
        lambda t, n: ops.two_shot_all_reduce_(t, "sum", WORLD),
        "only sum is supported",
        BARRIER,
    ),
    "not symmetric": (
        lambda t, n: ops.one_shot_all_reduce(torch.ones(ELEMENTS), "sum", WORLD),
        lambda t, n: ops.one_shot_all_reduce(t, "sum", WORLD),
        "input must be allocated with empty_strided_p2p",
        BARRIER,
    ),
    "not divisible": (
        lambda t, n: reduced(t[: n + 1], torch.empty(1)),
        lambda t, n: reduced(t, torch.empty(ELEMENTS // n)),
        "to be divisible by world_size",
        BARRIER,
    ),
    "layout": (
        lambda t, n: exchanged(t, torch.int32),
        lambda t, n: exchanged(t, torch.int64),
        "out_splits_offsets must be contiguous int64",
        BARRIER,
    ),
    "symmetric for the others alone": (
        lambda t, n: ops._low_contention_reduce_scatter(torch.ones(n + 1), "sum", WORLD),
        lambda t, n: ops._low_contention_reduce_scatter(t, "sum", WORLD),
        "cannot be divided among",
        BARRIER,
    ),
    "without symmetric memory": (
        lambda t, n: ops._low_contention_all_gather(torch.tensor(1.0), WORLD),
        lambda t, n: ops._low_contention_all_gather(torch.ones(3), WORLD),
        "a tensor without dimensions cannot be gathered",
        "all_gather, collective #",
    ),
    "before the others have met": (
        lambda t, n: ops.get_remote_tensors(torch.ones(3), WORLD),
        lambda t, n: ops.get_remote_tensors(symmetric(3), WORLD),
        "Tensor is not allocated from Symmetric Memory",
        "all_gather, collective #",
    ),
}


def refused_on_rank_1(rank: int, world: int, name: str) -> tuple[str, float]:
    """The error that this rank got from the call, and how long it took."""
    wrong, right, *_ = CASES[name]
    tensor = symmetric(ELEMENTS)
    symm_mem.rendezvous(tensor, WORLD).barrier()
    start = time.monotonic()
    with pytest.raises((ValueError, RuntimeError)) as error:
        (wrong if rank == 1 else right)(tensor, world)
    took = time.monotonic() - start
    assert isinstance(error.value, torch_symm.SymmMismatchError) == (rank != 1), repr(error.value)
    meet("reported", rank, world)
    return str(error.value), took


@pytest.mark.timed
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world", [2, 3])
def test_p9_a_refused_operator_is_told_to_the_ranks_that_wait_for_it(name: str, world: int) -> None:
    _, _, refusal, call = CASES[name]
    results = run_ranks(refused_on_rank_1, world, name)
    assert refusal in results[1][0], results[1]
    for rank in set(range(world)) - {1}:
        reported, took = results[rank]
        assert took < 1
        for word in ("rank 1 (pid", "rejected a call and has not repeated it since", f"blocked in {call}", refusal):
            assert word in reported, (word, reported)


def repeated_rightly(rank: int, world: int) -> float:
    """The longest time that the rank took for a rejected call."""
    tensor = symmetric(ELEMENTS)
    pause = 0.0
    for _ in range(3):
        if rank == 1:
            start = time.monotonic()
            with pytest.raises(RuntimeError):
                ops.two_shot_all_reduce_(torch.ones(ELEMENTS), "sum", WORLD)
            pause = max(pause, time.monotonic() - start)
        ops.two_shot_all_reduce_(tensor.fill_(1), "sum", WORLD)
        assert bool((tensor == world).all())
    # Longer than a notification takes. The rejections have left nothing, although others wait for the rejecting rank.
    handle = symm_mem.rendezvous(tensor, WORLD)
    if rank == 1:
        time.sleep(0.3)
        handle.put_signal(0, 1)
    elif rank == 0:
        handle.wait_signal(1, 1)
    handle.barrier()
    return pause


@pytest.mark.timed
def test_an_operator_that_is_repeated_rightly_disturbs_nobody() -> None:
    run_ranks(repeated_rightly, 3)


def late_after_a_call(rank: int, world: int) -> None:
    """An error on one rank after all have met does not end the others' later waits."""
    tensor, counts, layout = symmetric(ELEMENTS), symmetric(world, dtype=torch.int64), symmetric(2, world).long()
    out = torch.empty(ELEMENTS if rank == 0 else 1)
    if rank == 1:
        with pytest.raises(ValueError, match="out has 1"):
            ops.all_to_all_vdev(tensor, out, counts, layout, WORLD)
        time.sleep(0.3)
    else:
        ops.all_to_all_vdev(tensor, out, counts, layout, WORLD)
    symm_mem.rendezvous(tensor, WORLD).barrier()


def test_what_fails_once_all_have_met_is_not_told() -> None:
    run_ranks(late_after_a_call, 2)

"""Behaviour that torch's own tests require of some backends by name: re-created for symm.

After distributed_test.py and test_c10d_gloo.py: coalesced calls, the monitored barrier, sparse tensors, and argument
checks, which reject before anything is exchanged. `tests/torch` runs torch's own tests of all_to_all.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import backend_of, meet, run_ranks

#: The prefix of each collective's options.
OPTIONS = {
    "allgather": "Allgather",
    "allreduce": "Allreduce",
    "allreduce_coalesced": "AllreduceCoalesced",
    "alltoall": "AllToAll",
    "broadcast": "Broadcast",
    "gather": "Gather",
    "reduce": "Reduce",
    "reduce_scatter": "ReduceScatter",
    "scatter": "Scatter",
}


def direct(method: str, *arguments: object, **fields: object) -> Callable[[], object]:
    """A call of the backend itself, with these fields of its options; a field may be a function."""

    def call() -> object:
        options = getattr(torch._C._distributed_c10d, f"{OPTIONS[method]}Options")()
        for field, value in fields.items():
            setattr(options, field, value() if callable(value) else value)
        return getattr(backend_of(), method)(*arguments, options)

    return call


def coalesced(rank: int, world: int) -> None:
    shapes = ((5,), (3, 7), (60_000,), (0,), ())
    tensors = [torch.full(shape, float(rank + i)) for i, shape in enumerate(shapes)]
    dist.all_reduce_coalesced(tensors)
    total = world * (world - 1) / 2
    assert all((tensor == total + i * world).all() for i, tensor in enumerate(tensors))
    future = dist.all_reduce_coalesced(tensors, dist.ReduceOp.MAX, async_op=True)
    assert len(future.wait()) == len(shapes)


def monitored_failure(rank: int, world: int, absent: tuple[int, ...], wait_all: bool) -> None:
    if rank not in absent:
        start = time.monotonic()
        with pytest.raises(RuntimeError) as error:
            dist.group.WORLD.monitored_barrier(timedelta(seconds=0.5), wait_all_ranks=wait_all)
        assert time.monotonic() - start < 15
        text = str(error.value)
        for peer in absent if wait_all else absent[:1]:
            assert f"rank {peer}: pid" in text, text
        if rank:
            # Gloo's message, in which only rank 0 knows which ranks arrived.
            assert f"Rank {rank} successfully reached monitoredBarrier" in text, text
        elif wait_all:
            assert f"Ranks {', '.join(map(str, absent))} failed to pass monitoredBarrier in 500 ms" in text, text
        else:
            assert f"Rank {absent[0]} failed to pass monitoredBarrier in 500 ms" in text, text
    meet("given up", rank, world)


# proves P6
@pytest.mark.timed
@pytest.mark.parametrize("wait_all", (False, True))
@pytest.mark.parametrize("absent", ((1,), (1, 3), (0, 2)))
def test_monitored_barrier_names_who_is_missing(absent: tuple[int, ...], wait_all: bool) -> None:
    run_ranks(monitored_failure, 4, absent, wait_all)


def sparse(rank: int, world: int) -> None:
    for dtype in (torch.float32, torch.float64, torch.int64):
        indices = torch.tensor([[rank, 0, rank], [0, 1, 0]])
        values = torch.tensor([1, 10, 2], dtype=dtype)
        for tensor in (
            torch.sparse_coo_tensor(indices, values, (world, 2)),
            torch.sparse_coo_tensor(indices[:1], values[:, None].expand(3, 4), (world, 4)),
            torch.sparse_coo_tensor(indices[:, :0], values[:0], (world, 2))
            if rank
            else torch.eye(world, 2).to(dtype).to_sparse(),
        ):
            wanted = tensor.to_dense()
            dist.all_reduce(wanted)
            dist.all_reduce(tensor)
            assert tensor.is_coalesced() and torch.equal(tensor.to_dense(), wanted)
            work = dist.all_reduce(tensor.clone(), async_op=True)
            work.wait()
            assert torch.equal(work.result()[0].to_dense(), wanted * world) or world == 1
    with pytest.raises(NotImplementedError, match="sparse"):
        dist.all_reduce(torch.eye(3).to_sparse(), dist.ReduceOp.MAX)
    with pytest.raises((ValueError, NotImplementedError, RuntimeError), match=r"(?i)sparse"):
        dist.broadcast(torch.eye(3).to_sparse(), 0)
    with pytest.raises(ValueError, match="layout Sparse"):
        direct("broadcast", [torch.eye(2).to_sparse()])()
    if world > 1:
        # Rank 0 submits two sums of one tensor before its peers do.
        tensor, message = torch.eye(world).to_sparse(), torch.ones(1)
        if rank:
            dist.recv(message, 0)
        works = [dist.all_reduce(tensor, async_op=True) for _ in range(2)]
        for peer in range(1, world if rank == 0 else 0):
            dist.send(message, peer)
        for work in works:
            work.wait()
        assert torch.equal(tensor.to_dense(), torch.eye(world) * world**2)
        # The group stays usable.
        others = r"\[4\] \(1 sparse\) on rank 0, \[4, 4\] \(2 sparse\)"
        for sizes, text in (((4,) * (1 + rank), others), ((5 + rank,), r"on rank 0, \[6\] \(1 sparse\)")):
            with pytest.raises(ValueError, match=f"Tensor dimensions do not match: .*{text}"):
                dist.all_reduce(torch.sparse_coo_tensor([[0]] * len(sizes), [1.0], sizes))


@pytest.mark.parametrize("world", (1, 2, 3))
def test_coalesced_and_sparse_all_reduce(world: int) -> None:
    def body(rank: int, world: int) -> None:
        coalesced(rank, world)
        sparse(rank, world)

    run_ranks(body, world)


def in_storage_of(size: int) -> torch.Tensor:
    """Ten numbers in a storage of ``size`` bytes."""
    tensor = torch.zeros(10)
    tensor.untyped_storage().resize_(size)
    return tensor


def split(elements: int, *splits: list[int]) -> None:
    dist.all_to_all_single(torch.zeros(elements), torch.zeros(elements), *splits)


def other_rank() -> int:
    return 1 - dist.get_rank()


ONE = torch.zeros(1)
TWO = torch.zeros(2)

#: Calls, and the type and text of their errors. World size 2.
WRONG: list[tuple[Callable[[], object], Any, str]] = [
    (direct("broadcast", []), ValueError, "non-empty tensor list"),
    (direct("broadcast", [ONE, ONE]), ValueError, "single-element"),
    (direct("broadcast", [ONE], rootRank=-1), ValueError, "invalid root rank: -1"),
    (direct("broadcast", [ONE], rootRank=2), ValueError, "invalid root rank: 2"),
    (direct("broadcast", [ONE], rootTensor=1), ValueError, "invalid root tensor: 1"),
    (
        lambda: direct("broadcast", [torch.quantize_per_tensor(ONE, 1.0, 0, torch.qint8)])(),
        NotImplementedError,
        r"qint8 is not served by this call; dequantize\(\)",
    ),
    (direct("allreduce", []), ValueError, "non-empty tensor list"),
    (direct("allreduce", [ONE, ONE]), ValueError, "single-element"),
    (direct("allreduce", [torch.zeros(3, device="meta")]), (ValueError, NotImplementedError), "meta"),
    (direct("allreduce_coalesced", []), ValueError, "non-empty tensor list"),
    (direct("allreduce_coalesced", [ONE, ONE.int()]), (ValueError, TypeError), "(?i)type"),
    (
        lambda: dist.all_reduce(torch.quantize_per_tensor(ONE, 0.1, 0, torch.qint8)),
        (TypeError, NotImplementedError, RuntimeError),
        "(?i)qint8|dtype|QuantizedCPU",
    ),
    (lambda: dist.all_reduce(torch.zeros(1).expand(4)), ValueError, "share memory"),
    (lambda: dist.all_reduce(torch.zeros(8).as_strided((3, 3), (2, 1))), ValueError, "share memory"),
    (lambda: dist.all_reduce(in_storage_of(0)), ValueError, "freed"),
    (lambda: dist.all_reduce(in_storage_of(8)), ValueError, "storage of 8 bytes"),
    (lambda: dist.all_reduce(ONE, dist.ReduceOp.BAND), Exception, "BAND"),
    (lambda: dist.all_reduce(ONE, dist.ReduceOp.BAND, async_op=True), Exception, "BAND"),
    (lambda: dist.reduce_scatter_tensor(ONE, TWO, dist.ReduceOp.BXOR), Exception, "BXOR"),
    (direct("reduce", [ONE], rootRank=5), ValueError, "invalid root rank: 5"),
    (direct("reduce", []), ValueError, "non-empty tensor list"),
    (direct("allgather", [], []), ValueError, "non-empty input"),
    (direct("allgather", [[ONE] * 2] * 2, [ONE] * 2), ValueError, "single-element|same length"),
    (direct("allgather", [[ONE]], [ONE]), ValueError, "invalid output tensor list"),
    (direct("allgather", [[ONE, ONE.double()]], [ONE]), ValueError, "invalid tensor type at index 1"),
    (lambda: dist.all_gather([TWO, TWO], ONE), ValueError, "invalid tensor size at index"),
    (lambda: dist.all_gather([ONE.int(), ONE.int()], ONE), (ValueError, TypeError), "(?i)type"),
    (lambda: dist.all_gather_into_tensor(torch.zeros(3), TWO), ValueError, "3 elements"),
    (lambda: dist.all_gather_into_tensor(torch.zeros(4, dtype=torch.int32), TWO), TypeError, "same type"),
    (direct("gather", [[ONE, ONE]], [ONE], rootRank=7), ValueError, "invalid root rank: 7"),
    (direct("gather", [[ONE]], [ONE], rootRank=dist.get_rank), ValueError, "output list size"),
    (direct("gather", [[ONE, TWO]], [ONE], rootRank=dist.get_rank), ValueError, "(?i)size"),
    (direct("gather", [[ONE, ONE]], [ONE], rootRank=other_rank), ValueError, "empty output on non-root"),
    (direct("scatter", [ONE], [[ONE]], rootRank=dist.get_rank), ValueError, "input list size"),
    (direct("scatter", [ONE], [[ONE, TWO]], rootRank=dist.get_rank), ValueError, "(?i)size"),
    (direct("scatter", [ONE], [[ONE, ONE]], rootRank=other_rank), ValueError, "empty input on non-root"),
    (direct("reduce_scatter", [ONE], [[ONE]]), ValueError, "input list size"),
    (lambda: dist.reduce_scatter(ONE, [TWO, TWO]), ValueError, "output tensor has 1 elements"),
    (lambda: dist.reduce_scatter_tensor(TWO, torch.zeros(5)), ValueError, "5 elements"),
    (direct("alltoall", [ONE], [ONE]), ValueError, "1 input tensors"),
    (direct("alltoall", [ONE, ONE.int()], [ONE, ONE]), (ValueError, TypeError), "(?i)type"),
    (lambda: split(4, [2, 2], [1, 2]), ValueError, "Split sizes doesn't match total dim 0 size"),
    (lambda: split(4, [2, 1, 1], [2, 1, 1]), ValueError, "Number of tensor splits not equal to group size"),
    (lambda: split(4, [2, 2], [5, -1]), ValueError, "-1 is negative"),
    (lambda: split(3), ValueError, "does not divide equally"),
    (lambda: dist.all_to_all_single(torch.zeros(()), torch.zeros(())), ValueError, "scalar"),
    (lambda: backend_of().send([ONE], 2, 0), ValueError, "rank 2 is outside"),
    (lambda: backend_of().recv([ONE], -3, 0), ValueError, "rank -3 is outside"),
    (lambda: backend_of().send([ONE, ONE], 0, 0), ValueError, "single-element"),
    (lambda: backend_of().send([ONE], 0, -1), ValueError, "Tag must be nonnegative"),
]


def refused(rank: int, world: int) -> list[str]:
    wrong = []
    for call, kind, pattern in WRONG:
        try:
            call()
        except Exception as error:
            told = isinstance(error, kind) and not isinstance(error, dist.DistBackendError)
            if not told or not re.search(pattern, str(error)):
                wrong.append(f"{pattern}: {type(error).__name__}: {error}")
        else:
            wrong.append(f"{pattern}: was not refused")
        dist.all_reduce(tensor := torch.ones(3))
        assert (tensor == world).all(), f"{pattern}: something was exchanged"
    # Only one rank's argument is wrong: it may repeat the call, and the other rank notices nothing.
    for _ in range(3 if rank == 0 else 0):
        with pytest.raises(ValueError, match="non-empty"):
            direct("allreduce", [])()
    dist.all_reduce(tensor := torch.ones(5))
    assert (tensor == world).all()
    return wrong


# proves P8, P9, P22
def test_wrong_arguments_are_refused_before_anything_is_exchanged() -> None:
    assert run_ranks(refused, 2) == [[], []]

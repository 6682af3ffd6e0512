"""Behaviour that torch's own tests require of some backends by name: re-created for symm.

After distributed_test.py and test_c10d_gloo.py: all_to_all in its forms, coalesced calls, the monitored barrier, sparse
tensors, and argument checks, which reject before anything is exchanged.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import backend_of, meet, run_ranks


def all_to_all_of_rows(rank: int, world: int) -> None:
    """Splits count rows; ``test_collectives.py`` has every dtype and length of flat tensors."""
    for width in (1, 3, 20_000):
        # i + 1 rows to rank i, rank + 1 rows from every rank.
        in_splits, out_splits = [i + 1 for i in range(world)], [rank + 1] * world
        sent = torch.full((sum(in_splits), width), float(rank))
        got = torch.full((sum(out_splits), width), -1.0)
        dist.all_to_all_single(got, sent, out_splits, in_splits)
        assert torch.equal(got, torch.cat([torch.full((rank + 1, width), float(i)) for i in range(world)]))
        # Rank 0 sends nothing at all.
        in_splits = [i if rank else 0 for i in range(world)]
        out_splits = [rank if i else 0 for i in range(world)]
        got = torch.empty((sum(out_splits), width))
        sent = torch.full((sum(in_splits), width), float(rank))
        dist.all_to_all_single(got, sent, out_splits, in_splits, async_op=True).wait()
        assert torch.equal(got, torch.cat([torch.full((out_splits[i], width), float(i)) for i in range(world)]))
        # Lists of different lengths.
        outputs = [torch.zeros((rank + 1, width)) for _ in range(world)]
        dist.all_to_all(outputs, [torch.full((i + 1, width), float(rank)) for i in range(world)])
        assert all((output == i).all() for i, output in enumerate(outputs))


@pytest.mark.parametrize("world", (1, 3))
def test_all_to_all_of_rows(world: int) -> None:
    run_ranks(all_to_all_of_rows, world)


def all_to_all_of_subgroups(rank: int, world: int) -> None:
    group = dist.new_group([1, 2, 3])
    if rank:
        sent = torch.full((3, 2), float(rank))
        got = torch.zeros(3, 2)
        dist.all_to_all_single(got, sent, group=group)
        assert got[:, 0].tolist() == [1, 2, 3]


def test_all_to_all_of_a_subgroup() -> None:
    run_ranks(all_to_all_of_subgroups, 4)


def coalesced(rank: int, world: int) -> None:
    shapes = ((5,), (3, 7), (60_000,), (0,), ())
    tensors = [torch.full(shape, float(rank + i)) for i, shape in enumerate(shapes)]
    dist.all_reduce_coalesced(tensors)
    total = world * (world - 1) / 2
    assert all((tensor == total + i * world).all() for i, tensor in enumerate(tensors))
    future = dist.all_reduce_coalesced(tensors, dist.ReduceOp.MAX, async_op=True)
    assert len(future.wait()) == len(shapes)


def test_coalesced_calls() -> None:
    run_ranks(coalesced, 3)


def monitored(rank: int, world: int) -> None:
    group = dist.group.WORLD
    for _ in range(3):
        group.monitored_barrier(timedelta(seconds=20), wait_all_ranks=True)
        group.monitored_barrier()


def test_monitored_barrier_that_succeeds() -> None:
    run_ranks(monitored, 3)


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
            assert tensor.is_sparse and torch.equal(tensor.to_dense(), wanted)
            assert tensor.is_coalesced()
            work = dist.all_reduce(tensor.clone(), async_op=True)
            work.wait()
            assert torch.equal(work.result()[0].to_dense(), wanted * world) or world == 1
    with pytest.raises((ValueError, NotImplementedError), match="sparse"):
        dist.all_reduce(torch.eye(3).to_sparse(), dist.ReduceOp.MAX)
    with pytest.raises((ValueError, NotImplementedError, RuntimeError), match=r"(?i)sparse"):
        dist.broadcast(torch.eye(3).to_sparse(), 0)
    with pytest.raises(ValueError, match="layout Sparse"):
        backend_of().broadcast([torch.eye(2).to_sparse()], opts("Broadcast", rootRank=0, rootTensor=0))
    if world > 1:
        with pytest.raises(ValueError, match="Tensor dimensions do not match"):
            dist.all_reduce(torch.sparse_coo_tensor([[0]], [1.0], (5 + rank,)))


@pytest.mark.parametrize("world", (1, 2, 3))
def test_sparse_all_reduce(world: int) -> None:
    run_ranks(sparse, world)


def opts(kind: str, **fields: object) -> object:
    options = getattr(torch._C._distributed_c10d, f"{kind}Options")()
    for field, value in fields.items():
        setattr(options, field, value)
    return options


ONE = torch.zeros(1)
TWO = torch.zeros(2)

#: Calls, and the expected text of their errors. World size 2.
WRONG: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "broadcast of nothing": (
        lambda: backend_of().broadcast([], opts("Broadcast")),
        ValueError,
        "non-empty tensor list",
    ),
    "broadcast of two": (lambda: backend_of().broadcast([ONE, ONE], opts("Broadcast")), ValueError, "single-element"),
    "broadcast from -1": (
        lambda: backend_of().broadcast([ONE], opts("Broadcast", rootRank=-1, rootTensor=0)),
        ValueError,
        "invalid root rank: -1",
    ),
    "broadcast from 2": (
        lambda: backend_of().broadcast([ONE], opts("Broadcast", rootRank=2, rootTensor=0)),
        ValueError,
        "invalid root rank: 2",
    ),
    "broadcast of tensor 1": (
        lambda: backend_of().broadcast([ONE], opts("Broadcast", rootRank=0, rootTensor=1)),
        ValueError,
        "invalid root tensor: 1",
    ),
    "all_reduce of nothing": (
        lambda: backend_of().allreduce([], opts("Allreduce")),
        ValueError,
        "non-empty tensor list",
    ),
    "all_reduce of two": (lambda: backend_of().allreduce([ONE, ONE], opts("Allreduce")), ValueError, "single-element"),
    "all_reduce_coalesced of nothing": (
        lambda: backend_of().allreduce_coalesced([], opts("AllreduceCoalesced")),
        ValueError,
        "non-empty tensor list",
    ),
    "all_reduce_coalesced of two dtypes": (
        lambda: backend_of().allreduce_coalesced([ONE, ONE.int()], opts("AllreduceCoalesced")),
        (ValueError, TypeError),
        "(?i)type",
    ),
    "all_reduce of quantised numbers": (
        lambda: dist.all_reduce(torch.quantize_per_tensor(ONE, 0.1, 0, torch.qint8)),
        (TypeError, NotImplementedError, RuntimeError),
        "(?i)qint8|dtype|QuantizedCPU",
    ),
    "all_reduce on the meta device": (
        lambda: backend_of().allreduce([torch.zeros(3, device="meta")], opts("Allreduce")),
        (ValueError, NotImplementedError),
        "meta",
    ),
    "all_reduce of an expanded tensor": (
        lambda: dist.all_reduce(torch.zeros(1).expand(4)),
        ValueError,
        "share memory",
    ),
    "all_reduce of rows that overlap": (
        lambda: dist.all_reduce(torch.zeros(8).as_strided((3, 3), (2, 1))),
        ValueError,
        "share memory",
    ),
    "all_reduce with BAND": (lambda: dist.all_reduce(ONE, dist.ReduceOp.BAND), Exception, "BAND"),
    "asynchronous all_reduce with BAND": (
        lambda: dist.all_reduce(ONE, dist.ReduceOp.BAND, async_op=True),
        Exception,
        "BAND",
    ),
    "reduce_scatter_tensor with BXOR": (
        lambda: dist.reduce_scatter_tensor(ONE, TWO, dist.ReduceOp.BXOR),
        Exception,
        "BXOR",
    ),
    "broadcast of quantised numbers": (
        lambda: backend_of().broadcast(
            [torch.quantize_per_tensor(ONE, 1.0, 0, torch.qint8)], opts("Broadcast", rootRank=0, rootTensor=0)
        ),
        TypeError,
        "not served",
    ),
    "reduce to 5": (
        lambda: backend_of().reduce([ONE], opts("Reduce", rootRank=5, rootTensor=0)),
        ValueError,
        "invalid root rank: 5",
    ),
    "reduce of nothing": (lambda: backend_of().reduce([], opts("Reduce")), ValueError, "non-empty tensor list"),
    "all_gather of nothing": (lambda: backend_of().allgather([], [], opts("Allgather")), ValueError, "non-empty input"),
    "all_gather of two": (
        lambda: backend_of().allgather([[ONE] * 2] * 2, [ONE] * 2, opts("Allgather")),
        ValueError,
        "single-element|same length",
    ),
    "all_gather into one": (
        lambda: backend_of().allgather([[ONE]], [ONE], opts("Allgather")),
        ValueError,
        "invalid output tensor list",
    ),
    "all_gather of another size": (
        lambda: dist.all_gather([TWO, TWO], ONE),
        ValueError,
        "invalid tensor size at index",
    ),
    "all_gather into two dtypes": (
        lambda: backend_of().allgather([[ONE, ONE.double()]], [ONE]),
        ValueError,
        "invalid tensor type at index 1",
    ),
    "all_gather into another dtype": (
        lambda: dist.all_gather([ONE.int(), ONE.int()], ONE),
        (ValueError, TypeError),
        "(?i)type",
    ),
    "all_gather_into_tensor too short": (
        lambda: dist.all_gather_into_tensor(torch.zeros(3), TWO),
        ValueError,
        "3 elements",
    ),
    "all_gather_into_tensor of another dtype": (
        lambda: dist.all_gather_into_tensor(torch.zeros(4, dtype=torch.int32), TWO),
        TypeError,
        "same type",
    ),
    "gather to 7": (
        lambda: backend_of().gather([[ONE, ONE]], [ONE], opts("Gather", rootRank=7)),
        ValueError,
        "invalid root rank: 7",
    ),
    "gather into one": (
        lambda: backend_of().gather([[ONE]], [ONE], opts("Gather", rootRank=dist.get_rank())),
        ValueError,
        "output list size",
    ),
    "gather of another size": (
        lambda: backend_of().gather([[ONE, TWO]], [ONE], opts("Gather", rootRank=dist.get_rank())),
        ValueError,
        "(?i)size",
    ),
    "gather with outputs elsewhere": (
        lambda: backend_of().gather([[ONE, ONE]], [ONE], opts("Gather", rootRank=1 - dist.get_rank())),
        ValueError,
        "empty output on non-root",
    ),
    "scatter of one": (
        lambda: backend_of().scatter([ONE], [[ONE]], opts("Scatter", rootRank=dist.get_rank())),
        ValueError,
        "input list size",
    ),
    "scatter of another size": (
        lambda: backend_of().scatter([ONE], [[ONE, TWO]], opts("Scatter", rootRank=dist.get_rank())),
        ValueError,
        "(?i)size",
    ),
    "scatter with inputs elsewhere": (
        lambda: backend_of().scatter([ONE], [[ONE, ONE]], opts("Scatter", rootRank=1 - dist.get_rank())),
        ValueError,
        "empty input on non-root",
    ),
    "reduce_scatter of one": (
        lambda: backend_of().reduce_scatter([ONE], [[ONE]], opts("ReduceScatter")),
        ValueError,
        "input list size",
    ),
    "reduce_scatter into another length": (
        lambda: dist.reduce_scatter(ONE, [TWO, TWO]),
        ValueError,
        "output tensor has 1 elements",
    ),
    "reduce_scatter_tensor too long": (
        lambda: dist.reduce_scatter_tensor(TWO, torch.zeros(5)),
        ValueError,
        "5 elements",
    ),
    "all_to_all of one": (lambda: backend_of().alltoall([ONE], [ONE], opts("AllToAll")), ValueError, "1 input tensors"),
    "all_to_all of two dtypes": (
        lambda: backend_of().alltoall([ONE, ONE.int()], [ONE, ONE], opts("AllToAll")),
        (ValueError, TypeError),
        "(?i)type",
    ),
    "splits that do not sum": (
        lambda: dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [2, 2], [1, 2]),
        ValueError,
        "Split sizes doesn't match total dim 0 size",
    ),
    "three splits": (
        lambda: dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [2, 1, 1], [2, 1, 1]),
        ValueError,
        "Number of tensor splits not equal to group size",
    ),
    "negative split": (
        lambda: dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [2, 2], [5, -1]),
        ValueError,
        "-1 is negative",
    ),
    "odd rows": (
        lambda: dist.all_to_all_single(torch.zeros(3), torch.zeros(3)),
        ValueError,
        "does not divide equally",
    ),
    "all_to_all_single of a scalar": (
        lambda: dist.all_to_all_single(torch.zeros(()), torch.zeros(())),
        ValueError,
        "scalar",
    ),
    "send to 2": (lambda: backend_of().send([ONE], 2, 0), ValueError, "rank 2 is outside"),
    "recv from -3": (lambda: backend_of().recv([ONE], -3, 0), ValueError, "rank -3 is outside"),
    "send of two": (lambda: backend_of().send([ONE, ONE], 0, 0), ValueError, "single-element"),
    "negative tag": (lambda: backend_of().send([ONE], 0, -1), ValueError, "Tag must be nonnegative"),
    "freed storage": (lambda: dist.all_reduce(in_storage_of(0)), ValueError, "freed"),
    "short storage": (lambda: dist.all_reduce(in_storage_of(8)), ValueError, "storage of 8 bytes"),
}


def in_storage_of(size: int) -> torch.Tensor:
    """Ten numbers in a storage of ``size`` bytes."""
    tensor = torch.zeros(10)
    tensor.untyped_storage().resize_(size)
    return tensor


def refused(rank: int, world: int) -> list[str]:
    wrong = []
    for name, (call, kind, pattern) in WRONG.items():
        try:
            call()
        except Exception as error:
            told = isinstance(error, kind) and not isinstance(error, dist.DistBackendError)
            if not told or not re.search(pattern, str(error)):
                wrong.append(f"{name}: {type(error).__name__}: {error}")
        else:
            wrong.append(f"{name}: was not refused")
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert (tensor == world).all(), f"{name}: something was exchanged"
    return wrong


# proves P8, P22
def test_wrong_arguments_are_refused_before_anything_is_exchanged() -> None:
    wrong = run_ranks(refused, 2)
    assert wrong == [[], []]


def refused_on_one(rank: int, world: int) -> None:
    """Only one rank's argument is wrong. It may repeat the call, and the other ranks notice nothing."""
    if rank == 0:
        for _ in range(3):
            with pytest.raises(ValueError, match="non-empty"):
                backend_of().allreduce([], opts("Allreduce"))
    tensor = torch.ones(5)
    dist.all_reduce(tensor)
    assert (tensor == world).all()


# proves P9
def test_a_refusal_on_one_rank_leaves_the_others_alone() -> None:
    run_ranks(refused_on_one, 2)

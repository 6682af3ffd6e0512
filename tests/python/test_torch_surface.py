"""The contract of torch's own classes for a backend: works, futures, exceptions, profiles, splits, rejections.

Every test runs its body on the ranks of a fresh group, each a separate process.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch_symm
from ranks import run_ranks

WORLD = 3
SENTENCES = {
    "root": "invalid root rank: 7",
    "tag": "Tag must be nonnegative",
    "dtype": "invalid tensor type at index 1",
    "own size": "invalid tensor size at index",
    "parts": "must be equal to world_size times",
    "splits": "doesn't match total dim 0",
}


def entered(rank: int, world: int, body: Callable[[int], None]) -> None:
    body(rank)


def backend() -> torch_symm.ProcessGroupSymm:
    return dist.group.WORLD._get_backend(torch.device("cpu"))


def overlapping(rank: int) -> None:
    # all_gather: the input is a part of the output, its own or another rank's.
    for place in range(WORLD):
        whole = torch.zeros(WORLD * 5)
        piece = whole[place * 5 : place * 5 + 5]
        piece.fill_(rank + 1)
        dist.all_gather_into_tensor(whole, piece)
        assert whole.view(WORLD, 5).eq(torch.arange(1.0, WORLD + 1)[:, None]).all(), (place, whole)
    # A misaligned overlap.
    whole = torch.full((WORLD * 5 + 2,), rank + 1.0)
    dist.all_gather_into_tensor(whole[:-2], whole[3:8])
    assert whole[:-2].view(WORLD, 5).eq(torch.arange(1.0, WORLD + 1)[:, None]).all(), whole
    # reduce_scatter into each part of its own input.
    for place in range(WORLD):
        whole = torch.arange(WORLD * 4.0) + rank
        dist.reduce_scatter_tensor(whole[place * 4 : place * 4 + 4], whole)
        expected = (torch.arange(4.0) + rank * 4) * WORLD + 3
        assert whole[place * 4 : place * 4 + 4].equal(expected), (place, whole)
    # all_to_all in place, single and as lists.
    whole = torch.arange(WORLD * 2) + 100 * rank
    expected = torch.cat([torch.arange(2) + 2 * rank + 100 * r for r in range(WORLD)])
    dist.all_to_all_single(whole, whole)
    assert whole.equal(expected), whole
    whole = torch.arange(WORLD * 2) + 100 * rank
    dist.all_to_all(list(whole.chunk(WORLD)), list(whole.chunk(WORLD)))
    assert whole.equal(expected), whole
    # gather and scatter with the root's tensor inside the list.
    parts = [torch.full((3,), -1.0) for _ in range(WORLD)]
    parts[1].fill_(rank)
    dist.gather(parts[1], parts if rank == 0 else None, dst=0)
    if rank == 0:
        assert torch.stack(parts)[:, 0].equal(torch.arange(float(WORLD))), parts
    parts = [torch.full((3,), float(10 * r)) for r in range(WORLD)]
    dist.scatter(parts[2], parts if rank == 0 else None, src=0)
    assert parts[2].eq(10 * rank).all(), parts


def layouts(rank: int) -> None:
    def served(t: torch.Tensor, asynchronous: bool) -> None:
        guard = t.clone()
        work = dist.all_reduce(t, async_op=asynchronous)
        if work is not None:
            work.wait()
        assert t.equal(guard * WORLD), (t.shape, t.stride())

    for asynchronous in (False, True):
        base = torch.arange(96.0).reshape(2, 3, 4, 4)
        served(base.clone().to(memory_format=torch.channels_last), asynchronous)
        whole = base.clone()
        served(whole[:, ::2, 1:3], asynchronous)
        assert whole[:, 1].equal(base[:, 1]) and whole[:, ::2, 0].equal(base[:, ::2, 0])
        served(base.clone().permute(3, 1, 0, 2), asynchronous)
        served(torch.tensor(2.5), asynchronous)
        served(torch.empty(0, 3), asynchronous)
        served(torch.ones(4, dtype=torch.complex64), asynchronous)
    with torch.inference_mode():
        t = torch.ones(4, 4).t()[1:]
        work = dist.all_reduce(t, async_op=True)
        work.wait()
        assert t.eq(WORLD).all()
    t = torch.ones(4, 4, requires_grad=True)
    dist.broadcast(t.t(), 1)
    out = torch.zeros(4, WORLD * 2).t()
    dist.all_gather_into_tensor(out, torch.full((2, 4), float(rank)).t().contiguous().t())
    assert out.reshape(WORLD, 8).eq(torch.arange(float(WORLD))[:, None]).all()
    received = torch.zeros(6, 2)
    work = dist.irecv(received[:, 1], (rank - 1) % WORLD)
    dist.send(torch.full((6,), float(rank)).expand(6), (rank + 1) % WORLD)
    work.wait()
    assert received[:, 1].eq((rank - 1) % WORLD).all() and received[:, 0].eq(0).all()
    dist.broadcast(torch.ones(1).expand(8) if rank == 0 else torch.ones(8), 0)


def refused(rank: int) -> None:
    one = torch.ones(4)
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    short = torch.ones(4)
    short.untyped_storage().resize_(8)
    cases: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (ValueError, "share memory", lambda: dist.all_reduce(torch.ones(1).expand(4))),
        (ValueError, "share memory", lambda: dist.all_reduce(torch.ones(8).as_strided((3, 3), (2, 1)))),
        (ValueError, "freed", lambda: dist.all_reduce(freed)),
        (ValueError, "storage of 8 bytes", lambda: dist.all_reduce(short)),
        (ValueError, "layout Sparse", lambda: backend().broadcast([torch.eye(2).to_sparse()], root(0))),
        (
            TypeError,
            "not served",
            lambda: backend().broadcast([torch.quantize_per_tensor(one, 1.0, 0, torch.qint8)], root(0)),
        ),
        (ValueError, "root", lambda: backend().broadcast([one], root(7))),
        (ValueError, "tag", lambda: dist.send(one, (rank + 1) % WORLD, tag=-1)),
        (ValueError, "own size", lambda: dist.all_gather([torch.ones(5) for _ in range(WORLD)], one)),
        (ValueError, "dtype", lambda: backend().allgather([[one, one.double(), one]], [one])),
        (ValueError, "parts", lambda: dist.all_gather_into_tensor(torch.ones(5), one)),
        (ValueError, "parts", lambda: dist.reduce_scatter_tensor(one, torch.ones(5))),
        (TypeError, "same type", lambda: dist.all_gather_into_tensor(torch.ones(4 * WORLD).double(), one)),
        (ValueError, "splits", lambda: dist.all_to_all_single(one, one, [1] * WORLD, [2, 2, 0])),
        (ValueError, "ReduceOp.SUM", lambda: dist.all_reduce(torch.eye(2).to_sparse(), dist.ReduceOp.MAX)),
        (Exception, "BAND", lambda: dist.all_reduce(one, dist.ReduceOp.BAND)),
        (Exception, "BXOR", lambda: dist.reduce_scatter_tensor(torch.ones(1), torch.ones(WORLD), dist.ReduceOp.BXOR)),
    ]
    for kind, words, call in cases:
        for asynchronous in (False, True):
            if asynchronous and words != "BAND":
                continue
            with pytest.raises(kind) as caught:
                call() if not asynchronous else dist.all_reduce(one, dist.ReduceOp.BAND, async_op=True)
            assert SENTENCES.get(words, words) in str(caught.value), (words, str(caught.value))
            assert not isinstance(caught.value, dist.DistBackendError), words
    # Nothing was exchanged: the group stays usable.
    dist.all_reduce(one)
    assert one.eq(WORLD).all()


def root(rank: int) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = rank
    return options


def futures(rank: int) -> None:
    t = torch.full((4,), rank + 1.0)
    work = dist.all_reduce(t, async_op=True)
    future = work.get_future()
    assert work.get_future().wait()[0].data_ptr() == t.data_ptr()
    work.wait()
    assert future.value()[0].eq(6).all() and work.is_completed() and work.is_success()
    assert work.result()[0].data_ptr() == t.data_ptr()
    # The value is available as soon as wait() returns.
    for _ in range(300):
        work = dist.all_reduce(torch.ones(64), async_op=True)
        future = work.get_future()
        work.wait()
        assert future.value()[0][0] == WORLD
    # The caller drops the work; the result is still correct and complete.
    kept = torch.ones(1 << 18)
    for _ in range(4):
        dist.all_reduce(torch.ones(1 << 18), async_op=True)
    dist.all_reduce(kept)
    # A callback that calls the group, synchronously and asynchronously, and waits for the call queued after it.
    a, b, c = torch.ones(4), torch.ones(4), torch.ones(4)
    first, second = dist.all_reduce(a, async_op=True).get_future(), dist.all_reduce(b, async_op=True).get_future()

    def more(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        second.wait()
        again = dist.all_reduce(c, async_op=True).get_future().wait()[0]
        return done.value()[0] + again

    assert first.then(more).wait().eq(2 * WORLD).all()
    # Lists.
    lists = [[torch.zeros(2) for _ in range(WORLD)]]
    value = dist.group.WORLD.allgather(lists, [torch.full((2,), float(rank))]).get_future().wait()
    assert [float(t[0]) for t in value] == [0.0, 1.0, 2.0]
    # A coalesced block is one work.
    ops = [dist.P2POp(dist.isend, torch.full((3,), float(rank)), (rank + 1) % WORLD)]
    got = torch.zeros(3)
    ops.append(dist.P2POp(dist.irecv, got, (rank - 1) % WORLD))
    works = dist.batch_isend_irecv(ops)
    assert len(works) == 1
    works[0].wait()
    assert got.eq((rank - 1) % WORLD).all()
    # Any source.
    if rank == 0:
        seen = {dist.recv(got, None) for _ in range(WORLD - 1)}
        assert seen == {1, 2}
    else:
        dist.send(got, 0)


def premultiplied(rank: int) -> None:
    for factor in (0.5, torch.tensor([0.5])):
        t = torch.full((5,), rank + 1.0)
        dist.all_reduce(t, dist._make_nccl_premul_sum(factor))
        assert t.eq(3).all(), t
    t = torch.full((5,), rank + 1, dtype=torch.bfloat16)
    dist.all_reduce(t, dist.ReduceOp.AVG)
    assert t.eq(2).all()


def sparse(rank: int) -> None:
    mine = torch.sparse_coo_tensor([[0, rank + 1], [1, 1]], [[1.0, 2.0], [3.0, 4.0]], (5, 3, 2))
    expected = sum(
        torch.sparse_coo_tensor([[0, r + 1], [1, 1]], [[1.0, 2.0], [3.0, 4.0]], (5, 3, 2)).to_dense()
        for r in range(WORLD)
    )
    dist.all_reduce(mine)
    assert mine.is_coalesced() and mine.to_dense().equal(expected)
    with pytest.raises(ValueError, match="Tensor dimensions do not match"):
        dist.all_reduce(torch.sparse_coo_tensor([[0]], [1.0], (5 + rank,)))


def exceptions(rank: int) -> None:
    """Every entry point raises the type of the failure."""
    small = dist.new_group()
    if rank == 0:
        time.sleep(0.2)
    with pytest.raises(torch_symm.SymmMismatchError) as caught:
        dist.all_reduce(torch.ones(4 + rank), group=small)
    assert isinstance(caught.value, dist.DistBackendError)
    other = dist.new_group()
    work = dist.all_reduce(torch.ones(4 + rank), group=other, async_op=True)
    future = work.get_future()
    with pytest.raises(torch_symm.SymmMismatchError):
        work.wait()
    with pytest.raises(torch_symm.SymmMismatchError):
        future.wait()
    with pytest.raises(torch_symm.SymmMismatchError):
        future.value()
    assert work.is_completed() and not work.is_success()
    with pytest.raises(torch_symm.SymmMismatchError):
        dist.barrier(group=other)
    lost = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 0:
        work = dist.all_reduce(torch.ones(4), group=lost, async_op=True)
        with pytest.raises(torch_symm.SymmTimeoutError):
            work.wait(timedelta(seconds=0.2))
        assert not work.is_completed()
        with pytest.raises(torch_symm.SymmTimeoutError):
            work.wait()
        other = lost._get_backend(torch.device("cpu"))
        assert other.get_error() != backend().get_error()
    dist.barrier()
    gone = dist.new_group()
    if rank == 0:
        gone._get_backend(torch.device("cpu")).abort()
    with pytest.raises(torch_symm.SymmAbortedError if rank == 0 else torch_symm.SymmPeerError):
        dist.all_reduce(torch.ones(1), group=gone)


def backward(rank: int) -> None:
    """A failure inside a backward pass keeps its type."""
    layer = torch.nn.Linear(4 + (rank == 0), 4)
    for parameter in layer.parameters():
        parameter.register_hook(lambda gradient: dist.all_reduce(gradient))
    with pytest.raises(torch_symm.SymmMismatchError):
        layer(torch.ones(2, layer.in_features)).sum().backward()
    group = dist.new_group()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4), process_group=group)
    if rank == 0:
        group._get_backend(torch.device("cpu")).abort()
    with pytest.raises((torch_symm.SymmPeerError, torch_symm.SymmAbortedError)):
        for _ in range(100):
            model(torch.ones(2, 4)).sum().backward()


def split(rank: int) -> None:
    mine = backend()
    assert dist.group.WORLD._get_backend(torch.device("cpu")).options.group_name == mine.options.group_name
    options = copy.deepcopy(mine.options)
    assert type(options) is torch_symm.Options and options is not mine.options
    assert options._timeout == mine.options._timeout
    mine._set_default_timeout(timedelta(seconds=77))
    assert mine.options._timeout == timedelta(seconds=77)
    mine.perform_nocolor_split(torch.device("cpu"))
    child = dist.group.WORLD.split_group([0, 2], group_name="evens")
    assert (child is None) == (rank == 1)
    if child is not None:
        t = torch.full((2,), rank + 1.0)
        child.allreduce([t]).wait()
        assert t.eq(4).all() and child.size() == 2
        part = child._get_backend(torch.device("cpu"))
        assert list(part.options.global_ranks_in_group) == [0, 2]
    first = mine.get_sequence_number()
    dist.barrier()
    dist.send(torch.ones(1), (rank + 1) % WORLD) if rank == 0 else None
    if rank == 1:
        dist.recv(torch.ones(1), 0)
    assert mine.get_sequence_number() == first + 1


def profile(rank: int) -> None:
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
        dist.all_reduce(torch.ones(3, 4))
        dist.broadcast(torch.ones(2), 0)
        dist.all_to_all_single(torch.ones(3), torch.ones(3))
        dist.barrier()
        work = dist.all_gather_into_tensor(torch.ones(3), torch.ones(1), async_op=True)
        work.wait()
        request = dist.isend(torch.ones(5), (rank + 1) % WORLD)
        dist.recv(torch.ones(5), (rank - 1) % WORLD)
        request.wait()
    events = {event.name: event for event in trace.events()}
    for name in ("all_reduce", "broadcast", "all_to_all", "barrier", "all_gather", "send", "recv"):
        assert f"symm:{name}" in events, (name, sorted(events))
    assert events["symm:all_reduce"].input_shapes == [[3, 4]]
    assert events["symm:all_reduce"].is_async
    assert sum(event.name == "record_param_comms" for event in trace.events()) == 7


def aborted(rank: int) -> None:
    """A group ends while completions run Python code: by destroy, and by the destructor, which holds the GIL."""
    group = dist.new_group()
    dist.all_reduce(torch.ones(4), group=group, async_op=True).get_future().then(lambda _: time.sleep(0.05))
    dist.destroy_process_group(group)
    del group
    dist.all_reduce(torch.ones(4), async_op=True).get_future().then(lambda _: time.sleep(0.05))
    dist.distributed_c10d._abort_process_group()
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    "body",
    [overlapping, layouts, refused, futures, premultiplied, sparse, exceptions, backward, split, profile, aborted],
)
def test(body: Callable[[int], None]) -> None:
    run_ranks(entered, WORLD, body, group_timeout=30)


#: Last actions of ranks, and the seconds within which they must end.
ENDINGS = {
    "pass": 2,
    "sys.exit(0)": 2,
    "dist.all_reduce(torch.ones(4), async_op=True)": 2,
    "for _ in range(50): dist.all_reduce(torch.ones(4), async_op=True).get_future().then(lambda f: f.value())": 2,
    "if rank == 0: dist.irecv(torch.ones(4), 1)": 2,
    "if rank == 0: dist.all_reduce(torch.ones(4), async_op=True)": 8,
}
# Two ranks for each of them, forked from one process that has imported torch. They end as a program does.
LEAVING = """
import atexit, json, os, sys, time, torch, torch_symm, torch.distributed as dist

folder, endings = sys.argv[1], json.loads(sys.argv[2])
ranks = [(number, rank) for number in range(len(endings)) for rank in range(2)]
for number, rank in ranks:
    if os.fork() == 0:
        break
else:
    os._exit(sum(os.wait()[1] != 0 for _ in ranks))
own = f"{folder}/{number}-{rank}"
log = os.open(own, os.O_CREAT | os.O_WRONLY)
os.dup2(log, 1), os.dup2(log, 2)


def left():
    with open(f"{own}.seconds", "w") as file:
        print(time.monotonic() - start, file=file)


# Registered after the extension's own exit function, and therefore called before it.
atexit.register(left)
dist.init_process_group("symm", init_method=f"file://{folder}/store-{number}", rank=rank, world_size=2)
dist.all_reduce(torch.ones(4), async_op=True).wait()
start = time.monotonic()
exec(endings[number])
"""


@pytest.mark.timed
def test_exit_without_destroy_is_silent_and_quick(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LEAVING, str(tmp_path), json.dumps(list(ENDINGS))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for number, (ending, limit) in enumerate(ENDINGS.items()):
        for rank in range(2):
            own = tmp_path / f"{number}-{rank}"
            seconds, said = own.with_suffix(".seconds"), own.read_text()
            assert seconds.exists() and "terminate" not in said and "Traceback" not in said, f"{ending}: {said}"
            assert float(seconds.read_text()) < limit, f"{ending}, rank {rank}"

"""Blocks of calls (``batch_isend_irecv``, ``_coalescing_manager``) that end by an exception, and their works."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_symm
from ranks import init, meet, on_threads, run_ranks

# Imported before there is a group of symm, as programs do.
from torch.distributed.distributed_c10d import _coalescing_manager
from torch_symm.testing import init_process_group

CPU = torch.device("cpu")
Keep = Callable[[torch.Tensor], torch.Tensor]


class Left(Exception):
    """The exception that a program raises within a block."""


def received(bad: Callable[[Keep], torch.Tensor], tag: int = 0) -> Callable[[Keep], object]:
    return lambda keep: dist.batch_isend_irecv([dist.P2POp(dist.irecv, bad(keep), 1 - dist.get_rank(), tag=tag)])


def freed(keep: Keep) -> torch.Tensor:
    tensor = keep(torch.zeros(4))
    tensor.untyped_storage().resize_(0)
    return tensor


def recorded(keep: Keep) -> None:
    with _coalescing_manager():
        dist.all_reduce(keep(torch.ones(4)))
        raise Left


def mixed(device: torch.device | None) -> Callable[[Keep], None]:
    def body(keep: Keep) -> None:
        with _coalescing_manager(device=device, async_ops=True):
            dist.all_reduce(keep(torch.ones(4)))
            dist.all_gather_into_tensor(keep(torch.zeros(8)), keep(torch.ones(4)))

    return body


def posted(keep: Keep) -> None:
    """Messages sent before the exception arrive."""
    other = 1 - dist.get_rank()
    with pytest.raises(Left), _coalescing_manager(device=CPU, async_ops=True):
        dist.isend(keep(torch.full((4,), 7.0)), other)
        dist.broadcast(keep(torch.ones(2)), 0)
        raise Left
    dist.recv(got := torch.zeros(4), other)
    assert (got == 7).all()
    raise Left


def within(keep: Keep) -> None:
    """If an inner block fails, the outer block continues with all its calls."""
    other = 1 - dist.get_rank()
    with _coalescing_manager(device=CPU, async_ops=True) as manager:
        dist.irecv(got := torch.zeros(1 << 20), other)
        with pytest.raises(Left), _coalescing_manager(device=CPU, async_ops=True):
            dist.isend(torch.full((1 << 20,), 5.0), other)
            raise Left
        with pytest.raises(ValueError, match="Tag"):
            dist.isend(torch.ones(1), other, tag=-2)
    manager.wait()
    assert (got == 5).all()
    with pytest.raises(ValueError, match="non-empty op list"), _coalescing_manager():
        dist.all_reduce(keep(torch.ones(4)))
        with _coalescing_manager():
            pass
    raise Left


def on_a_thread(keep: Keep) -> None:
    on_threads([lambda: recorded(keep)])


def dropped(keep: Keep) -> None:
    """A block that ends without an exit or an exception: the generator that holds it is closed."""
    block = _coalescing_manager(device=CPU)
    block.__enter__()
    dist.all_reduce(keep(torch.ones(4)))
    del block
    gc.collect()
    raise Left


def closed(keep: Keep) -> None:
    """A KeyboardInterrupt is not an Exception, so it tests another path."""
    with _coalescing_manager(device=CPU):
        dist.all_reduce(keep(torch.ones(4)))
        raise KeyboardInterrupt


CASES: dict[str, tuple[Callable[[Keep], object], type[BaseException]]] = {
    "elements share memory": (received(lambda keep: keep(torch.zeros(1).expand(4))), ValueError),
    "sparse": (received(lambda keep: torch.zeros(4).to_sparse()), NotImplementedError),
    "freed": (received(freed), ValueError),
    "no backend": (received(lambda keep: keep(torch.zeros(4, device="meta"))), RuntimeError),
    "tag": (received(lambda keep: keep(torch.zeros(4)), tag=-3), ValueError),
    "recorded": (recorded, Left),
    "mixed": (mixed(None), RuntimeError),
    "mixed, with a device": (mixed(CPU), RuntimeError),
    "posted": (posted, Left),
    "within another": (within, Left),
    "on a thread": (on_a_thread, Left),
    "dropped": (dropped, Left),
    "interrupted": (closed, KeyboardInterrupt),
}


def works(name: str) -> None:
    rank = dist.get_rank()
    dist.all_reduce(x := torch.full((4,), rank + 1.0))
    dist.all_gather_into_tensor(y := torch.zeros(2), torch.tensor([float(rank)]))
    dist.reduce_scatter_tensor(z := torch.zeros(1), torch.tensor([1.0, 2.0]))
    assert (x.tolist(), y.tolist(), z.tolist()) == ([3.0] * 4, [0.0, 1.0], [2.0 + 2 * rank]), name
    with _coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(x)
        dist.all_reduce(y)
    manager.wait()
    assert (x.tolist(), y.tolist()) == ([6.0] * 4, [0.0, 2.0]), name
    got, other = torch.zeros(2), 1 - rank
    ops = [dist.P2POp(dist.isend, torch.full((2,), float(rank)), other), dist.P2POp(dist.irecv, got, other)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert got.tolist() == [float(other)] * 2, name


def after_exceptions(rank: int, world: int, backend: str) -> None:
    if backend == "gloo":
        torch_symm.replace_gloo()
    if not dist.is_initialized():
        init(rank, world, backend)
    for name, (call, error) in CASES.items():
        seen: list[Any] = []

        def keep(tensor: torch.Tensor, seen: list[Any] = seen) -> torch.Tensor:
            seen.append(weakref.ref(tensor))
            return tensor

        try:
            call(keep)
        except error as caught:
            assert type(caught) is error or error is not Left, name
        else:
            raise AssertionError(f"{name}: no error")
        works(name)
        gc.collect()
        assert not any(tensor() is not None for tensor in seen), f"{name}: a tensor is alive"


@pytest.mark.parametrize("backend", ["symm", "gloo"])
def test_an_exception_ends_a_block(backend: str) -> None:
    run_ranks(after_exceptions, 2, backend, backend=None)


@pytest.mark.ranks(2, backend=None)
def test_an_exception_ends_a_block_behind_torchs_wrapper(rank: int) -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    init_process_group()
    for call in (recorded, on_a_thread):
        with pytest.raises(Left):
            call(lambda tensor: tensor)
        dist.all_reduce(x := torch.full((4,), rank + 1.0))
        assert x.tolist() == [3.0] * 4


@pytest.mark.ranks(2)
def test_an_exception_leaves_other_backends_alone() -> None:
    """A group without symm behaves as torch defines it."""
    ours, theirs = dist.new_group(backend="symm"), dist.new_group(backend="gloo")
    state = dist.distributed_c10d._world.pg_coalesce_state
    for group in (ours, theirs):
        with pytest.raises(Left), _coalescing_manager(group):
            raise Left
    assert ours not in state and state.pop(theirs) == []


def after_a_death(rank: int, world: int) -> None:
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    x, others = torch.ones(3), [dist.P2POp(dist.irecv, torch.zeros(3), 1)]
    calls: list[Callable[[], object]] = [
        lambda: [work.wait() for work in dist.batch_isend_irecv(others)],
        lambda: dist.batch_isend_irecv(others),
        lambda: dist.all_reduce(x),
        lambda: dist.all_gather_into_tensor(torch.zeros(6), x),
        lambda: dist.batch_isend_irecv(others),
        dist.barrier,
    ]
    for call in calls:
        with pytest.raises(torch_symm.SymmPeerError, match="rank 1"):
            call()


def test_a_failed_group_raises_after_a_batch_too() -> None:
    run_ranks(after_a_death, 2, expect_killed=[1])


def one_limit(rank: int, world: int) -> None:
    """No part takes longer than the limit after the part before it, but all parts together do."""
    got = [torch.zeros(4) for _ in range(3)]
    if rank == 0:
        dist.barrier()
        for number, tensor in enumerate(got):
            if number == 2:
                meet("given up", rank, world)
            else:
                time.sleep(1.5)
            dist.send(tensor + number, 1)
        return
    (work,) = dist.batch_isend_irecv([dist.P2POp(dist.irecv, tensor, 0) for tensor in got])
    dist.barrier()
    begun = time.monotonic()
    with pytest.raises(torch_symm.SymmTimeoutError, match=r"2\.0 s; the call itself goes on"):
        work.wait(timedelta(seconds=2))
    # If each part had a separate limit of 2 s, the wait would take 5 s.
    assert time.monotonic() - begun < 4
    assert not work.is_completed()
    meet("given up", rank, world)
    work.wait(timedelta(seconds=30))
    assert [float(tensor[0]) for tensor in got] == [0, 1, 2]
    # A part that has ended cannot exceed the limit.
    assert work.wait(timedelta(milliseconds=1)) and work.is_success()


@pytest.mark.timed
def test_one_limit_for_all_parts_of_a_block() -> None:
    run_ranks(one_limit, 2)

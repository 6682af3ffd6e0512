"""Behaviour of torch 2.11 that differs for backends that it does not ship: one test for each."""

from __future__ import annotations

import copy
import gc
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch_symm
from ranks import backend_of, meet, run_ranks
from torch_symm.testing import init_process_group

CPU = torch.device("cpu")


@pytest.mark.ranks(2, backend=None)
def test_last_reference_dies_with_the_gil_held(rank: int) -> None:
    """The destructor joins threads that complete futures with Python callbacks: it must not hold the GIL meanwhile."""
    called = []
    for turn in range(10):
        init_process_group(name=f"turn-{turn}")
        work = dist.all_reduce(torch.ones(1 << 18), async_op=True)
        work.get_future().then(lambda future: called.append(future.value()[0][0].item()))
        work.wait()
        if rank == 0:
            dist.all_reduce(torch.ones(1), async_op=True).get_future().then(lambda _: time.sleep(0.01))
        else:
            dist.all_reduce(torch.ones(1))
        if turn % 2:
            dist.destroy_process_group()
        else:
            # No shutdown is called: only the references are dropped.
            dist.distributed_c10d._world.pg_map.clear()
            dist.destroy_process_group.__globals__["_update_default_pg"](None)
            for table in ("pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg"):
                getattr(dist.distributed_c10d._world, table).clear()
            dist.distributed_c10d._world.pg_coalesce_state.clear()
        del work
        gc.collect()
    assert called == [2.0] * 10


# proves P22
@pytest.mark.ranks(2, group_timeout=30)
def test_own_class_with_options() -> None:
    """split_group deep-copies ``options`` and sets timeouts; a bare Backend does not support that."""
    backend = backend_of()
    assert isinstance(backend, torch_symm.ProcessGroupSymm)
    copied = copy.deepcopy(backend.options)
    assert isinstance(copied, torch_symm.Options) and copied._timeout == timedelta(seconds=30)
    copied._timeout = timedelta(seconds=1)
    assert backend.options._timeout == timedelta(seconds=30)
    backend._set_default_timeout(timedelta(seconds=7))
    assert backend.options._timeout == timedelta(seconds=7)
    assert backend.perform_nocolor_split(CPU) is None
    with pytest.raises(NotImplementedError, match="does not time single calls"):
        dist.group.WORLD._enable_collectives_timing()
    assert backend.name() == "symm"
    assert backend.get_error() is not None
    group = dist.new_group([0, 1], pg_options=torch_symm.Options(timedelta(seconds=3)))
    assert backend_of(group).options._timeout == timedelta(seconds=3)
    with pytest.raises(TypeError, match=r"pg_options.*torch_symm\.Options|torch_symm\.Options.*pg_options"):
        dist.new_group([0, 1], pg_options=object())


@pytest.mark.ranks(2)
def test_one_work_for_a_coalesced_block(rank: int) -> None:
    """The Work at the end of a block covers all its operations and keeps their tensors alive."""
    with dist._coalescing_manager(async_ops=True) as manager:
        for turn in range(5):
            dist.all_reduce(torch.full((300_000,), float(turn)))
    manager.wait()
    backend = backend_of()
    backend._start_coalescing()
    parts = [torch.full((100_000,), float(rank)) for _ in range(3)]
    for part in parts:
        backend.allreduce([part])
    backend.broadcast([last := torch.full((5,), float(rank))], dist.BroadcastOptions())
    work = backend._end_coalescing()
    work.wait()
    assert work.is_completed()
    assert all(bool((part == 1).all()) for part in parts) and bool((last == 0).all())


@pytest.mark.timed
def test_timeout_of_a_call_and_of_the_group_later() -> None:
    """The timeout of a call's options, of ``_set_default_timeout`` and of ``pg.set_timeout`` is used."""

    def body(rank: int, world: int) -> None:
        options = dist.AllreduceOptions()
        options.timeout = timedelta(milliseconds=400)
        group = dist.new_group([0, 1])
        other = dist.new_group([0, 1])
        backend_of(other)._set_default_timeout(timedelta(milliseconds=400))
        if rank == 0:
            for call in (
                lambda: backend_of(group).allreduce([torch.ones(2)], options).wait(),
                lambda: dist.all_reduce(torch.ones(2), group=other),
            ):
                started = time.monotonic()
                with pytest.raises(torch_symm.SymmTimeoutError):
                    call()
                assert time.monotonic() - started <= 0.9
        meet("given up", rank, world)
        dist.barrier()

    run_ranks(body, 2)


@pytest.mark.ranks(3, backend=None, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
def test_distributed_debug_detail(rank: int, world_size: int) -> None:
    """The wrapper compares the sequence numbers of all ranks, so transfers between two of them must not count."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    init_process_group(timeout=20)
    tensor = torch.ones(10)
    for _ in range(3):
        if rank == 0:
            dist.send(tensor, 1)
        elif rank == 1:
            dist.recv(tensor, 0)
        dist.all_reduce(tensor)
    dist.all_reduce(tensor, async_op=True).wait()
    assert (tensor == world_size**4).all()
    gathered = torch.zeros(world_size)
    dist.all_gather_into_tensor(gathered, torch.tensor([float(rank)]))
    assert gathered.tolist() == [float(r) for r in range(world_size)]
    dist.barrier(group=dist.new_group())
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    for _ in range(3):
        model(torch.full((2, 4), float(rank))).sum().backward()
    gradient = model.module.weight.grad
    others = [torch.zeros_like(gradient) for _ in range(world_size)]
    dist.all_gather(others, gradient)
    assert all(torch.equal(other, gradient) for other in others)
    with pytest.raises(RuntimeError, match=r"(?i)mismatch|disagree|shape"):
        dist.all_reduce(torch.zeros(3 + rank))

"""The ten ways in which an out-of-tree backend goes wrong in torch, one test each."""

from __future__ import annotations

import copy
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch_symm
from ranks import file_store, init, run_ranks
from torch._C._distributed_c10d import AllreduceOptions, ProcessGroup
from torch.distributed.distributed_c10d import _coalescing_manager


def backend(group: ProcessGroup | None = None) -> torch_symm.ProcessGroupSymm:
    return (group or dist.group.WORLD)._get_backend(torch.device("cpu"))


def last_reference(rank: int, world: int) -> None:
    """The last reference dies in Python while the worker thread runs callbacks that need the GIL."""
    for i in range(20):
        options = torch_symm.Options(timeout=timedelta(seconds=20), group_name=f"bare-{i}")
        group = torch_symm.ProcessGroupSymm(file_store(f"bare-{i}", world), rank, world, options)
        seen: list[int] = []
        for k in range(10):
            request = AllreduceOptions()
            request.asyncOp = True
            future = group.allreduce([torch.ones(20_000)], request).get_future()
            future.then(lambda f, k=k, seen=seen: seen.append(k) or time.sleep(0.001))
        # Nobody waited: the destructor has to let the callbacks run.
        del group, future
        deadline = time.monotonic() + 10
        while len(seen) < 10 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert len(seen) == 10


def test_1_the_destructor_releases_the_gil() -> None:
    run_ranks(last_reference, 2, backend=None)


def bindings(rank: int, world: int) -> None:
    group = backend()
    assert type(group) is torch_symm.ProcessGroupSymm
    assert isinstance(group.options, torch_symm.Options)
    for duplicate in (copy.deepcopy(group.options), copy.copy(group.options)):
        assert type(duplicate) is torch_symm.Options and duplicate is not group.options
        assert duplicate._timeout == group.options._timeout
    group._set_default_timeout(timedelta(seconds=33))
    assert group.options._timeout == timedelta(seconds=33)
    assert group.perform_nocolor_split(torch.device("cpu")) is None
    assert group.supports_splitting
    assert "SUCCESS" in str(group.get_error())


def test_2_a_class_of_its_own() -> None:
    run_ranks(bindings, 2)


def custom_type(rank: int, world: int) -> None:
    group = dist.group.WORLD
    assert group._get_backend(torch.device("cpu")) is group._get_backend(torch.device("cuda"))
    assert dist.get_backend() == "symm" and backend().name() == "symm"
    with pytest.raises(NotImplementedError, match="cpu:symm,cuda:nccl"):
        if torch.cuda.is_available():
            dist.all_reduce(torch.ones(1, device="cuda"))
        else:
            raise NotImplementedError('no GPU here to try "cpu:symm,cuda:nccl"')


def test_3_one_object_serves_both_devices() -> None:
    run_ranks(custom_type, 2)


def test_4_devices_are_a_list() -> None:
    assert dist.Backend.backend_capability["symm"] == ["cpu", "cuda"]
    assert not set(dist.Backend.default_device_backend_map) & set("cpu")
    assert dist.is_backend_available("symm")


def monitored(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match=r"(?i)gloo"):
        dist.monitored_barrier()
    dist.group.WORLD.monitored_barrier(timedelta(seconds=20))
    if rank == 0:
        with pytest.raises(RuntimeError, match="Rank 1 failed to pass monitoredBarrier in 300 ms"):
            dist.group.WORLD.monitored_barrier(timedelta(seconds=0.3))
    else:
        time.sleep(1)


def test_5_the_monitored_barrier_of_the_group_object() -> None:
    run_ranks(monitored, 2)


def split(rank: int, world: int) -> None:
    """``dist.split_group`` wants a GPU in this torch, so the group object is asked."""
    parent = dist.group.WORLD
    for name, members in (("low", [0, 1]), ("high", [2, 3]), ("mixed", [3, 0])):
        options = copy.deepcopy(backend().options)
        child = parent.split_group(members, timedelta(seconds=20), options, name, "a split")
        if rank not in members:
            assert child is None
            continue
        assert backend(child) is child._get_backend(torch.device("cuda")), "asked once per device type, the same answer"
        assert child.rank() == sorted(members).index(rank) and child.size() == 2
        tensor = torch.tensor([float(rank)])
        child.allreduce(tensor).wait()
        assert tensor.item() == sum(members)
    assert backend().options.global_ranks_in_group in ([], [0, 1, 2, 3])


def test_6_split_is_called_once_per_device_type() -> None:
    run_ranks(split, 4)


def coalesced(rank: int, world: int) -> None:
    peer = 1 - rank
    group = backend()
    for size in (3, 100_000):
        got, total = torch.zeros(size), torch.ones(size)
        group._start_coalescing()
        group.send([torch.full((size,), float(rank))], peer, 0)
        group.recv([got], peer, 0)
        request = AllreduceOptions()
        request.asyncOp = True
        group.allreduce([total], request)
        work = group._end_coalescing()
        work.wait()
        assert work.is_completed() and work.is_success()
        assert (got == peer).all() and (total == world).all()
        assert len(work.get_future().wait()) == 3
    with _coalescing_manager(device=torch.device("cpu")):
        pass
    group._start_coalescing()
    assert group._end_coalescing().wait()


def test_7_one_work_for_a_coalesced_block() -> None:
    run_ranks(coalesced, 2)


def detail(rank: int, world: int) -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    init(rank, world)
    for i in range(5):
        if rank == 0:
            dist.send(torch.ones(1), 1, tag=i)
        elif rank == 1:
            dist.recv(torch.ones(1), 0, tag=i)
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert (tensor == world).all()
    dist.barrier()


def test_8_messages_do_not_count_as_collectives_under_detail() -> None:
    run_ranks(detail, 3, backend=None, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})


def gradients(rank: int, world: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        output = torch.zeros(5, dtype=dtype)
        dist.reduce_scatter_tensor(output, torch.full((5 * world,), rank + 1.0, dtype=dtype), dist.ReduceOp.AVG)
        assert (output == (world + 1) / 2).all()
        factor = dist._make_nccl_premul_sum(0.5)
        dist.reduce_scatter_tensor(output, torch.full((5 * world,), rank + 1.0, dtype=dtype), factor)
        assert (output == world * (world + 1) / 4).all()


def test_9_avg_and_premul_sum() -> None:
    run_ranks(gradients, 3)


def unset_timeout(rank: int, world: int) -> None:
    """Options carry -1 ms unless the caller says otherwise: the group's own limit holds, and no earlier one."""
    backend()._set_default_timeout(timedelta(seconds=1))
    assert AllreduceOptions().timeout <= timedelta(0)
    if rank == 1:
        time.sleep(0.4)
    dist.all_reduce(torch.ones(3))
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(torch_symm.SymmTimeout):
            dist.all_reduce(torch.ones(3))
        assert 0.9 < time.monotonic() - start < 2.5
    else:
        time.sleep(2)


def test_10_a_timeout_of_minus_one_is_the_groups_own() -> None:
    run_ranks(unset_timeout, 2)


def own_timeout(rank: int, world: int) -> None:
    if rank == 0:
        request = AllreduceOptions()
        request.timeout = timedelta(seconds=0.5)
        start = time.monotonic()
        with pytest.raises(torch_symm.SymmTimeout):
            backend().allreduce([torch.ones(3)], request).wait()
        assert time.monotonic() - start < 2
    else:
        time.sleep(1)


def test_a_call_may_bring_its_own_timeout() -> None:
    run_ranks(own_timeout, 2)


def callback_threads(rank: int, world: int) -> None:
    """Callbacks that call the group again, from whichever thread completes the first call."""
    done = threading.Event()
    total = torch.ones(1000)

    def again(future: torch.futures.Future) -> None:
        dist.all_reduce(total, async_op=True).get_future().add_done_callback(lambda f: done.set())

    dist.all_reduce(total, async_op=True).get_future().add_done_callback(again)
    assert done.wait(20)
    assert (total == world**2).all()


def test_a_callback_may_start_the_next_call() -> None:
    run_ranks(callback_threads, 2)

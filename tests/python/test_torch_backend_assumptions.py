"""Behaviour of torch 2.11 that differs for backends that it does not ship: one test for each."""

from __future__ import annotations

import copy
import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_symm
from ranks import file_store, init, meet, run_ranks
from torch.distributed import distributed_c10d
from torch_symm import _torch_compat
from torch_symm._autoload import devices

CPU = torch.device("cpu")


@contextmanager
def raises_within(limit: float, *types: type[BaseException]) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """``pytest.raises`` with a limit in seconds."""
    started = time.monotonic()
    with pytest.raises(types) as info:
        yield info
    took = time.monotonic() - started
    assert took <= limit, f"raised after {took:.2f} s, more than {limit} s: {info.value}"


def backend_of(group: Any = None) -> Any:
    return (group or dist.group.WORLD)._get_backend(CPU)


def test_last_reference_dies_with_the_gil_held() -> None:
    """The destructor joins threads that complete futures with Python callbacks: it must not hold the GIL meanwhile."""

    def body(rank: int, world: int) -> None:
        called = []
        for turn in range(10):
            init(rank, 2, name=f"turn-{turn}")
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

    run_ranks(body, 2, backend=None)


# proves P22
def test_own_class_with_options() -> None:
    """split_group deep-copies ``options`` and sets timeouts; a bare Backend does not support that."""

    def body(rank: int, world: int) -> None:
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
        with pytest.raises(TypeError, match="pg_options"):
            dist.new_group([0, 1], pg_options=object())

    run_ranks(body, 2, group_timeout=30)


def test_one_instance_for_both_devices() -> None:
    """ "cpu:symm,cuda:symm" creates one backend; without a GPU it does not load CUDA."""

    def body(rank: int, world: int) -> None:
        for name, spelling in enumerate(("symm", "cpu:symm", "cpu:symm,cuda:symm", "SYMM")):
            init(rank, 2, name=str(name), backend=spelling)
            dist.all_reduce(tensor := torch.ones(3))
            assert bool((tensor == 2).all()), spelling
            if spelling in ("symm", "cpu:symm,cuda:symm"):
                group = dist.group.WORLD
                served = {"cpu", "cuda"} if "," in spelling else set(devices())
                assert {device.type for device in group._device_types} == served
                assert all(group._get_backend(CPU) is group._get_backend(torch.device(device)) for device in served)
            dist.destroy_process_group()
        # On a node with GPUs torch loads CUDA itself.
        with open("/proc/self/maps") as maps:
            assert os.path.exists("/dev/nvidia0") or "libcuda.so" not in maps.read()

    run_ranks(body, 2, backend=None)


def test_beside_gloo() -> None:
    """ "cpu:gloo,cuda:symm" leaves CPU tensors to Gloo, and joins without a GPU."""

    def body(rank: int, world: int) -> None:
        init(rank, 2, backend="cpu:gloo,cuda:symm")
        dist.all_reduce(tensor := torch.ones(3))
        assert bool((tensor == 2).all())
        dist.barrier()
        dist.destroy_process_group()

    run_ranks(body, 2, backend=None)


def split_sources(rank: int, world: int) -> None:
    c10d: Any = distributed_c10d
    splits: list[str] = []

    def split(parent: Any) -> None:
        if parent and not isinstance(parent, Nccl):
            raise TypeError("incompatible function arguments")
        splits.extend(["member"] * bool(parent))

    class Nccl(torch_symm.ProcessGroupSymm):
        """Stands in for ``ProcessGroupNCCL``, which needs a GPU."""

        class Options:
            split_from = property(None, lambda self, parent: split(parent))

        def __init__(self, store: Any, rank: int, size: int, options: Any = None) -> None:
            super().__init__(store, rank, size, timedelta(seconds=30), "nccl")

        def perform_nocolor_split(self, device: torch.device) -> None:
            splits.append("other")

    def create(given: Any, options: Any) -> Any:
        split(given.split_from)
        return Nccl(given.store, given.group_rank, given.group_size)

    default: Any = dist.group.WORLD
    source = backend_of()
    default.bound_device_id = torch.device("cuda", 0)

    def get_split_source(pg: Any, *_: Any) -> Any:
        """As in torch before 2.15, which takes the default group's backend whatever the new group's is."""
        return source

    def new(backend: str, *members: int) -> None:
        """As ``dist.new_group``, which would also use the device."""
        place, name = members.index(rank) if rank in members else None, f"{backend} of {len(members)}"
        given = (len(members), place, list(members), c10d.Backend(backend), file_store(name, world), name)
        made, _ = c10d._new_process_group_helper(*given, timeout=timedelta(seconds=30))
        assert made == dist.GroupMember.NON_GROUP_MEMBER if place is None else made.size() == len(members)

    c10d.ProcessGroupNCCL, c10d._get_split_source = Nccl, get_split_source
    if hasattr(c10d, "_register_builtin_nccl_backend"):  # from 2.14 on
        c10d.Backend._plugins["NCCL"] = c10d.Backend._BackendPlugin(create, True)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        new("nccl", 0, 1)
    for _ in range(2):
        _torch_compat.compare_split_sources()
    for backend in ("nccl", "symm", "gloo", "cpu:symm,cuda:nccl"):
        new(backend, 0, 1)
    assert splits == []
    # Now with an NCCL group as the default: its split is a call that all ranks make, or none.
    source = Nccl(file_store("default", world), rank, world)
    c10d._world.pg_map[default] = "cpu:gloo,cuda:nccl", c10d._world.pg_map[default][1]
    for backend in ("symm", "cpu:gloo,cuda:symm"):
        new(backend, 0)
    assert splits == []
    for backend in ("nccl", "cpu:symm,cuda:nccl"):
        new(backend, 0)
    assert splits == ["other" if rank else "member"] * 2


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch was built without NCCL")
def test_only_a_group_of_the_same_backend_is_split_from_the_default_group() -> None:
    run_ranks(split_sources, 2)


def test_registered_for_whole_device_names() -> None:
    """A string for ``devices`` would register 'c', 'p' and 'u'."""

    def body(rank: int, world: int) -> None:
        table = dist.Backend.default_device_backend_map
        assert all(len(device) > 1 for device in table), table
        assert dist.Backend.backend_capability["symm"] == devices()
        assert dist.is_backend_available("symm")
        assert dist.Backend.SYMM == "symm"
        # The import registers the backend a second time, which changes nothing.
        import torch_symm._autoload

        torch_symm._autoload.autoload()
        assert dist.Backend.backend_list.count("symm") == 1

    run_ranks(body, 1, backend=None)


def test_one_work_for_a_coalesced_block() -> None:
    """The Work at the end of a block covers all its operations and keeps their tensors alive."""

    def body(rank: int, world: int) -> None:
        with dist._coalescing_manager(async_ops=True) as manager:
            for turn in range(5):
                dist.all_reduce(torch.full((300_000,), float(turn)))
        manager.wait()
        kept = [torch.full((200_000,), float(turn + rank)) for turn in range(4)]
        with dist._coalescing_manager(device=CPU, async_ops=True) as manager:
            for tensor in kept:
                dist.all_reduce(tensor)
        manager.wait()
        for turn, tensor in enumerate(kept):
            assert bool((tensor == 2 * turn + 1).all())
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

    run_ranks(body, 2)


def test_sequence_numbers_under_detail() -> None:
    """The wrapper compares the sequence numbers of all ranks, so transfers between two of them must not count."""

    def body(rank: int, world: int) -> int:
        for turn in range(3):
            if rank == 0:
                dist.send(torch.ones(3), 1)
            elif rank == 1:
                dist.recv(torch.ones(3), 0)
            dist.all_reduce(torch.ones(turn + 1))
        dist.barrier()
        return 0

    run_ranks(body, 3, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})

    def numbers(rank: int, world: int) -> tuple[int, int]:
        backend = backend_of()
        before = backend.get_sequence_number()
        if rank == 0:
            dist.send(torch.ones(3), 1)
        elif rank == 1:
            dist.recv(torch.ones(3), 0)
        for _ in range(3):
            dist.all_reduce(torch.ones(1))
        return before, backend.get_sequence_number()

    seen = run_ranks(numbers, 3)
    assert len(set(seen)) == 1 and seen[0][1] - seen[0][0] == 3, seen


def test_average_and_factor_of_reduce_scatter() -> None:
    """FSDP2 requests AVG and, with a divide factor, PREMUL_SUM in reduce_scatter_tensor."""

    def body(rank: int, world: int) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            for count in (4, 100_000):
                output = torch.zeros(count, dtype=dtype)
                given = torch.full((3 * count,), float(rank * 3), dtype=dtype)
                dist.reduce_scatter_tensor(output, given, op=dist.ReduceOp.AVG)
                assert bool((output == 3).all())
                dist.reduce_scatter_tensor(output, given, op=dist._make_nccl_premul_sum(0.5))
                assert bool((output == 4.5).all())

    run_ranks(body, 3)


@pytest.mark.timed
def test_timeout_of_a_call_and_of_the_group_later() -> None:
    """The timeout of a call's options, of ``_set_default_timeout`` and of ``pg.set_timeout`` is used."""

    def body(rank: int, world: int) -> None:
        options = dist.AllreduceOptions()
        options.timeout = timedelta(milliseconds=400)
        group = dist.new_group([0, 1])
        if rank == 0:
            with raises_within(0.9, torch_symm.SymmTimeoutError):
                backend_of(group).allreduce([torch.ones(2)], options).wait()
        other = dist.new_group([0, 1])
        backend_of(other)._set_default_timeout(timedelta(milliseconds=400))
        if rank == 0:
            with raises_within(0.9, torch_symm.SymmTimeoutError):
                dist.all_reduce(torch.ones(2), group=other)
        meet("given up", rank, world)
        dist.barrier()

    run_ranks(body, 2)


def detail(rank: int, world: int) -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    init(rank, world)
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, async_op=True).wait()
    assert (tensor == world**2).all()
    if rank == 0:
        dist.send(tensor, 1)
    elif rank == 1:
        dist.recv(tensor, 0)
    gathered = torch.zeros(world)
    dist.all_gather_into_tensor(gathered, torch.tensor([float(rank)]))
    assert gathered.tolist() == [float(r) for r in range(world)]
    dist.barrier(group=dist.new_group())
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    for _ in range(3):
        model(torch.full((2, 4), float(rank))).sum().backward()
    gradient = model.module.weight.grad
    others = [torch.zeros_like(gradient) for _ in range(world)]
    dist.all_gather(others, gradient)
    assert all(torch.equal(other, gradient) for other in others)
    dist.barrier()


def test_distributed_debug_detail() -> None:
    run_ranks(detail, 2, backend=None, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})


def detail_mismatch(rank: int, world: int) -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    init(rank, world, timeout=20)
    with pytest.raises(RuntimeError, match=r"(?i)mismatch|disagree|shape"):
        dist.all_reduce(torch.zeros(3 + rank))


def test_a_mismatch_under_detail() -> None:
    run_ranks(detail_mismatch, 2, backend=None, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})

"""Making, using and leaving groups: subsets, meshes, many at once, spellings, stores, forks, rejections."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_symm
from faults.resource_leaks import beyond, own
from ranks import backend_of, file_store, free_port, init, meet, on_threads, run_ranks, spawn_rank
from torch.distributed.device_mesh import init_device_mesh
from torch_symm import _torch_compat
from torch_symm._autoload import devices

#: Seconds within which threads of ended groups have ended.
ENDED_S = 20.0


def check_group(group: dist.ProcessGroup | None = None) -> None:
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    tensor = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == sum(members)


@pytest.mark.ranks(4)
def test_ranks_that_list_other_members_are_refused(rank: int) -> None:
    if rank in (0, 3):
        with pytest.raises(torch_symm.SymmConfigError) as refused:
            dist.new_group([0, 1] if rank == 0 else [2, 3], timeout=timedelta(seconds=60))
        for word in ("disagree on the members of group", "its rank 0 lists [0, 1]", "its rank 1 [2, 3]"):
            assert word in str(refused.value)
    check_group()


@pytest.mark.ranks(4)
def test_new_group_of_subsets(rank: int) -> None:
    # This group is made first, because torch's name for it contains the number of groups that the rank has.
    check_group(dist.new_group([rank - rank % 2, rank - rank % 2 + 1], use_local_synchronization=True))
    for members in ([0, 1], [3, 1], [2], [1, 2, 3], [3, 2, 1, 0]):
        group = dist.new_group(members)
        if rank not in members:
            assert group == dist.GroupMember.NON_GROUP_MEMBER
            continue
        check_group(group)
        position = dist.get_group_rank(group, rank)
        gathered = torch.zeros(len(members), dtype=torch.int64)
        dist.all_gather_into_tensor(gathered, torch.tensor([rank]), group=group)
        ordered = sorted(members)
        assert gathered.tolist() == ordered and ordered[position] == rank
        root = ordered[-1]
        tensor = torch.tensor([rank])
        dist.broadcast(tensor, src=root, group=group)
        assert tensor.item() == root
        if len(members) > 1:
            if rank == ordered[0]:
                dist.send(torch.tensor([42]), ordered[1], group=group)
            elif rank == ordered[1]:
                dist.recv(tensor, ordered[0], group=group)
                assert tensor.item() == 42
    own, groups = dist.new_subgroups(2)
    check_group(own)
    assert len(groups) == 2
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    for part in (grid["rows"], grid["columns"], grid._flatten()):
        check_group(part.get_group())


@pytest.mark.ranks(3)
def test_groups_that_only_members_make_do_not_change_the_names_of_later_groups(rank: int) -> None:
    pair = dist.new_group([0, 1])
    if rank < 2:
        names = set()
        for _ in range(3):
            node = torch_symm.intra_node_group(pair)
            check_group(node)
            names.add(node.group_name)
            dist.destroy_process_group(node)
        assert len(names) == 3
    check_group(dist.new_group())
    check_group(torch_symm.intra_node_group())


@pytest.mark.ranks(3)
def test_intra_node_group_of_ranks_with_different_numbers_of_groups(rank: int) -> None:
    pair = dist.new_group([0, 1])
    dist.new_group([1])
    for _ in range(2):
        # Ranks 0 and 1 have first made different numbers of groups, then are also members of different numbers.
        if rank != 1:
            dist.new_group([rank], use_local_synchronization=True)
        if rank < 2:
            check_group(node := torch_symm.intra_node_group(pair))
            dist.destroy_process_group(node)
    check_group(torch_symm.intra_node_group())


@pytest.mark.ranks(1, backend=None)
def test_threads_that_make_groups_at_the_same_time_give_each_its_name() -> None:
    """Other threads name their groups as usual meanwhile."""
    names: dict[int, str] = {}
    others: list[str] = []
    both, first = threading.Barrier(2, timeout=20), threading.Event()

    def named(ranks: list[int]) -> str:
        return dist.distributed_c10d._process_group_name(ranks, True)

    def name(ranks: list[int], **_: object) -> None:
        both.wait()
        if ranks[0] == 5:
            assert first.wait(20)
        on_threads([lambda: others.append(named(ranks))])
        names[ranks[0]] = named(ranks)
        first.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_torch_compat, "new_group", name)
        number = _torch_compat.next_number()
        on_threads([partial(_torch_compat.new_group_among, [lowest, 9], [number]) for lowest in (3, 5)])
        usual = dist.distributed_c10d._process_group_name
        both, number = threading.Barrier(1), number + 1
        _torch_compat.new_group_among([7, 9], [number])
    assert names == {3: f"symm_3_{number - 1}", 5: f"symm_5_{number - 1}", 7: f"symm_7_{number}"}
    assert dist.distributed_c10d._process_group_name is usual
    assert len(others) == 3 and not any(name.startswith("symm") for name in (*others, named([7, 9])))


def test_threads_that_make_backends_at_the_same_time_restore_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """As two threads would enter and leave the context, but in an order that is certain."""
    set_before, unset = "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.setenv(set_before, "1")
    monkeypatch.delenv(unset, raising=False)
    for first_leaves_first in (True, False):
        one, other = _torch_compat._unwatched(), _torch_compat._unwatched()
        one.__enter__()
        other.__enter__()
        leaving = (one, other) if first_leaves_first else (other, one)
        leaving[0].__exit__(None, None, None)
        assert os.environ[set_before] == os.environ[unset] == "0"
        leaving[1].__exit__(None, None, None)
        assert os.environ[set_before] == "1" and unset not in os.environ


@pytest.mark.ranks(2, group_timeout=40)
def test_an_intra_node_group_has_the_timeout_of_the_whole_group() -> None:
    groups = [dist.new_group(backend=backend, timeout=timedelta(seconds=50)) for backend in ("symm", "gloo")]
    for group, seconds in zip((None, *groups), (40, 50, 50), strict=True):
        assert backend_of(torch_symm.intra_node_group(group)).options._timeout == timedelta(seconds=seconds)


@pytest.mark.ranks(2)
def test_shrink_group_says_what_serves_instead(rank: int) -> None:
    with (
        pytest.raises(TypeError, match="does not support shrinking"),
        pytest.warns(torch_symm.SymmWarning, match=r"symm does not serve shrink_group\. .*dist\.new_group\(ranks\)"),
    ):
        dist.shrink_group([1 - rank])
    check_group()


@pytest.mark.ranks(2)
def test_a_split_does_not_change_the_options_of_its_parent(rank: int) -> None:
    """torch before 2.14 writes the child's name, timeout and description to the options that the parent returns."""
    for parent in (dist.group.WORLD, dist.new_group(timeout=timedelta(seconds=9))):
        options = backend_of(parent).options
        before = (options.group_name, options._timeout)
        child = parent.split_group([0, 1], timeout=timedelta(seconds=7), group_name=f"child of {before[0]}")
        assert backend_of(child).options.group_name == f"child of {before[0]}"
        assert backend_of(child).options._timeout == timedelta(seconds=7)
        options = backend_of(parent).options
        assert (options.group_name, options._timeout) == before
        check_group(parent)
        check_group()


# proves P17
@pytest.mark.ranks(2)
def test_split_groups_end_with_their_last_reference(rank: int) -> None:
    for lasting in (True, False):
        if lasting:
            before = own()
        for i in range(20):
            child = dist.group.WORLD.split_group([0, 1], group_name=f"{lasting} {i}")
            child.allreduce([tensor := torch.ones(3)]).wait()
            assert tensor[0] == 2
            if i % 2 == 0:
                child.shutdown()
            del child
    assert not beyond(before, ENDED_S)


# proves P11
@pytest.mark.ranks(2, backend=None)
def test_default_groups_one_after_another(rank: int, world_size: int) -> None:
    for i in range(30):
        init(rank, world_size, name=str(i))
        check_group()
        dist.destroy_process_group()
        if i == 4:
            before = own()
    assert not beyond(before, ENDED_S)


def spelled(rank: int, world: int) -> None:
    check_group()
    dist.barrier()
    backend, spelling, group = backend_of(), dist.get_backend_config(), dist.group.WORLD
    # On a node with GPUs torch itself loads libcuda.so.
    assert os.path.exists("/dev/nvidia0") or "libcuda.so" not in Path("/proc/self/maps").read_text()
    if spelling == "cpu:gloo,cuda:symm":
        assert backend.name() == "gloo"
        return
    assert isinstance(backend, torch_symm.ProcessGroupSymm) and backend.name() == "symm"
    check_group(dist.new_group())
    if spelling != "cpu:symm,cuda:nccl":
        served = {"cpu"} if spelling == "cpu:symm" else {"cpu", "cuda"} if "," in spelling else set(devices())
        assert {device.type for device in group._device_types} == served
        assert all(group._get_backend(torch.device(device)) is backend for device in served), "one serves all"


@pytest.mark.parametrize(
    "backend", ("symm", "SYMM", "cpu:symm", "cpu:symm,cuda:symm", "cpu:symm,cuda:nccl", "cpu:gloo,cuda:symm")
)
def test_spellings(backend: str) -> None:
    if "nccl" in backend and not torch.cuda.is_available():
        pytest.skip("torch makes an NCCL group only where there is a GPU")
    run_ranks(spelled, 2, backend=backend)


@pytest.mark.ranks(2, backend="gloo")
def test_a_symm_group_in_a_gloo_job() -> None:
    group = dist.new_group(backend="symm")
    assert dist.get_backend(group) == "symm"
    check_group(group)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.mark.ranks(3, backend=None)
def test_stores(rank: int, world_size: int, port: int) -> None:
    """``test_rendezvous_processes.py`` has the stores of this package."""
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, timedelta(seconds=20), wait_for_workers=False)
    dist.init_process_group("symm", store=store, rank=rank, world_size=world_size)
    check_group()
    check_group(dist.new_group())
    dist.barrier()
    keys = store.num_keys()
    for _ in range(10):
        dist.destroy_process_group(dist.new_group())
    dist.barrier()
    # torch's own keys grow by a few for each group; ours are removed.
    assert store.num_keys() <= keys + 10 * 4, store.list_keys()
    dist.barrier()


def of_one_hash_store() -> Callable[[], dist.Store]:
    store = dist.HashStore()
    return lambda: store


@pytest.mark.parametrize("make", [of_one_hash_store, lambda: torch_symm.MemoryStore().clone], ids=["hash", "memory"])
@pytest.mark.ranks(1, backend=None)
def test_ranks_as_threads(make: Callable[[], Callable[[], dist.Store]]) -> None:
    """A store that is local to one process serves ranks that are threads, which use the backend's own class."""
    store = make()
    sums: list[float] = []

    def body(member: int) -> None:
        options = torch_symm.Options(timeout=timedelta(seconds=20), group_name="threads")
        group = torch_symm.ProcessGroupSymm(store(), member, 3, options)
        tensor = torch.tensor([float(member)])
        group.allreduce([tensor]).wait()
        sums.append(tensor.item())
        big = torch.full((300_000,), float(member))
        group.allreduce([big]).wait()
        assert (big == 3).all()
        group.shutdown()

    on_threads([partial(body, member) for member in range(3)])
    assert sums == [3.0] * 3


def in_child(rank: int, world: int, children: int) -> None:
    for call in (
        lambda: dist.all_reduce(torch.ones(1)),
        lambda: dist.all_reduce(torch.ones(1), async_op=True),
        lambda: dist.barrier(),
        lambda: dist.send(torch.ones(1), 1 - rank),
        lambda: dist.recv(torch.ones(1), 1 - rank),
    ):
        with pytest.raises(torch_symm.SymmConfigError, match="fork"):
            call()
    dist.destroy_process_group()
    init(rank, world, name=f"children-{children}")
    check_group()
    dist.destroy_process_group()


# proves P14
@pytest.mark.ranks(2)
def test_a_forked_child_may_not_use_its_parents_group(rank: int, world_size: int) -> None:
    check_group()
    dist.all_reduce(torch.ones(10), async_op=True).wait()
    pid = spawn_rank(in_child, rank, world_size, 1)
    check_group()
    assert os.waitpid(pid, 0)[1] == 0, "the child's traceback is in the log"
    # A child that never uses the group, and exits.
    pid = spawn_rank(lambda *_: gc.collect(), rank, world_size)
    os.waitpid(pid, 0)
    check_group()
    dist.barrier()


@pytest.mark.parametrize("how", ("file", "torch", "symm"))
@pytest.mark.ranks(3, backend=None)
def test_p15_a_rank_of_a_group_that_lives_is_refused_to_others(rank: int, world_size: int, how: str, port: int) -> None:
    """A third process claims to be rank 1 of a formed group. The others then form another group in another order."""
    late = rank == world_size - 1

    def join(number: int) -> None:
        ways = {
            "file": lambda: {"store": file_store("late", 2)},
            "torch": lambda: {"store": dist.TCPStore("127.0.0.1", port, None, rank == 0, wait_for_workers=False)},
            "symm": lambda: {"init_method": f"symm://127.0.0.1:{port}"},
        }
        dist.init_process_group("symm", rank=number, world_size=2, timeout=timedelta(seconds=20), **ways[how]())

    if not late:
        join(rank)
    meet("formed", rank, world_size)
    if late:
        begun = time.monotonic()
        with pytest.raises(
            torch_symm.SymmConfigError, match=rf"rank 1 of .*claimed twice: by pid \d+ and by pid {os.getpid()}$"
        ):
            join(1)
        assert time.monotonic() - begun < 10
    meet("refused", rank, world_size)
    if not late:
        check_group()
        dist.destroy_process_group()
        if how == "file":
            join(1 - rank)
            check_group()


def outside_the_world(_rank: int, _world: int) -> None:
    options = torch_symm.Options(timeout=timedelta(seconds=2))
    for place, size in ((1, 1), (5, 2), (-1, 2), (0, 0), (0, -1)):
        start = time.monotonic()
        with pytest.raises((torch_symm.SymmConfigError, ValueError), match=str(place if size > 0 else size)):
            torch_symm.ProcessGroupSymm(dist.HashStore(), place, size, options)
        assert time.monotonic() - start < 1


# `--reruns` does not repeat tests with the mark for ranks, so this test starts its ranks itself.
# proves P15
@pytest.mark.timed
def test_a_rank_outside_the_world_is_refused() -> None:
    run_ranks(outside_the_world, 1, backend=None)


@pytest.mark.parametrize("timeout", [timedelta(seconds=5), 5, 5.0])
def test_timeouts_are_timedeltas_or_seconds(timeout: timedelta | float) -> None:
    assert torch_symm.Options(timeout=timeout).timeout == timedelta(seconds=5)
    options = torch_symm.Options()
    options.timeout = timeout
    assert options.timeout == options._timeout == timedelta(seconds=5)
    assert torch_symm.Options(0.0125).timeout == timedelta(milliseconds=13)


@pytest.mark.ranks(2)
def test_options_for_something_else_keep_the_timeout_that_torch_was_given() -> None:
    minute, own = timedelta(seconds=60), timedelta(seconds=50)
    for timeout, wanted in ((None, minute), (timedelta(minutes=30), minute), (own, own)):
        options = torch_symm.Options(order="tree") if timeout is None else torch_symm.Options(timeout, order="tree")
        group = dist.new_group(timeout=minute, pg_options=options)
        assert backend_of(group).options._timeout == wanted, timeout
    group = dist.new_group(pg_options=torch_symm.Options(order="tree"))
    assert backend_of(group).options._timeout == timedelta(minutes=30)


NOT_POSITIVE = (-1, 0, -0.5, timedelta(0), timedelta(seconds=-5))


@pytest.mark.parametrize("timeout", [*NOT_POSITIVE, 1e300, float("inf"), float("nan"), "5"])
def test_other_timeouts_are_refused(timeout: float | timedelta) -> None:
    error, says = (TypeError, None) if timeout == "5" else (ValueError, "timeout must be more than 0")
    with pytest.raises(error, match=says):
        torch_symm.Options(timeout=timeout)


WRONG_CHOICES = (
    ("reduce_dtype", "fp32", 'reduce_dtype="fp32" is not one of "tensor", "float32"'),
    ("order", "ring", 'order="ring" is not one of "rank", "tree"'),
    ("cta_policy", "fast", 'cta_policy="fast" is not one of "default", "efficiency", "zero"'),
    ("max_ctas", -1, "max_ctas=-1 is negative; 0 means no limit"),
)


def test_choices_are_checked_when_they_are_set_and_survive_copies_and_pickle() -> None:
    options: Any = torch_symm.Options(5, "g", [1, 3], "gloo", "float32", "tree", "zero", 8)
    if hasattr(options, "enable_reconfigure"):
        options.enable_reconfigure = True
    for name, value, says in WRONG_CHOICES:
        with pytest.raises(ValueError, match=says):
            torch_symm.Options(**{name: value})
        with pytest.raises(ValueError, match=says):
            setattr(options, name, value)
    for same in (options, copy.copy(options), copy.deepcopy(options), pickle.loads(pickle.dumps(options))):
        assert repr(same) == (
            "torch_symm.Options(timeout=5, group_name='g', inter_node_backend='gloo', reduce_dtype='float32', "
            "order='tree', cta_policy='zero', max_ctas=8)"
        )
        assert same.global_ranks_in_group == [1, 3] and getattr(same, "enable_reconfigure", True)

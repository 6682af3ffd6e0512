"""symm in place of Gloo: what programs that request Gloo by name get, and when Gloo itself is used."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_symm
from ranks import file_store, init, meet, run_ranks
from sandbox import deny, mask, needs_seccomp
from torch.nn.parallel import DistributedDataParallel
from torch_symm import _native, testing

CPU = torch.device("cpu")


def served_by(group: dist.ProcessGroup | None = None) -> str:
    backend = (group or dist.group.WORLD)._get_backend(CPU)
    # Clients that know Gloo use this check.
    assert isinstance(backend, dist.ProcessGroupGloo)
    return "symm" if isinstance(backend, torch_symm.ProcessGroupSymm) else "gloo"


def sums(group: dist.ProcessGroup | None = None) -> None:
    """Every rank's number, summed by a group of all ranks."""
    world = dist.get_world_size()
    tensor = torch.full((1000,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor, group=group)
    assert (tensor == world * (world + 1) / 2).all()


def left_in(store: dist.Store) -> list[str]:
    """The keys of making groups; all ranks have returned from it. Gloo's keys and memberships stay."""
    found = [key for key in store.list_keys() if "symm/replaces" in key]
    return [key for key in found if not key.endswith("/membership") and "/gloo/" not in key]


def looks_like_gloo(rank: int, world: int) -> None:
    """Clients reach devices and options through the backend and through its class."""
    backend = dist.group.WORLD._get_backend(CPU)
    named = (name for name in dir(torch._C._distributed_c10d.ProcessGroupGloo) if name != "mem_allocator")
    assert [name for name in named if not hasattr(backend, name)] == []
    for holder in (backend, type(backend)):
        assert isinstance(holder.create_device(interface="lo"), dist.ProcessGroupGloo.Device)
        assert holder.create_default_device(lazy_init=True) is not None
        options = holder._Options()
        options._devices = [holder.create_device(hostname="127.0.0.1")]
    store = dist.PrefixStore("own", file_store("own", world))
    options._timeout = timedelta(seconds=20)
    own = dist.ProcessGroupGloo(store, rank, world, options)
    own.allreduce([one := torch.ones(2)]).wait()
    assert (one == world).all()


def as_gloo(rank: int, world: int) -> None:
    torch_symm.replace_gloo()
    torch_symm.replace_gloo()
    # If no backend is named, symm serves CPU tensors.
    dist.init_process_group(store=file_store("unnamed", world), rank=rank, world_size=world)
    assert served_by() == "symm"
    sums()
    dist.destroy_process_group()
    for turn in range(2):
        init(rank, world, "gloo", name="again")
        assert dist.get_backend() == "gloo" and served_by() == "symm"
        sums()
        # Only Gloo serves several tensors in a call. The rank that joins it first must not find old addresses.
        if turn == 1 and rank == 1:
            time.sleep(0.5)
        dist.group.WORLD._get_backend(CPU).allreduce([torch.ones(3), torch.ones(3)]).wait()
        assert left_in(file_store("again", world)) == []
        dist.monitored_barrier(timeout=timedelta(seconds=20), wait_all_ranks=True)
        if turn == 0:
            dist.destroy_process_group()
    pair = dist.new_group([0, 1], backend="gloo")
    assert rank > 1 or served_by(pair) == "symm"
    everyone = dist.new_group(timeout=timedelta(seconds=20))
    assert everyone._get_backend(CPU).options.timeout == timedelta(seconds=20)
    assert "timeout 20 s" in torch_symm.describe(everyone)
    options = torch_symm.Options(order="rank")
    with_options = dist.new_group(timeout=timedelta(seconds=20), pg_options=options)
    assert with_options._get_backend(CPU).options.timeout == timedelta(seconds=20)
    assert served_by(everyone) == "symm" and dist.get_backend(everyone) == "gloo"
    sums(everyone)
    mixed = dist.new_group(backend="cpu:gloo,cuda:symm")
    assert served_by(mixed) == "symm"
    sums(mixed)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=30), everyone)
    assert everyone._get_backend(CPU).options.timeout == timedelta(seconds=30)
    mesh = dist.init_device_mesh("cpu", (world,))
    assert served_by(mesh.get_group()) == "symm"
    torch.manual_seed(rank)
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    model(torch.ones(3, 4) * rank).sum().backward()
    assert (model.module.weight.grad == sum(range(world)) * 3 / world).all()
    # The name is "gloo", and not "custom", torch's name for the groups of plug-ins.
    assert model._get_ddp_logging_data()["backend_name"] == "gloo"
    looks_like_gloo(rank, world)


def test_a_group_of_gloo_is_symm() -> None:
    run_ranks(as_gloo, 3, backend=None)


def late_twice(rank: int, world: int) -> float:
    torch_symm.replace_gloo()
    native = _native.load()
    substitute, started = native._GlooSubstitute, time.monotonic()

    def never(*_: Any) -> Any:
        meet("ended", rank, world)
        raise RuntimeError("too late")

    if rank == 1:
        native._GlooSubstitute = never
        time.sleep(3)
    with pytest.raises(RuntimeError):
        init(rank, world, "gloo", timeout=4)
    seconds = time.monotonic() - started
    native._GlooSubstitute = substitute
    if rank == 0:
        meet("ended", rank, world)
    return seconds


@pytest.mark.timed
def test_the_exchange_and_the_joining_have_one_deadline() -> None:
    seconds, _ = run_ranks(late_twice, 2, backend=None)
    assert 4 <= seconds < 6


def after_a_failure(rank: int, world: int) -> None:
    torch_symm.replace_gloo()
    native = _native.load()
    substitute = native._GlooSubstitute

    def fails(*_: Any) -> Any:
        raise RuntimeError("no memory")

    native._GlooSubstitute = fails if rank == 1 else substitute
    with pytest.raises(RuntimeError):
        init(rank, world, "gloo", timeout=4)
    # Without an open store, the file would go with the groups.
    store = file_store("default", world)
    meet("failed", rank, world)
    assert left_in(store) != []
    meet("seen", rank, world)
    native._GlooSubstitute = substitute
    for _ in range(10):
        init(rank, world, "gloo")
        # The ranks meet again while one of them may still remove the keys of the last meeting.
        dist.destroy_process_group()
    meet("left", rank, world)
    assert left_in(store) == []


def test_a_group_can_be_made_again_after_a_failure_and_leaves_no_keys() -> None:
    run_ranks(after_a_failure, 3, backend=None)


def after_one_gave_up(rank: int, world: int, joining: bool) -> None:
    torch_symm.replace_gloo()
    native = _native.load()
    substitute = native._GlooSubstitute

    def fails_late(*args: Any) -> Any:
        substitute(*args)
        meet("gave up", rank, world)
        raise RuntimeError("too late")

    if rank == 0 or joining:
        if rank == 1:
            native._GlooSubstitute = fails_late
        with pytest.raises(dist.DistStoreError if rank == 0 else RuntimeError):
            init(rank, world, "gloo", timeout=3)
        native._GlooSubstitute = substitute
    if rank == 0 or not joining:
        meet("gave up", rank, world)
    init(rank, world, "gloo", timeout=20)
    assert served_by() == "symm"
    sums()
    store = file_store("default", world)
    meet("checked", rank, world)
    assert left_in(store) == []


@pytest.mark.parametrize("joining", [False, True], ids=["before the others started", "while another joined"])
def test_a_rank_that_gave_up_alone_can_make_the_group_again(joining: bool) -> None:
    run_ranks(after_one_gave_up, 2, joining, backend=None)


def on_two_nodes(rank: int, world: int, nodes: str) -> str:
    os.environ.update(SYMM_TEST_NODE=str(rank), SYMM_INTER_NODE_BACKEND=nodes, SYMM_LOG="info")
    torch_symm.replace_gloo()
    init(rank, world, "gloo")
    sums()
    sums(dist.new_group(backend="gloo"))
    return served_by()


@pytest.mark.parametrize(("nodes", "expected"), [("none", "gloo"), ("gloo", "symm")])
def test_nodes_that_symm_does_not_connect_are_gloos(nodes: str, expected: str) -> None:
    results = run_ranks(on_two_nodes, 2, nodes, backend=None)
    assert list(results) == [expected] * 2
    for log in results.logs:
        if expected == "symm":
            assert log.count("symm serves the CPU tensors of groups of gloo") == 1
        else:
            assert "Gloo serves group" in log and "run on different nodes" in log


def without_native_part(rank: int, world: int) -> str:
    torch_symm.replace_gloo()
    store = file_store("default", world)
    if rank == 1:

        def load() -> Any:
            raise ImportError("no native part here")

        _native.load = load
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    sums()
    return type(dist.group.WORLD._get_backend(CPU)).__name__


def test_one_rank_that_symm_cannot_serve_moves_all_to_gloo() -> None:
    assert set(run_ranks(without_native_part, 3, backend=None)) == {"ProcessGroupGloo"}


def one_replaces(rank: int, world: int) -> None:
    if rank == 0:
        torch_symm.replace_gloo()
        with pytest.raises(dist.DistStoreError, match=r"waits for rank 1, which .* lack SYMM_REPLACE_GLOO=1"):
            init(rank, world, "gloo", timeout=4)
        meet("refused", rank, 1)
    else:
        with pytest.raises(RuntimeError):
            init(rank, world, "gloo", timeout=4)


def test_ranks_that_do_not_all_replace_are_told() -> None:
    run_ranks(one_replaces, 2, backend=None, timeout=30)


def beside_gloo(rank: int, world: int) -> None:
    torch_symm.replace_gloo()
    if rank == 0:
        # One rank that might have a GPU is enough.
        dist.Backend.backend_capability["symm"] = ["cpu", "cuda"]
    init(rank, world, "gloo")
    assert served_by() == "symm"
    sums()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=30))
    # Tensors that are not on the CPU use Gloo, which does not support this device.
    with pytest.raises(RuntimeError, match="ProcessGroupGloo::allreduce"):
        dist.group.WORLD._get_backend(CPU).allreduce([torch.empty(3, device="meta")])
    work = dist.all_gather_into_tensor(torch.empty(world), torch.tensor([float(rank)]), async_op=True)
    work.wait()
    if rank == 0:
        dist.send(torch.ones(3), 1, tag=4)
    else:
        dist.recv(torch.empty(3), 0, tag=4)


def test_gloo_stands_beside_where_a_rank_may_have_a_gpu() -> None:
    run_ranks(beside_gloo, 2, backend=None)


#: Types that are only moved; torch has no arithmetic operators for most of them.
OPAQUE = ("float8_e8m0fnu", "float4_e2m1fn_x2", "bits8", "bits16", "uint4", "int7")


def what_only_gloo_took(rank: int, world: int, replaced: bool) -> list[list[int]]:
    """The calls that a group of symm once rejected, now on a group named gloo; returns the bytes of the results."""
    if replaced:
        torch_symm.replace_gloo()
    init(rank, world, "gloo")
    assert served_by() == ("symm" if replaced else "gloo")
    backend = dist.group.WORLD._get_backend(CPU)
    results: list[torch.Tensor] = []
    for name in OPAQUE:
        mine = torch.arange(8, dtype=torch.uint8).add(rank).view(getattr(torch, name))
        theirs = torch.zeros(8, dtype=torch.uint8).view(getattr(torch, name))
        ops = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, theirs, 1 - rank)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        results.append(theirs)
    pairs = torch.view_as_complex(torch.arange(12.0).view(6, 2).half()) * (rank + 1)
    dist.reduce(summed := pairs.clone(), 0)
    results += [summed] if rank == 0 else []
    dist.reduce_scatter(part := torch.empty_like(pairs), [pairs, pairs * 2])
    results.append(part)
    # Several tensors in one call, before and after other calls and while another call is in progress.
    one, other = torch.full((5,), 1.0 + rank), torch.full((5,), 10.0 * rank)
    under_way = dist.all_reduce(torch.ones(1 << 16), async_op=True)
    for _ in range(2):
        backend.allreduce([one, other]).wait()
        dist.all_reduce(one)
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 1, 1
    backend.broadcast([first := torch.full((3,), 7.0 + rank), second := torch.full((3,), 4.0 + rank)], options).wait()
    gathered = [[torch.empty(5) for _ in range(2 * world)] for _ in range(2)]
    backend.allgather(gathered, [one, other]).wait()
    under_way.wait()
    results += [one, other, first, second, *gathered[0], *gathered[1]]
    dist.barrier()
    dist.destroy_process_group()
    return [result.view(torch.uint8).tolist() for result in results]


def test_what_symm_refuses_is_as_with_gloo() -> None:
    replaced, plain = (run_ranks(what_only_gloo_took, 2, replaced, backend=None) for replaced in (True, False))
    assert replaced == plain
    assert replaced[0][0] == list(range(1, 9))


def refused_by_both(rank: int, world: int) -> None:
    torch_symm.replace_gloo()
    init(rank, world, "gloo")
    backend = dist.group.WORLD._get_backend(CPU)
    one, wide = torch.ones(3), torch.ones(3, dtype=torch.float64)
    for tensors in ([one, wide], [one, torch.ones(4)], [one, torch.eye(3).to_sparse()]):
        # Programs written for Gloo catch a RuntimeError, those for symm a ValueError or TypeError.
        for kind in (ValueError, RuntimeError):
            with pytest.raises(kind, match="ProcessGroupSymm::allreduce"):
                backend.allreduce(tensors)
    refused: list[tuple[Any, Callable[[], object]]] = [
        (ValueError, lambda: dist.all_gather_into_tensor(torch.ones(5), one)),
        (ValueError, lambda: dist.all_reduce(torch.ones(1).expand(4), async_op=True)),
        (ValueError, lambda: dist.send(one, 1 - rank, tag=-1)),
        (TypeError, lambda: backend._allgather_base(torch.ones(6), wide)),
    ]
    for own, call in refused:
        for kind in (own, RuntimeError):
            with pytest.raises(kind) as caught:
                call()
            assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args
    with pytest.raises(NotImplementedError, match="PRODUCT is not defined for complex32; use SUM"):
        dist.reduce(torch.zeros(3, dtype=torch.complex32), 0, dist.ReduceOp.PRODUCT)
    with pytest.raises(NotImplementedError, match="float8_e8m0fnu is not served"):
        options = dist.AllreduceOptions()
        backend.allreduce([torch.zeros(3, dtype=torch.uint8).view(torch.float8_e8m0fnu)], options)
    sums()
    try:
        split = dist.split_group(split_ranks=[list(range(world))])
    except RuntimeError as error:
        # torch 2.11 and 2.12 refuse to split any group without a GPU.
        assert "No device associated" in str(error)
        split = None
    if split is not None:
        backend = split._get_backend(CPU)
        backend.allreduce([one, other := torch.ones(3)]).wait()
        assert (other == 2 * world).all()


def test_what_both_refuse_raises_as_before() -> None:
    run_ranks(refused_by_both, 2, backend=None)


def one_calls_with_several(rank: int, world: int) -> None:
    torch_symm.replace_gloo()
    init(rank, world, "gloo", timeout=4)
    backend = dist.group.WORLD._get_backend(CPU)
    with pytest.raises(RuntimeError):
        if rank == 0:
            backend.allreduce([torch.ones(3), torch.ones(3)]).wait()
        else:
            backend.allreduce([torch.ones(3)]).wait()
    meet("failed", rank, world)


def test_ranks_that_disagree_whose_call_it_is_end_at_the_timeout() -> None:
    run_ranks(one_calls_with_several, 2, backend=None, timeout=30)


def one_ends_while_it_joins_gloo(rank: int, world: int, end: str) -> None:
    torch_symm.replace_gloo()
    init(rank, world, "gloo", timeout=600)
    backend = dist.group.WORLD._get_backend(CPU)
    if rank == 0:
        ending = threading.Timer(0.5, getattr(backend, end))
        ending.start()
        with pytest.raises(RuntimeError, match=r"the group ended|aborted group"):
            backend.allreduce([torch.ones(3), torch.ones(3)]).wait()
        ending.join()
    meet("ended", rank, world)


@pytest.mark.parametrize("end", ["abort", "shutdown"])
def test_a_group_that_ends_while_it_joins_gloo_does_not_wait_for_the_others(end: str) -> None:
    run_ranks(partial(one_ends_while_it_joins_gloo, end=end), 2, backend=None, timeout=60)


def made_by_hand(rank: int, world: int) -> None:
    store = dist.PrefixStore("by hand", file_store("hand", world))
    group = dist.ProcessGroup(store, rank, world)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    backend = torch_symm.ProcessGroupSymm(store, rank, world, timeout=timedelta(seconds=20))
    backend._set_sequence_number_for_group()
    group._register_backend(CPU, dist.ProcessGroup.BackendType.CUSTOM, backend)
    tensor = torch.tensor([rank + 1.0])
    group.allreduce([tensor]).wait()
    assert tensor.item() == world * (world + 1) / 2
    assert backend.options.timeout == timedelta(seconds=20)
    # A number of seconds as a positional argument, as in ProcessGroupGloo, and a name for messages.
    other = torch_symm.ProcessGroupSymm(dist.PrefixStore("other", store), rank, world, 12.5)
    assert other.options.timeout == timedelta(seconds=12.5)
    named = torch_symm.ProcessGroupSymm(dist.PrefixStore("named", store), rank, world, group_name="replicas")
    assert named.options.group_name == "replicas" and named.options.timeout == timedelta(minutes=30)
    for made in (named, other, backend):
        made.shutdown()


def test_a_group_made_by_hand() -> None:
    run_ranks(made_by_hand, 2, backend=None)
    with pytest.raises(ValueError, match="timeout must be more than 0"):
        torch_symm.ProcessGroupSymm(dist.HashStore(), 0, 1, timeout=-1)


#: System calls that a container may deny, the errno, the ranks, symm's message, and whether Gloo works without the
#: call.
DENIED: list[tuple[str, int, tuple[int, ...], str, bool]] = [
    ("getrandom", errno.ENOSYS, (0, 1), "getrandom failed, for random names: Function not", True),
    ("memfd_create", errno.EPERM, (0,), "memfd_create failed, for shared memory: Operation not", True),
    ("ftruncate", errno.EACCES, (0,), "ftruncate failed, for the size of shared memory: Permission", True),
    ("fallocate", errno.EOPNOTSUPP, (0,), "fallocate failed, for pages of shared memory: Operation", True),
    ("pidfd_open", errno.ENOSYS, (0, 1), "pidfd_open failed, for watching a peer's process: Function", True),
    ("pidfd_open", errno.EPERM, (1,), "pidfd_open failed, for watching a peer's process: Operation", True),
    ("eventfd2", errno.EPERM, (0, 1), "eventfd2 failed, for waking its threads: Operation not", True),
    ("eventfd2", errno.EPERM, (1,), "eventfd2 failed, for waking its threads: Operation not", True),
    ("sendmsg", errno.EPERM, (0,), "sendmsg failed, for a descriptor for a peer: Operation not", True),
    ("sendmsg", errno.EPERM, (1,), "sendmsg failed, for a descriptor for a peer: Operation not", True),
    ("accept4", errno.EPERM, (0,), "accept4 failed, for the connection of a peer: Operation not", True),
    ("recvmsg", errno.EPERM, (0,), "recvmsg failed, for a descriptor from a peer: Operation not", False),
    ("recvmsg", errno.EPERM, (1,), "recvmsg failed, for a descriptor from a peer: Operation not", False),
    ("getsockopt", errno.EPERM, (0,), "getsockopt failed, for the identity of a peer: Operation not", False),
    ("getsockopt", errno.EPERM, (1,), "getsockopt failed, for the identity of a peer: Operation not", False),
    ("listen", errno.EPERM, (0,), "socket, bind or listen failed, for a Unix socket for its peers", False),
]


def limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


def forbidden(rank: int, world: int, forbid: Callable[[], None], ranks: tuple[int, ...], text: str, gloo: bool) -> None:
    def make(backend: str) -> None:
        # Uses torch's store, because this test is not about stores of symm.
        store = dist.FileStore(str(testing.shared_tmp_path() / backend), world)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=30))

    if rank in ranks:
        forbid()
    began = time.monotonic()
    with pytest.raises(torch_symm.SymmConfigError, match=r'join group "default" of 2 ranks') as caught:
        make("symm")
    # The other rank raises the cause, without waiting until its timeout of 30 s.
    assert time.monotonic() - began < 15
    message = str(caught.value)
    assert text in message and "out of memory" not in message, message
    assert any(f"rank {rank} (pid " in message for rank in ranks), message
    # A rank that exits before the others start to join looks like one that never started.
    meet("refused", rank, world)
    if gloo:
        torch_symm.replace_gloo()
        make("gloo")
        assert served_by() == "gloo"
        sums()


@needs_seccomp
def test_what_a_machine_forbids_is_named_on_all_ranks_and_gloo_serves() -> None:
    for call, code, ranks, text, gloo in DENIED:
        run_ranks(forbidden, 2, partial(deny, call, code), ranks, text, gloo, backend=None)
    run_ranks(forbidden, 2, limit_files, (0, 1), "RLIMIT_FSIZE is 1048576 and limits", True, backend=None)
    if os.geteuid() == 0:
        text = "/proc/sys/kernel/random/boot_id cannot be read: No such file"
        run_ranks(forbidden, 2, partial(mask, "/proc/sys"), (0, 1), text, True, backend=None)

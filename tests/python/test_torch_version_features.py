"""Backend features of torch versions after the oldest supported one. A test skips if torch lacks its feature."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_symm
from ranks import file_store, meet, run_ranks

WORLD = 3


def needs(name: str, owner: Any = dist) -> pytest.MarkDecorator:
    """Skips a test if ``owner`` has no attribute of that name."""
    return pytest.mark.skipif(not hasattr(owner, name), reason=f"torch {torch.__version__} has no {name}")


def single_collectives(rank: int, world: int) -> None:
    parts = torch.arange(4.0) + 10 * rank
    everything = torch.cat([torch.arange(4.0) + 10 * other for other in range(world)])
    for work in (False, True):
        gathered = torch.empty(4 * world)
        done = dist.all_gather_single(gathered, parts, async_op=work)
        if work:
            done.wait()
        assert torch.equal(gathered, everything)
        mine = torch.empty(4)
        done = dist.reduce_scatter_single(mine, everything, async_op=work)
        if work:
            done.wait()
        assert torch.equal(mine, world * (torch.arange(4.0) + 10 * rank))
    refused = torch.empty(4 * world + 1)
    with pytest.raises(ValueError, match="must be equal to world_size times"):
        dist.all_gather_single(refused, parts)


@needs("all_gather_single")
def test_the_canonical_names_of_collectives_on_one_tensor() -> None:
    run_ranks(single_collectives, WORLD)


def gathered_at_root(rank: int, world: int) -> None:
    for root in range(world):
        for work in (False, True):
            # A tensor that is not contiguous, and a stack of such tensors.
            mine = (torch.arange(6) + 10 * rank).reshape(2, 3).t()
            target = torch.empty(world, 3, 2, dtype=torch.int64) if rank == root else None
            done = dist.gather_single(mine, target, dst=root, async_op=work)
            if work:
                done.wait()
            if target is not None:
                assert torch.equal(
                    target, torch.stack([(torch.arange(6) + 10 * r).reshape(2, 3).t() for r in range(world)])
                )


def gathered_into_too_little(rank: int, world: int) -> str:
    target = torch.empty(2 * world + 1) if rank == 0 else None
    try:
        dist.gather_single(torch.ones(2), target, dst=0, async_op=False)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "gathered"


@needs("gather_single")
def test_gather_into_one_tensor() -> None:
    run_ranks(gathered_at_root, WORLD)


@needs("gather_single")
def test_a_refused_gather_is_told_to_all_who_wait() -> None:
    root, *_ = run_ranks(gathered_into_too_little, WORLD)
    assert "must be equal to world_size times" in root


def hooked(rank: int, world: int) -> list[str]:
    """Names of the calls that a pair of hooks received."""
    told: list[str] = []
    group = dist.group.WORLD
    assert group is not None
    group.register_pre_hook(7, lambda call: told.append(f"before {call.name.name}"))
    group.register_post_hook(7, lambda call: told.append(f"after {call.name.name}"))
    dist.all_reduce(torch.ones(3))
    dist.barrier()
    group.unregister_pre_hook(7)
    group.unregister_post_hook(7)
    dist.all_reduce(torch.ones(3))
    return told


@needs("register_pre_hook", dist.ProcessGroup)
def test_hooks_of_a_group_hear_of_its_calls() -> None:
    for told in run_ranks(hooked, WORLD):
        assert [line.lower().replace("_", "") for line in told] == [
            *("before allreduce", "after allreduce", "before barrier", "after barrier")
        ]


def not_a_number(rank: int, world: int) -> str:
    values = torch.ones(3)
    dist.all_reduce(values)
    values[1] = float("nan")
    try:
        dist.all_reduce(values)
    except RuntimeError as error:
        return str(error)
    return "nothing"


@needs("NanCheckHook", torch._C._distributed_c10d)
def test_torchs_check_for_nan_works() -> None:
    for said in run_ranks(not_a_number, WORLD, env={"TORCH_DIST_NAN_CHECK": "1"}):
        assert "nan" in said.lower()


def recorded(rank: int, world: int) -> int:
    """Number of groups to which torch's flight recorder is attached."""
    dist.new_group()
    dist.all_reduce(torch.ones(3))
    return len(dist.distributed_c10d._world.pg_flight_recorder_hooks)


RECORDS = needs("_FR_SELF_RECORDING_BACKENDS", dist.distributed_c10d)


@RECORDS
@pytest.mark.parametrize(("env", "attached"), [({}, 0), ({"TORCH_FR_BUFFER_SIZE": "100"}, 2)])
def test_torchs_recorder_comes_only_where_a_program_asks_for_it(env: dict[str, str], attached: int) -> None:
    assert run_ranks(recorded, WORLD, env=env) == [attached] * WORLD


def beside(rank: int, world: int, other: str) -> None:
    """Groups of symm and of one of torch's own backends, alternately."""
    group = dist.new_group(backend=other)
    for value in (1.0, 2.0):
        for chosen in (None, group):
            tensor = torch.full((5,), value)
            dist.all_reduce(tensor, group=chosen)
            assert tensor.tolist() == [value * world] * 5


def mixed(rank: int, world: int, _: str) -> None:
    """One group that has gloo for one device and symm for the other."""
    group = dist.new_group(backend="cpu:symm,cuda:gloo")
    assert group._get_backend(torch.device("cpu")).name() == "symm"
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [world] * 2


@pytest.mark.parametrize("body", [beside, mixed])
def test_beside_backends_of_torch(body: Callable[..., None]) -> None:
    """torch 2.14 turned its own backends into plug-ins."""
    run_ranks(body, WORLD, "gloo")


def seconds(work: Any) -> float:
    return float(work.timeout.total_seconds())


def timeouts(rank: int, world: int) -> None:
    group: Any = dist.new_group(timeout=timedelta(seconds=60))
    backend = group._get_backend(torch.device("cpu"))
    other = 1 - rank

    def posted() -> Any:
        return dist.irecv(torch.zeros(2), other, group=group)

    def call() -> float:
        work: Any = dist.all_reduce(torch.ones(2), group=group, async_op=True)
        work.wait()
        return seconds(work)

    options = dist.BarrierOptions()
    options.timeout = timedelta(seconds=5)
    stated = group.barrier(options)
    stated.wait()
    assert seconds(stated) == 5
    first = posted()
    backend.set_timeout(timedelta(seconds=50))
    batch = dist.batch_isend_irecv(
        [dist.P2POp(call, torch.zeros(2), other, group=group) for call in (dist.isend, dist.irecv)]
    )
    assert (seconds(first), seconds(batch[0]), call()) == (60, 50, 50)
    first.wait()
    dist.isend(torch.zeros(2), other, group=group).wait()
    batch[0].wait()

    # An extension lasts until the first work after it has ended; several extensions add up.
    group._add_ephemeral_timeout(timedelta(seconds=10))
    works = [posted(), posted()]
    group._add_ephemeral_timeout(timedelta(seconds=3))
    works.append(posted())
    assert list(map(seconds, works)) == [60, 60, 63]
    meet("three are posted", rank, world)
    dist.isend(torch.zeros(2), other, group=group).wait()
    works[0].wait()
    works.append(posted())
    assert seconds(works[-1]) == 53
    meet("four are posted", rank, world)
    for _ in range(3):
        dist.isend(torch.zeros(2), other, group=group).wait()
    for work in works:
        work.wait()
    assert call() == 50
    group._add_ephemeral_timeout(timedelta(seconds=10))
    dist.barrier(group=group)
    assert call() == 50
    with pytest.raises(ValueError, match="by 0 ms or more"):
        group._add_ephemeral_timeout(timedelta(seconds=-1))
    both: Any = dist.new_group(backend="cpu:symm,cuda:symm", timeout=timedelta(seconds=60))
    both._add_ephemeral_timeout(timedelta(seconds=10))
    assert seconds(both.barrier()) == 70

    # Each call takes longer than the group's timeout, and not longer than the extended one.
    backend.set_timeout(timedelta(seconds=1))
    for late in (lambda: dist.all_reduce(torch.ones(2), group=group), lambda: messages(group)):
        group._add_ephemeral_timeout(timedelta(seconds=60))
        if rank == 1:
            time.sleep(1.5)
        late()


def messages(group: Any) -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(2), 1, group=group)
    else:
        dist.send(torch.zeros(2), 0, group=group)


@pytest.mark.timed
@needs("timeout", torch._C._distributed_c10d.Work)
def test_timeouts_of_works_and_their_extensions() -> None:
    run_ranks(timeouts, 2)


def not_offered(rank: int, world: int) -> None:
    group: Any = dist.group.WORLD
    backend: Any = group._get_backend(torch.device("cpu"))
    for holder in (group, backend):
        assert not holder.supports_abort_hooks
        with pytest.raises(RuntimeError, match="Backend symm does not support registerAbortHook"):
            holder.register_abort_hook(1, lambda: None)
    assert not backend.supports_reconfigure and not backend.supports_window
    with pytest.raises(RuntimeError, match="Backend symm does not support get_reconfigure_handle"):
        backend.get_reconfigure_handle()
    # Every way to request a group whose members can change.
    options: Any = torch_symm.Options(timedelta(seconds=20))
    options.enable_reconfigure = True
    match = "members of a group of symm never change"
    with pytest.raises(torch_symm.SymmConfigError, match=match):
        dist.new_group(pg_options=options)
    with pytest.raises(torch_symm.SymmConfigError, match=match):
        torch_symm.ProcessGroupSymm(file_store("by hand", world), rank, world, options)
    with pytest.raises(torch_symm.SymmConfigError, match=match):
        backend.split(file_store("split", world), [0, 1], options)
    meet("refused", rank, world)
    dist.destroy_process_group()
    with pytest.raises(torch_symm.SymmConfigError, match=match):
        dist.init_process_group(
            "symm", store=file_store("again", world), rank=rank, world_size=world, enable_reconfigure=True
        )
    assert not dist.is_initialized()
    dist.init_process_group("symm", store=file_store("again", world), rank=rank, world_size=world)
    dist.barrier()


@needs("supports_abort_hooks", dist.ProcessGroup)
def test_what_is_not_offered_raises_by_name() -> None:
    run_ranks(not_offered, 2)

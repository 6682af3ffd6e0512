"""Backend features of torch versions after the oldest supported one. A test skips if torch lacks its feature."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import product
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


def ended(work: Any) -> None:
    """Waits for the work of an asynchronous call."""
    if work is not None:
        work.wait()


def single_collectives(rank: int, world: int) -> None:
    parts = torch.arange(4.0) + 10 * rank
    everything = torch.cat([torch.arange(4.0) + 10 * other for other in range(world)])
    for asynchronous in (False, True):
        gathered, mine = torch.empty(4 * world), torch.empty(4)
        ended(dist.all_gather_single(gathered, parts, async_op=asynchronous))
        assert torch.equal(gathered, everything)
        ended(dist.reduce_scatter_single(mine, everything, async_op=asynchronous))
        assert torch.equal(mine, world * parts)
    refused = torch.empty(4 * world + 1)
    with pytest.raises(ValueError, match="must be equal to world_size times"):
        dist.all_gather_single(refused, parts)


def gathered_at_root(rank: int, world: int) -> None:
    # A tensor that is not contiguous, and a stack of such tensors.
    parts = [(torch.arange(6) + 10 * r).reshape(2, 3).t() for r in range(world)]
    for root, asynchronous in product(range(world), (False, True)):
        target = torch.empty(world, 3, 2, dtype=torch.int64) if rank == root else None
        ended(dist.gather_single(parts[rank], target, dst=root, async_op=asynchronous))
        assert target is None or torch.equal(target, torch.stack(parts))
    # The output is too long: rank 0 rejects it, and the waiting ranks may get an error.
    errors = (ValueError, RuntimeError)
    with suppress(*errors) if rank else pytest.raises(errors, match="must be equal to world_size times"):
        dist.gather_single(torch.ones(2), None if rank else torch.empty(2 * world + 1), dst=0)


def hooked(rank: int, world: int) -> None:
    """A pair of hooks receives the calls between its registration and its removal."""
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
    assert [line.lower().replace("_", "") for line in told] == [
        *("before allreduce", "after allreduce", "before barrier", "after barrier")
    ]


def not_a_number(rank: int, world: int) -> None:
    values = torch.ones(3)
    dist.all_reduce(values)
    values[1] = float("nan")
    with pytest.raises(RuntimeError, match=r"(?i)nan"):
        dist.all_reduce(values)


def recorded(rank: int, world: int) -> None:
    """torch's flight recorder is attached to groups only where a program asks for it."""
    dist.new_group()
    dist.all_reduce(torch.ones(3))
    attached = len(dist.distributed_c10d._world.pg_flight_recorder_hooks)
    assert attached == (2 if "TORCH_FR_BUFFER_SIZE" in os.environ else 0)


def beside(rank: int, world: int) -> None:
    """torch 2.14 turned its own backends into plug-ins: groups of symm and of gloo, alternately, then one of both."""
    other = dist.new_group(backend="gloo")
    mixed = dist.new_group(backend="cpu:symm,cuda:gloo")
    assert mixed._get_backend(torch.device("cpu")).name() == "symm"
    for value in (1.0, 2.0):
        for group in (None, other, mixed):
            tensor = torch.full((5,), value)
            dist.all_reduce(tensor, group=group)
            assert tensor.tolist() == [value * world] * 5


checks_nan = needs("NanCheckHook", torch._C._distributed_c10d)
records = needs("_FR_SELF_RECORDING_BACKENDS", dist.distributed_c10d)


@pytest.mark.parametrize(
    ("body", "env"),
    [
        pytest.param(single_collectives, {}, marks=needs("all_gather_single")),
        pytest.param(gathered_at_root, {}, marks=needs("gather_single")),
        pytest.param(hooked, {}, marks=needs("register_pre_hook", dist.ProcessGroup)),
        pytest.param(not_a_number, {"TORCH_DIST_NAN_CHECK": "1"}, marks=checks_nan),
        pytest.param(recorded, {}, marks=records),
        pytest.param(recorded, {"TORCH_FR_BUFFER_SIZE": "100"}, marks=records),
        (beside, {}),
    ],
)
def test_a_feature(body: Callable[..., None], env: dict[str, str]) -> None:
    run_ranks(body, WORLD, env=env)


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
    message = dist.send if rank else dist.recv
    for late in (lambda: dist.all_reduce(torch.ones(2), group=group), lambda: message(torch.ones(2), other, group)):
        group._add_ephemeral_timeout(timedelta(seconds=60))
        if rank == 1:
            time.sleep(1.5)
        late()


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
    ways: list[Callable[[], object]] = [
        lambda: dist.new_group(pg_options=options),
        lambda: torch_symm.ProcessGroupSymm(file_store("by hand", world), rank, world, options),
        lambda: backend.split(file_store("split", world), [0, 1], options),
        lambda: dist.init_process_group(
            "symm", store=file_store("again", world), rank=rank, world_size=world, enable_reconfigure=True
        ),
    ]
    for number, way in enumerate(ways):
        if number == 3:
            meet("refused", rank, world)
            dist.destroy_process_group()
        with pytest.raises(torch_symm.SymmConfigError, match="members of a group of symm never change"):
            way()
    assert not dist.is_initialized()
    dist.init_process_group("symm", store=file_store("again", world), rank=rank, world_size=world)
    dist.barrier()


@needs("supports_abort_hooks", dist.ProcessGroup)
def test_what_is_not_offered_raises_by_name() -> None:
    run_ranks(not_offered, 2)

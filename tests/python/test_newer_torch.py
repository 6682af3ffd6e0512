"""What versions of torch after the oldest supported one brought for backends. A test skips where torch lacks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

WORLD = 3


def needs(name: str, owner: Any = dist) -> pytest.MarkDecorator:
    """Skips a test where ``owner`` has nothing of that name."""
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
            # A part that is not contiguous, and a stack of them.
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
    """Names of the calls that a pair of hooks was told of."""
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
    """How many groups torch's flight recorder is attached to."""
    dist.new_group()
    dist.all_reduce(torch.ones(3))
    return len(dist.distributed_c10d._world.pg_flight_recorder_hooks)


RECORDS = needs("_FR_SELF_RECORDING_BACKENDS", dist.distributed_c10d)


@RECORDS
@pytest.mark.parametrize(("env", "attached"), [({}, 0), ({"TORCH_FR_BUFFER_SIZE": "100"}, 2)])
def test_torchs_recorder_comes_only_where_a_program_asks_for_it(env: dict[str, str], attached: int) -> None:
    assert run_ranks(recorded, WORLD, env=env) == [attached] * WORLD


def beside(rank: int, world: int, other: str) -> None:
    """A group of symm and one of a backend of torch's own, in turns."""
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
    """In 2.14 torch's own backends became plug-ins, as this one is."""
    run_ranks(body, WORLD, "gloo")

"""Training with the backend: DDP, FSDP2, differentiable collectives, functional collectives, profiler events."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from ranks import run_ranks
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile


def network(seed: int = 1) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 4)
    )


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))


def local_gradients(world: int, model: torch.nn.Module, step: int) -> list[torch.Tensor]:
    """The mean over ranks of the gradients, computed here."""
    total = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for rank in range(world):
        model.zero_grad()
        model(batch(rank, step)).pow(2).mean().backward()
        for sum_, parameter in zip(total, model.parameters(), strict=True):
            sum_ += parameter.grad / world
    return total


def ddp(rank: int, world: int, options: dict[str, Any]) -> None:
    model = network()
    alone = copy.deepcopy(model)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.01, **options)
    for step in range(4):
        wrapped.zero_grad()
        wrapped(batch(rank, step)).pow(2).mean().backward()
        for got, wanted in zip(model.parameters(), local_gradients(world, alone, step), strict=True):
            torch.testing.assert_close(got.grad, wanted)


@pytest.mark.parametrize(
    "options",
    ({}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}, {"static_graph": True}),
    ids=str,
)
def test_ddp_gradients(options: dict[str, Any]) -> None:
    run_ranks(ddp, 3, options)


def starts_apart(rank: int, world: int) -> None:
    model = network(seed=rank)
    DistributedDataParallel(model)
    for parameter, wanted in zip(model.parameters(), network(seed=0).parameters(), strict=True):
        assert torch.equal(parameter, wanted)


def test_ddp_starts_from_rank_0() -> None:
    run_ranks(starts_apart, 3)


def hooks(rank: int, world: int) -> None:
    for hook in (
        default_hooks.allreduce_hook,
        default_hooks.fp16_compress_hook,
        default_hooks.bf16_compress_hook,
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
    ):
        model = network()
        alone = copy.deepcopy(model)
        wrapped = DistributedDataParallel(model)
        try:
            wrapped.register_comm_hook(dist.group.WORLD, hook)
        except TypeError:
            # torch allows the bf16 hook only in builds with NCCL.
            assert hook is default_hooks.bf16_compress_hook
            continue
        for step in range(2):
            wrapped.zero_grad()
            wrapped(batch(rank, step)).pow(2).mean().backward()
            for got, wanted in zip(model.parameters(), local_gradients(world, alone, step), strict=True):
                torch.testing.assert_close(got.grad, wanted, atol=2e-3, rtol=2e-2)
    if torch.cuda.is_available():
        # In this case torch waits for a GPU, even for CPU tensors.
        return
    state = powerSGD_hook.PowerSGDState(dist.group.WORLD, matrix_approximation_rank=2, start_powerSGD_iter=2)
    wrapped = DistributedDataParallel(network())
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(4):
        wrapped(batch(rank, step)).pow(2).mean().backward()


def test_ddp_hooks() -> None:
    run_ranks(hooks, 2)


def uneven_inputs(rank: int, world: int) -> int:
    """Join makes ranks with fewer batches take part in the others' collectives."""
    wrapped = DistributedDataParallel(network())
    steps = 0
    with wrapped.join():
        for step in range(2 + rank):
            wrapped(batch(rank, step)).pow(2).mean().backward()
            steps += 1
    return steps


def test_ddp_join() -> None:
    assert run_ranks(uneven_inputs, 3) == [2, 3, 4]


def fsdp(rank: int, world: int, case: str) -> None:
    mesh = init_device_mesh("cpu", (world,))
    model = network()
    alone = copy.deepcopy(model)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16) if case == "bfloat16" else MixedPrecisionPolicy()
    loose = case == "bfloat16"
    for layer in (*model, model):
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    factor = 1.0
    if case == "divide factor":
        # Becomes PREMUL_SUM.
        model.set_gradient_divide_factor(5.0)
        for layer in model:
            if isinstance(layer, torch.nn.Linear):
                layer.set_gradient_divide_factor(5.0)
        factor = world / 5.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(rank, step)).pow(2).mean().backward()
        if case == "clip":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        gradients = local_gradients(world, alone, step)
        for parameter, gradient in zip(alone.parameters(), gradients, strict=True):
            parameter.grad = gradient * factor
        if case == "clip":
            torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
        optimizer.step()
        other.step()
        for sharded, whole in zip(model.parameters(), alone.parameters(), strict=True):
            assert isinstance(sharded, DTensor)
            torch.testing.assert_close(
                sharded.full_tensor(), whole, atol=5e-3 if loose else 1e-5, rtol=5e-2 if loose else 1e-4
            )


@pytest.mark.parametrize("case", ("float32", "bfloat16", "divide factor", "clip"))
def test_fsdp2(case: str) -> None:
    run_ranks(fsdp, 3, case)


def hybrid(rank: int, world: int) -> None:
    """Sharded in pairs, replicated between them: all-reduce and reduce-scatter in one training."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = network()
    alone = copy.deepcopy(model)
    fully_shard(model, mesh=mesh)
    model(batch(rank, 0)).pow(2).mean().backward()
    for sharded, wanted in zip(model.parameters(), local_gradients(world, alone, 0), strict=True):
        torch.testing.assert_close(sharded.grad.full_tensor(), wanted)


def test_hybrid_sharding() -> None:
    run_ranks(hybrid, 4)


def gradients(rank: int, world: int) -> None:
    """torch.distributed.nn: the gradients of each collective."""
    mine = torch.full((3,), float(rank + 1), requires_grad=True)
    outputs = differentiable.all_gather(mine)
    assert [float(output[0].detach()) for output in outputs] == [1.0, 2.0, 3.0]
    sum((index + 1) * output.sum() for index, output in enumerate(outputs)).backward()
    assert bool((mine.grad == world * (rank + 1)).all())

    mine = torch.full((3,), float(rank + 1), requires_grad=True)
    differentiable.all_reduce(mine * 2).sum().backward()
    assert bool((mine.grad == 2 * world).all())

    mine = torch.full((3 * world,), float(rank), requires_grad=True)
    output = differentiable.all_to_all_single(torch.zeros(3 * world), mine)
    (output * (rank + 1)).sum().backward()
    assert mine.grad.view(world, 3)[:, 0].tolist() == [1.0, 2.0, 3.0]

    mine = torch.full((2,), float(rank), requires_grad=True)
    outputs = differentiable.all_to_all(
        [torch.zeros(2) for _ in range(world)], [mine * (to + 1) for to in range(world)]
    )
    sum(output.sum() for output in outputs).backward()
    assert bool((mine.grad == 6).all())

    mine = torch.full((2,), float(rank), requires_grad=True)
    differentiable.reduce_scatter(torch.zeros(2), [mine * 1 for _ in range(world)]).sum().backward()
    assert bool((mine.grad == world).all())

    mine = torch.full((2,), 1.0, requires_grad=True)
    (differentiable.broadcast(mine, 1) * (rank + 1)).sum().backward()
    assert bool((mine.grad == (6 if rank == 1 else 0)).all())


def test_differentiable_collectives() -> None:
    run_ranks(gradients, 3)


def functional_calls(rank: int, world: int) -> None:
    group = dist.group.WORLD
    for count in (4, 90_000):
        mine = torch.full((count,), float(rank))
        assert bool((functional.all_reduce(mine, "sum", group) == 3).all())
        assert bool((functional.all_reduce(mine, "avg", group) == 1).all())
        gathered = functional.all_gather_tensor(mine, 0, group)
        assert gathered.view(world, count)[:, 0].tolist() == [0.0, 1.0, 2.0]
        scattered = functional.reduce_scatter_tensor(torch.full((world * count,), float(rank)), "sum", 0, group)
        assert scattered.numel() == count and bool((scattered == 3).all())
        assert bool((functional.broadcast(mine, 2, group) == 2).all())
        first, second = functional.all_reduce_coalesced([mine, mine + 1], "sum", group)
        assert bool((first == 3).all()) and bool((second == 6).all())
        splits = [1, 2, 3]
        sent = torch.cat([torch.full((splits[to],), 10.0 * rank + to) for to in range(world)])
        received = functional.all_to_all_single(sent, [splits[rank]] * world, splits, group)
        assert received.tolist() == [10.0 * giver + rank for giver in range(world) for _ in range(splits[rank])]
    assert bool((mine == rank).all()), "a functional call changed its input"


def test_functional_collectives() -> None:
    run_ranks(functional_calls, 3)


def events(rank: int, world: int) -> None:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        dist.all_reduce(torch.ones(10, 3))
        dist.all_reduce(torch.ones(1 << 18), async_op=True).wait()
        dist.broadcast(torch.ones(5), 0)
        dist.all_gather_into_tensor(torch.ones(world * 2), torch.ones(2))
        dist.reduce_scatter_tensor(torch.ones(2), torch.ones(world * 2))
        dist.all_to_all_single(torch.ones(world), torch.ones(world))
        dist.gather(torch.ones(2), [torch.ones(2) for _ in range(world)] if rank == 0 else None, 0)
        dist.scatter(torch.ones(2), [torch.ones(2) for _ in range(world)] if rank == 0 else None, 0)
        dist.reduce(torch.ones(2), 0)
        if rank == 0:
            dist.send(torch.ones(7), 1)
        else:
            dist.recv(torch.ones(7), 0)
        dist.barrier()
    names = [event.name for event in seen.events()]
    for name in (
        "all_reduce",
        "broadcast",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "gather",
        "scatter",
        "reduce",
        "barrier",
        "recv" if rank else "send",
    ):
        assert f"symm:{name}" in names, (name, sorted({each for each in names if "symm" in each}))
    reduces = [event for event in seen.events() if event.name == "symm:all_reduce"]
    assert len(reduces) == 2 and all(event.is_async for event in reduces)
    assert [10, 3] in [shape for event in reduces for shape in event.input_shapes], reduces[0].input_shapes
    assert sum(name == "record_param_comms" for name in names) == 11


def test_profiler_events() -> None:
    run_ranks(events, 2)

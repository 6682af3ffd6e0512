"""Small training jobs: DDP, FSDP2, tensor parallelism, and what a profiler sees."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from expected import assert_same_bits
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Linear(32, 4))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 16, generator=generator), torch.randint(0, 4, (8,), generator=generator)


def train(wrapped: nn.Module, rank: int, steps: int = 5) -> list[float]:
    optimiser = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        values, labels = batch(step, rank)
        loss = nn.functional.cross_entropy(wrapped(values), labels)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    return losses


def same_on_all_ranks(tensor: torch.Tensor) -> None:
    others = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(others, tensor.detach())
    for other in others:
        assert_same_bits(other, tensor, "parameters differ between ranks")


def ddp(rank: int, world: int, options: dict[str, object]) -> list[torch.Tensor]:
    wrapped = DistributedDataParallel(model(), **options)
    train(wrapped, rank)
    for parameter in wrapped.parameters():
        same_on_all_ranks(parameter)
    return [parameter.detach() for parameter in wrapped.module.parameters()]


DDP_OPTIONS = {
    "plain": {},
    "small buckets": {"bucket_cap_mb": 0.0005},
    "unused": {"find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True, "static_graph": True},
}


@pytest.mark.parametrize("options", DDP_OPTIONS)
def test_ddp_trains_as_with_gloo(options: str) -> None:
    ours = run_ranks(ddp, 3, DDP_OPTIONS[options])
    theirs = run_ranks(ddp, 3, DDP_OPTIONS[options], backend="gloo")
    for a, b in zip(ours[0], theirs[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def hooks(rank: int, world: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook

    for hook in (allreduce_hook, fp16_compress_hook):
        wrapped = DistributedDataParallel(model())
        wrapped.register_comm_hook(None, hook)
        losses = train(wrapped, rank)
        assert all(loss < 10 for loss in losses)
        for parameter in wrapped.parameters():
            same_on_all_ranks(parameter)


def test_ddp_hooks() -> None:
    run_ranks(hooks, 2)


def uneven(rank: int, world: int) -> None:
    from torch.distributed.algorithms.join import Join

    wrapped = DistributedDataParallel(nn.Linear(16, 4))
    with Join([wrapped]):
        for step in range(2 + rank):
            wrapped(batch(step, rank)[0]).sum().backward()


def test_ddp_join_with_uneven_inputs() -> None:
    run_ranks(uneven, 3)


def fsdp(rank: int, world: int, kind: str) -> None:
    if kind == "hybrid":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if kind == "mixed" else None
    torch.manual_seed(5)
    sharded = nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 4))
    reference = DistributedDataParallel(nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 4)))
    reference.module.load_state_dict(sharded.state_dict())
    extra = {"mp_policy": policy} if policy else {}
    for layer in sharded:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **extra)
    fully_shard(sharded, mesh=mesh, **extra)
    if kind == "divide factor":
        # Reduced with PREMUL_SUM then.
        for module in sharded.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(float(world) / 2)
    values, labels = batch(0, rank)
    nn.functional.cross_entropy(sharded(values).float(), labels).backward()
    nn.functional.cross_entropy(reference(values), labels).backward()
    scale = 2.0 if kind == "divide factor" else 1.0
    tolerance = {"rtol": 0.1, "atol": 0.02} if kind == "mixed" else {"rtol": 1e-5, "atol": 1e-6}
    for ours, theirs in zip(sharded.parameters(), reference.module.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad * scale, **tolerance)
    norm = torch.nn.utils.clip_grad_norm_(sharded.parameters(), 1.0)
    assert (norm.full_tensor() if isinstance(norm, DTensor) else norm).item() > 0
    losses = train(sharded, rank, steps=3)
    assert all(loss == loss for loss in losses)


@pytest.mark.parametrize("kind", ("plain", "divide factor", "hybrid", "mixed"))
def test_fsdp2(kind: str) -> None:
    run_ranks(fsdp, 4, kind)


def tensors(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(1)
    whole = torch.randn(10, 7)
    for placement in (Shard(0), Shard(1), Replicate()):
        part = distribute_tensor(whole, mesh, [placement])
        for other in (Shard(0), Shard(1), Replicate()):
            assert torch.equal(part.redistribute(mesh, [other]).full_tensor(), whole)
    product = distribute_tensor(whole, mesh, [Shard(1)]) @ distribute_tensor(whole.t().contiguous(), mesh, [Shard(0)])
    torch.testing.assert_close(product.full_tensor(), whole @ whole.t())


def test_dtensor() -> None:
    run_ranks(tensors, 3)


def functional(rank: int, world: int) -> None:
    import torch.distributed._functional_collectives as fc

    group = dist.group.WORLD
    value = torch.full((4 * world,), float(rank))
    assert (fc.all_reduce(value, "sum", group) == world * (world - 1) / 2).all()
    assert (fc.all_reduce(value, "avg", group) == (world - 1) / 2).all()
    assert (fc.all_gather_tensor(value, 0, group).view(world, -1) == torch.arange(float(world))[:, None]).all()
    assert (fc.reduce_scatter_tensor(value, "sum", 0, group) == world * (world - 1) / 2).all()
    assert len(fc.all_reduce_coalesced([value, value], "max", group)) == 2
    assert (fc.broadcast(value, 1, group) == 1).all()
    got = fc.all_to_all_single(value, [4] * world, [4] * world, group)
    assert (got.view(world, 4) == torch.arange(float(world))[:, None]).all()


def test_functional_collectives() -> None:
    run_ranks(functional, 3)


#: The call, and the event that a profiler must show.
PROFILED = {
    "symm:all_reduce": lambda r, n: dist.all_reduce(torch.ones(10)),
    "symm:broadcast": lambda r, n: dist.broadcast(torch.ones(10), 0),
    "symm:reduce": lambda r, n: dist.reduce(torch.ones(10), 0),
    "symm:all_gather": lambda r, n: dist.all_gather([torch.ones(1)] * n, torch.ones(1)),
    "symm:gather": lambda r, n: dist.gather(torch.ones(1), [torch.ones(1)] * n if r == 0 else None),
    "symm:scatter": lambda r, n: dist.scatter(torch.ones(1), [torch.ones(1)] * n if r == 0 else None),
    "symm:reduce_scatter": lambda r, n: dist.reduce_scatter_tensor(torch.ones(1), torch.ones(n)),
    "symm:all_to_all": lambda r, n: dist.all_to_all_single(torch.ones(n), torch.ones(n)),
    "symm:barrier": lambda r, n: dist.barrier(),
    "symm:send": lambda r, n: dist.send(torch.ones(1), 1) if r == 0 else dist.recv(torch.ones(1), 0),
}


def profiled(rank: int, world: int) -> None:
    from torch.profiler import ProfilerActivity, profile

    for asynchronous in (False, True):
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
            for call in PROFILED.values():
                call(rank, world)
            if asynchronous:
                dist.all_reduce(torch.ones(12, dtype=torch.bfloat16), async_op=True).wait()
        names = {event.name for event in trace.events()}
        wanted = set(PROFILED) - ({"symm:send"} if rank else set())
        assert wanted <= names, wanted - names
        assert any("record_param_comms" in name for name in names)
        shapes = [event.input_shapes for event in trace.events() if event.name == "symm:all_reduce"]
        assert any([10] in shape for shape in shapes), shapes
    if rank:
        assert "symm:recv" in names


def test_profiler_events() -> None:
    run_ranks(profiled, 2)

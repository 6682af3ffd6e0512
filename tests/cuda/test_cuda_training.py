"""DDP, FSDP2 and tensor parallelism train a small network as they do on torch's backend for the device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from pool import DEVICE, WORLDS, Pool, device, needs_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

pytestmark = needs_ranks

PEER = "nccl" if DEVICE == "cuda" else "gloo"
STEPS, ROWS, WIDTH = 6, 16, 24
#: A prime, so that shards are uneven, and a number that all numbers of ranks up to 8 divide, as DTensor requires.
UNEVEN, EVEN = 97, 840
Trained = tuple[list[float], list[torch.Tensor]]


def new_model(hidden: int) -> nn.Sequential:
    torch.manual_seed(0)
    first, second, third = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH), nn.Linear(WIDTH, 5)
    return nn.Sequential(first, nn.GELU(), second, nn.GELU(), third).to(device())


def train(model: nn.Module, rank: int) -> list[float]:
    """Trains each rank on its own data; returns the losses of this rank."""
    # Not Adam, which turns pure rounding errors of gradients into full steps.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    numbers = torch.Generator().manual_seed(10 + rank)
    losses = []
    for _ in range(STEPS):
        inputs, targets = torch.randn(ROWS, WIDTH, generator=numbers), torch.randn(ROWS, 5, generator=numbers)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs.to(device())), targets.to(device()))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def with_ddp(group: dist.ProcessGroup, rank: int) -> Trained:
    # Small buckets, so that a step has several all_reduces.
    model = nn.parallel.DistributedDataParallel(new_model(UNEVEN), process_group=group, bucket_cap_mb=0.005)
    losses = train(model, rank)
    return losses, [parameter.detach().cpu() for parameter in model.parameters()]


def named_mesh(group: dist.ProcessGroup) -> DeviceMesh:
    """A named mesh, because DTensor treats meshes with the same ranks and names as equal, whatever their groups."""
    return DeviceMesh.from_group(group, DEVICE, mesh_dim_names=(dist.get_backend(group),))


def with_fsdp(group: dist.ProcessGroup, rank: int) -> Trained:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = named_mesh(group)
    model = new_model(UNEVEN)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if dist.get_backend(group) == "gloo":  # which has no ReduceOp.AVG
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    losses = train(model, rank)
    return losses, [parameter.full_tensor().detach().cpu() for parameter in model.parameters()]


def with_tensor_parallelism(group: dist.ProcessGroup, rank: int) -> Trained:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = named_mesh(group)
    model = new_model(EVEN)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    losses = train(model, 0)
    whole = [
        parameter.full_tensor() if isinstance(parameter, DTensor) else parameter for parameter in model.parameters()
    ]
    return losses, [parameter.detach().cpu() for parameter in whole]


WAYS: dict[str, Callable[[dist.ProcessGroup, int], Trained]] = {
    "ddp": with_ddp,
    "fsdp": with_fsdp,
    "tensor parallelism": with_tensor_parallelism,
}


def compare(rank: int, world: int, way: str) -> tuple[list[float], float]:
    """The losses with symm, and the largest difference of a weight from the same training on torch's backend."""
    group = dist.group.WORLD
    losses, weights = WAYS[way](group, rank)
    again, same = WAYS[way](group, rank)
    assert losses == again, "the same training twice gave different losses"
    assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True)), "and different weights"
    peer = dist.new_group(backend=PEER)
    before = group._get_backend(device()).get_sequence_number()
    theirs, wanted = WAYS[way](peer, rank)
    assert group._get_backend(device()).get_sequence_number() == before, "the peer's training used symm"
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(theirs), rtol=1e-4, atol=1e-5)
    difference = max(float((a - b).abs().max()) for a, b in zip(weights, wanted, strict=True))
    return losses, difference


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", WORLDS)
def test_as_on_the_peer(pool: Pool, world: int, way: str) -> None:
    for losses, difference in pool.run(compare, world, way, timeout=200):
        assert losses[0] != losses[-1]
        assert difference < 1e-4, difference

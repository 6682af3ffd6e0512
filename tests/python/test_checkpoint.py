"""torch.distributed.checkpoint on symm: FSDP2 state is saved and loaded as on Gloo, also with other shards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import async_save, load, save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

State = dict[str, torch.Tensor]


def sharded(group: dist.ProcessGroup) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of uneven shards on the group's mesh, trained for two steps on different data on each rank."""
    # The mesh is named, because DTensor treats meshes with the same ranks and names as equal.
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(dist.get_backend(group),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # Gloo has no average
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    numbers = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        model(torch.randn(5, 7, generator=numbers)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    parameters = list(model.parameters())
    tensors = [*parameters, *(optimizer.state[parameter]["exp_avg"] for parameter in parameters)]
    return [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_fsdp_is_saved_and_loaded_as_on_gloo(asynchronous: bool, tmp_path: Path) -> None:
    found = []
    groups: list[dist.ProcessGroup] = [dist.group.WORLD, dist.new_group(backend="gloo")]
    for group in groups:
        folder = tmp_path / dist.get_backend(group)
        model, optimizer = sharded(group)
        wanted = [tensor.clone() for tensor in whole(model, optimizer)]
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": 2}
        if asynchronous:
            async_save(state, checkpoint_id=folder, process_group=group).result()
        else:
            save(state, checkpoint_id=folder, process_group=group)
        # Later changes are not in the checkpoint.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        weights, moments = get_state_dict(model, optimizer)
        loaded = {"model": weights, "optimizer": moments, "step": 0}
        load(loaded, checkpoint_id=folder, process_group=group)
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        assert loaded["step"] == 2
        found.append(whole(model, optimizer))
        assert all(torch.equal(one, other) for one, other in zip(found[-1], wanted, strict=True))
        assert any(tensor.count_nonzero() for tensor in wanted)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.ranks(4)
def test_a_checkpoint_is_loaded_in_other_shards(tmp_path: Path) -> None:
    tensor = torch.arange(77.0).view(7, 11)
    save({"x": distribute_tensor(tensor, init_device_mesh("cpu", (4,)), [Shard(0)])}, checkpoint_id=tmp_path / "x")
    mesh = init_device_mesh("cpu", (2, 2))
    state = {"x": distribute_tensor(torch.zeros(7, 11), mesh, [Replicate(), Shard(1)])}
    load(state, checkpoint_id=tmp_path / "x")
    assert torch.equal(state["x"].full_tensor(), tensor)

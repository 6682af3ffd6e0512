"""DTensor's shards move between GPUs: every dtype, uneven shards, gradients, inside a CUDA graph."""

from __future__ import annotations

import expected
import pytest
import torch
import torch.distributed as dist
from pool import DEVICE, WORLDS, Pool, device, needs_gpus, needs_ranks, settle
from torch.distributed.device_mesh import DeviceMesh

pytestmark = needs_ranks


def mesh_of_all() -> DeviceMesh:
    return DeviceMesh.from_group(dist.group.WORLD, DEVICE)


def part(whole: torch.Tensor, parts: int, dim: int, index: int) -> torch.Tensor:
    found = whole.chunk(parts, dim)
    return found[index] if index < len(found) else whole.narrow(dim, 0, 0)


def moved(rank: int, world: int) -> None:
    from torch_symm.tensor import shard_dim_alltoall

    mesh = mesh_of_all()
    shapes = ((world * 2, world * 3), (world * 2, 3, world), (7, 5), (2, 9), (1000, 1001))
    for dtype in expected.DTYPES:
        for shape in shapes:
            whole = expected.seeded(dtype, shape, 3).to(device())
            last = len(shape) - 1
            for gather_dim, shard_dim in ((0, last), (last, 0)):
                mine = part(whole, world, gather_dim, rank)
                got = shard_dim_alltoall(mine, gather_dim, shard_dim, mesh, 0, gather_size=shape[gather_dim])
                wanted = part(whole, world, shard_dim, rank)
                settle()
                expected.assert_same_bits(got.cpu(), wanted.cpu(), (dtype, shape, gather_dim))


def differentiated(rank: int, world: int) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = mesh_of_all()
    for shape in ((world * 2, world * 3), (7, 5)):
        whole = torch.arange(float(torch.Size(shape).numel()), device=device()).view(shape)
        tensor = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
        with CommDebugMode() as counted:
            other = tensor.redistribute(mesh, [Shard(1)])
        assert dict(counted.get_comm_counts()) == {torch.ops._dtensor.shard_dim_alltoall: 1}
        assert torch.equal(other.to_local(), part(whole, world, 1, rank))
        (other * other).sum().backward()
        assert torch.equal(tensor.grad.to_local(), 2 * part(whole, world, 0, rank))


def captured(rank: int, world: int) -> None:
    from torch_symm.tensor import shard_dim_alltoall

    mesh = mesh_of_all()
    value = torch.zeros((), device=device())
    whole = torch.arange(700 * 500.0, device=device()).view(700, 500)
    mine = part(whole, world, 0, rank)
    shard_dim_alltoall(mine, 0, 1, mesh, 0, gather_size=700)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = shard_dim_alltoall(mine + value, 0, 1, mesh, 0, gather_size=700)
    for replay in range(100):
        value.fill_(replay)
        graph.replay()
        assert torch.equal(got, part(whole, world, 1, rank) + replay), replay


@pytest.mark.parametrize("world", WORLDS)
def test_shards_move(pool: Pool, world: int) -> None:
    pool.run(moved, world)


@pytest.mark.parametrize("world", WORLDS)
def test_dtensor_moves_shards_and_gradients(pool: Pool, world: int) -> None:
    pool.run(differentiated, world)


@needs_gpus
@pytest.mark.parametrize("world", WORLDS)
def test_a_graph_moves_shards(pool: Pool, world: int) -> None:
    pool.run(captured, world)

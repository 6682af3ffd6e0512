"""DTensor's shards move between GPUs: every dtype, uneven shards, gradients, inside a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import expected
import pytest
import torch
import torch.distributed as dist
from pool import DEVICE, WORLDS, Pool, device, needs_gpus, needs_ranks, settle
from test_dtensor_collectives import cut
from torch.distributed.device_mesh import DeviceMesh

pytestmark = needs_ranks


def mesh_of_all() -> DeviceMesh:
    return DeviceMesh.from_group(dist.group.WORLD, DEVICE)


def moved(rank: int, world: int) -> None:
    from torch_symm.dtensor import shard_dim_alltoall

    mesh = mesh_of_all()
    shapes = ((world * 2, world * 3), (world * 2, 3, world), (7, 5), (2, 9), (1000, 1001))
    for dtype in expected.DTYPES:
        for shape in shapes:
            whole = expected.seeded(dtype, shape, 3).to(device())
            last = len(shape) - 1
            for gather_dim, shard_dim in ((0, last), (last, 0)):
                mine = cut(whole, world, gather_dim, rank)
                got = shard_dim_alltoall(mine, gather_dim, shard_dim, mesh, 0, gather_size=shape[gather_dim])
                wanted = cut(whole, world, shard_dim, rank)
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
        assert torch.equal(other.to_local(), cut(whole, world, 1, rank))
        (other * other).sum().backward()
        assert torch.equal(tensor.grad.to_local(), 2 * cut(whole, world, 0, rank))


def captured(rank: int, world: int) -> None:
    from torch_symm.dtensor import shard_dim_alltoall

    mesh = mesh_of_all()
    value = torch.zeros((), device=device())
    whole = torch.arange(700 * 500.0, device=device()).view(700, 500)
    mine = cut(whole, world, 0, rank)
    shard_dim_alltoall(mine, 0, 1, mesh, 0, gather_size=700)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = shard_dim_alltoall(mine + value, 0, 1, mesh, 0, gather_size=700)
    for replay in range(100):
        value.fill_(replay)
        graph.replay()
        assert torch.equal(got, cut(whole, world, 1, rank) + replay), replay


def distributed(rank: int, world: int) -> None:
    """``mesh_scatter`` and ``mesh_broadcast``, which ``distribute_tensor`` and ``full_tensor`` use."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor._collective_utils import mesh_broadcast, mesh_scatter

    mesh = mesh_of_all()
    for dtype in expected.DTYPES:
        for shape in ((world * 3, 5), (7, world), (1,)):
            pieces = [expected.seeded(dtype, shape, each).to(device()) for each in range(world)]
            mine = torch.zeros_like(pieces[0])
            mesh_scatter(mine, pieces if rank == 0 else [], mesh, 0)
            settle()
            expected.assert_same_bits(mine.cpu(), pieces[rank].cpu(), (dtype, shape, "mesh_scatter"))
            mesh_broadcast(mine, mesh, 0)
            settle()
            expected.assert_same_bits(mine.cpu(), pieces[0].cpu(), (dtype, shape, "mesh_broadcast"))
    whole = torch.arange(7 * 9 * 5, dtype=torch.float32, device=device()).reshape(7, 9, 5)
    for given in (whole, whole.transpose(0, 2).contiguous().transpose(0, 2)):
        for placement in (Replicate(), Shard(0), Shard(1), Shard(-1)):
            # The other ranks pass different data: only rank 0's counts.
            brought = given if rank == 0 else torch.zeros_like(given)
            tensor = distribute_tensor(brought, mesh, [placement])
            if isinstance(placement, Shard):
                wanted = cut(whole, world, placement.dim % 3, rank)
                assert torch.equal(tensor.to_local(), wanted), placement
            assert torch.equal(tensor.full_tensor(), whole), placement
    settle()


@pytest.mark.parametrize("body", (moved, differentiated, distributed, pytest.param(captured, marks=needs_gpus)))
@pytest.mark.parametrize("world", WORLDS)
def test_shards_and_gradients(pool: Pool, world: int, body: Callable[..., None]) -> None:
    pool.run(body, world)

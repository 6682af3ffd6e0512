"""Tests that need GPUs: CPU groups do not use them, and CUDA tensors use the backend that the group names for them."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
import torch_symm
from ranks import free_port, init, run_ranks

# torch.cuda.device_count() would open a device file, which the forked ranks inherit.
gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
pytestmark = pytest.mark.skipif(gpus == 0, reason="needs a GPU")


@pytest.mark.ranks(2)
def test_a_cpu_group_never_touches_the_driver() -> None:
    """No device file is opened. torch itself loads the driver's library, and ``dist.barrier`` opens the devices."""
    for value in (torch.ones(3), torch.ones(1 << 20)):
        dist.all_reduce(value)
        assert bool((value == 2).all())
    dist.destroy_process_group()
    for fd in os.listdir("/proc/self/fd"):
        # The file descriptor of the directory listing is closed by now.
        if os.path.lexists(link := f"/proc/self/fd/{fd}"):
            assert not os.readlink(link).startswith("/dev/nvidia")
    assert not torch.cuda.is_initialized()


@pytest.mark.skipif(gpus < 2, reason="needs a GPU per rank")
@pytest.mark.ranks(2, backend=None)
def test_beside_nccl(rank: int, world_size: int) -> None:
    """ "cpu:symm,cuda:nccl": CPU tensors go through shared memory, CUDA tensors through NCCL."""
    torch.cuda.set_device(rank)
    init(rank, world_size, backend="cpu:symm,cuda:nccl")
    for device in ("cpu", "cuda"):
        value = torch.full((1000,), rank + 1.0, device=device)
        dist.all_reduce(value)
        assert bool((value == 3).all()), device
    group = dist.group.WORLD
    assert type(group._get_backend(torch.device("cpu"))).__name__ == "ProcessGroupSymm"
    assert type(group._get_backend(torch.device("cuda"))).__name__ == "ProcessGroupNCCL"
    objects = [None] * world_size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]
    dist.destroy_process_group()


@pytest.mark.parametrize("spelling", ["symm", "cpu:gloo,cuda:symm"])
@pytest.mark.ranks(2, backend=None)
def test_two_ranks_on_one_gpu_are_refused(rank: int, world_size: int, spelling: str) -> None:
    """CUDA tensors are rejected; the group still works with CPU tensors."""
    init(rank, world_size, backend=spelling)
    with pytest.raises(torch_symm.SymmConfigError, match="use the same GPU"):
        dist.all_reduce(torch.ones(3, device="cuda:0"))
    dist.all_reduce(value := torch.ones(3))
    assert bool((value == 2).all())
    dist.destroy_process_group()


@pytest.mark.skipif(gpus < 2, reason="needs a GPU per rank")
@pytest.mark.parametrize(
    "method", ["symm://127.0.0.1:PORT?secret_env=SYMM_TEST_WORD", "symm+file://SCRATCH/nccl", "store"]
)
def test_nccl_meets_through_our_stores(method: str) -> None:
    """NCCL's ranks find each other through every kind of store that processes can share."""
    port = free_port()

    def body(rank: int, world: int) -> None:
        os.environ["SYMM_TEST_WORD"] = "a word"
        torch.cuda.set_device(rank)
        where: dict[str, object]
        if method == "store":
            limit = timedelta(seconds=60)
            where = {"store": torch_symm.TCPStore("127.0.0.1", port, world, rank == 0, limit, secret="a word")}
        else:
            url = method.replace("PORT", str(port)).replace("SCRATCH", str(ranks.scratch))
            where = {"init_method": url}
        dist.init_process_group("nccl", rank=rank, world_size=world, **where)
        value = torch.full((1000,), rank + 1.0, device="cuda")
        dist.all_reduce(value)
        assert bool((value == 3).all())
        group = dist.new_group([0, 1])
        dist.all_reduce(value, group=group)
        assert bool((value == 6).all())
        dist.destroy_process_group()

    run_ranks(body, 2, backend=None)


@pytest.mark.ranks(2, backend=None)
def test_cuda_tensors_of_a_replaced_gloo_stay_with_gloo(rank: int, world_size: int) -> None:
    """Two ranks share a GPU, which Gloo allows: tensors that symm rejects there work nevertheless."""
    torch_symm.replace_gloo()
    init(rank, world_size, backend="gloo")
    assert isinstance(dist.group.WORLD._get_backend(torch.device("cuda")), torch_symm.ProcessGroupSymm)
    for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
        calls = len(torch_symm.trace()["calls"])
        for device, recorded in (("cuda:0", 0), ("cpu", 3)):
            value = torch.full((1000,), rank + 1.0, device=device)
            dist.all_reduce(value, group=group)
            assert bool((value == 3).all()), device
            everyone = [torch.empty_like(value) for _ in range(world_size)]
            dist.all_gather(everyone, value * (rank + 1), group=group)
            assert [int(one[0]) for one in everyone] == [3, 6]
            dist.broadcast(value, 1, group=group)
            assert len(torch_symm.trace()["calls"]) - calls == recorded, device
    dist.destroy_process_group()

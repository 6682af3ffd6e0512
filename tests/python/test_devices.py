"""Which devices a call may use, and the errors for others; needs no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch_symm
from ranks import backend_of, run_ranks

gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))


def test_every_tensor_of_a_call_is_on_one_served_device() -> None:
    """The message names the call and both devices, nothing is exchanged, and the group continues."""

    def body(rank: int, world: int) -> None:
        backend = backend_of()
        here, two, nowhere = torch.ones(2), torch.ones(2 * world), torch.ones(2, device="meta")
        served = "is on meta, backend symm serves CPU and CUDA tensors"
        for call, message in (
            (lambda: backend.allreduce([nowhere]), f"all_reduce: the output tensor {served}"),
            (lambda: backend._allgather_base(two, nowhere), f"all_gather: the input tensor {served}"),
            (lambda: backend._allgather_base(two.to("meta"), here), f"all_gather: the output tensor {served}"),
            (lambda: backend._reduce_scatter_base(here, two.to("meta")), f"reduce_scatter: the input tensor {served}"),
            (lambda: backend.alltoall_base(two.to("meta"), two, [], []), f"all_to_all: the output tensor {served}"),
            (lambda: backend.send([nowhere], rank, 0), f"send: the input tensor {served}"),
        ):
            with pytest.raises(ValueError, match=message):
                call()
        dist.all_reduce(here)
        assert bool((here == world).all())

    run_ranks(body, 2)


@pytest.mark.skipif(gpus > 0, reason="needs a machine without a GPU")
def test_without_a_gpu_every_barrier_is_the_hosts() -> None:
    def body(rank: int, world: int) -> None:
        dist.barrier(device_ids=[0])
        options = dist.BarrierOptions()
        options.device_ids = [5]
        backend_of().barrier(options).wait()

    run_ranks(body, 2)


def test_nothing_is_counted_before_the_first_cuda_call() -> None:
    def body(rank: int, world: int) -> dict[str, object]:
        dist.barrier()
        return torch_symm.stats()

    assert run_ranks(body, 2) == [{}, {}]

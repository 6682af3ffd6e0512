"""Tensors and devices that a call may not use, and barriers. test_collectives.py has every layout."""

from __future__ import annotations

import mmap
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch_symm
from ranks import backend_of
from torch_symm.testing import shared_tmp_path

gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))


# proves P8
@pytest.mark.ranks(3)
def test_splits_whose_sum_wraps_are_refused() -> None:
    """2^63 - 1 twice, and 6: their sum is 4 in 64 bits."""
    wraps = [2**63 - 1, 2**63 - 1, 6]
    for sent, received in ((wraps, wraps), (wraps, None), (None, wraps)):
        given, got = (torch.zeros(4 if splits else 6) for splits in (sent, received))
        with pytest.raises(
            ValueError, match=r"Split sizes .* \[9223372036854775807, 9223372036854775807, 6\], dim 0 is 4"
        ):
            dist.all_to_all_single(got, given, received, sent)
    dist.barrier()


def mapped(name: str, access: int) -> torch.Tensor:
    """Ones, in a file that is mapped."""
    path = shared_tmp_path() / name
    path.write_bytes(torch.ones(4096).numpy().tobytes())
    with path.open("r+b") as file, warnings.catch_warnings():
        # Torch warns that writing to it is undefined.
        warnings.simplefilter("ignore")
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, prot=access), dtype=torch.float32)


# proves P22
@pytest.mark.ranks(2)
def test_p8_memory_that_is_mapped_read_only_is_refused_as_output(rank: int, world_size: int) -> None:
    fixed, free = mapped(f"fixed-{rank}", mmap.PROT_READ), mapped(f"free-{rank}", mmap.PROT_READ | mmap.PROT_WRITE)
    backend = backend_of()
    outputs: dict[str, Callable[[torch.Tensor], object]] = {
        "all_reduce": dist.all_reduce,
        "columns": lambda out: dist.all_reduce(out.view(64, 64)[:, 1:3]),
        "asynchronous": lambda out: dist.all_reduce(out, async_op=True),
        "coalesced": lambda out: dist.all_reduce_coalesced([torch.ones(3), out]),
        "broadcast": lambda out: dist.broadcast(out, 1 - rank),
        "gather": lambda out: backend.allgather([[torch.ones(4096), out]], [torch.ones(4096)]),
        "pieces": lambda out: dist.all_to_all_single(out, torch.ones(4096)),
        "recv": lambda out: dist.recv(out, 1 - rank),
        "irecv": lambda out: dist.irecv(out, 1 - rank),
        "from any": lambda out: dist.recv(out),
    }
    for name, call in outputs.items():
        with pytest.raises(ValueError, match=r"memory that may not be written, .* clone"):
            call(fixed)
            pytest.fail(name)
    # The group survives because all ranks rejected the call, and each rank may have read-only tensors.
    parts = [torch.zeros(4096) for _ in range(world_size)]
    dist.all_gather(parts, fixed)
    dist.broadcast(fixed if rank == 0 else parts[0], 0)
    dist.reduce(parts[1] if rank == 0 else fixed, 0)
    works = [dist.isend(fixed, 1 - rank), dist.irecv(free, 1 - rank)]
    for work in works:
        work.wait()
    for _ in range(2):
        dist.all_reduce(free)
    assert bool((free == 4).all()) and bool((fixed == 1).all()) and bool((parts[0] == 1).all())
    # A new storage at the address of a checked one is checked again.
    del free
    for turn in range(20):
        with pytest.raises(ValueError, match="may not be written"):
            dist.all_reduce(mapped(f"fixed-{rank}-{turn}", mmap.PROT_READ))
        dist.all_reduce(mapped(f"free-{rank}-{turn}", mmap.PROT_READ | mmap.PROT_WRITE))


@pytest.mark.ranks(4)
def test_barrier_holds_everybody(rank: int, tmp_path: Path) -> None:
    """No rank passes a barrier before the last one has reached it."""
    for turn in range(4):
        if rank == turn % 4:
            time.sleep(0.05)
        (tmp_path / f"came-{turn}-{rank}").touch()
        dist.barrier()
        assert len(list(tmp_path.glob(f"came-{turn}-*"))) == 4


@pytest.mark.ranks(2)
def test_every_tensor_of_a_call_is_on_one_served_device(rank: int, world_size: int) -> None:
    """The message names the call and both devices, nothing is exchanged, and the group continues."""
    backend = backend_of()
    here, two, nowhere = torch.ones(2), torch.ones(2 * world_size), torch.ones(2, device="meta")
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
    assert bool((here == world_size).all())


@pytest.mark.skipif(gpus > 0, reason="needs a machine without a GPU")
@pytest.mark.ranks(2)
def test_without_a_gpu_every_barrier_is_the_hosts() -> None:
    dist.barrier(device_ids=[0])
    options = dist.BarrierOptions()
    options.device_ids = [5]
    backend_of().barrier(options).wait()


@pytest.mark.ranks(2)
def test_nothing_is_counted_before_the_first_cuda_call() -> None:
    dist.barrier()
    assert torch_symm.stats() == {"zero_copy": 0, "inter_node": {}}

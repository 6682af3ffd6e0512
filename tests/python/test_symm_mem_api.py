"""Tensors in symmetric memory by this package's functions: allocated, found by peers, written with signals."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torchs
import torch_symm
import torch_symm.symm_mem as symm_mem
from ranks import run_ranks


def shapes_and_peers(rank: int, world: int) -> None:
    assert symm_mem.get_backend("cpu") == "SYMM"
    for t in (
        symm_mem.empty(4, 6, device="cpu"),
        symm_mem.empty((4, 6), dtype=torch.int16, device=torch.device("cpu")),
        symm_mem.empty([3], dtype=torch.float64),
        symm_mem.empty(0, 3),
    ):
        assert t.is_contiguous() and t.device.type == "cpu"
        t.fill_(rank)
        window = symm_mem.rendezvous(t, dist.group.WORLD)
        assert (window.rank, window.world_size) == (rank, world)
        window.barrier()
        for peer in range(world):
            theirs = window.get_buffer(peer, t.shape, t.dtype)
            assert theirs.shape == t.shape and bool((theirs == peer).all())
        window.barrier()
    assert symm_mem.empty(4, 6).shape == (4, 6) and symm_mem.empty((4, 6)).dtype == torch.get_default_dtype()
    address = symm_mem.empty(100, device="cpu", alloc_id=7).data_ptr()
    assert symm_mem.empty(100, device="cpu", alloc_id=7).data_ptr() == address
    # Torch's functions see the same memory.
    t = torchs.empty(8, device="cpu").fill_(rank)
    window = torchs.rendezvous(t, dist.group.WORLD.group_name)
    window.barrier()
    assert window.get_buffer((rank + 1) % world, (8,), torch.float32).tolist() == [(rank + 1) % world] * 8
    window.barrier()


@pytest.mark.parametrize("world", (1, 2, 4))
def test_tensors_of_peers(world: int) -> None:
    run_ranks(shapes_and_peers, world)


def too_large(rank: int, world: int) -> None:
    for shape, dtype in (((1 << 62,), torch.float64), ((1 << 61, 4), torch.int8), ((1 << 40, 1 << 40), torch.int8)):
        for alloc_id in (None, 9):
            with pytest.raises(ValueError, match=rf" {math.prod(shape) * dtype.itemsize} bytes, more than"):
                symm_mem.empty(shape, dtype=dtype, device="cpu", alloc_id=alloc_id)
    with pytest.raises(torch_symm.SymmConfigError, match=f"out of memory.* {1 << 62} bytes"):
        symm_mem.empty(1 << 62, dtype=torch.int8, device="cpu")
    for shape in ((-3,), (-3, -3), (0, -1)):
        with pytest.raises(ValueError, match="cannot have the shape"):
            symm_mem.empty(shape, device="cpu")


def test_more_than_there_can_be_is_refused() -> None:
    run_ranks(too_large, 1)


def refusals(rank: int, world: int) -> None:
    with pytest.raises(TypeError, match="unsupported group type"):
        symm_mem.rendezvous(symm_mem.empty(4, device="cpu"), 3)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError):
        symm_mem.rendezvous(torch.empty(4), dist.group.WORLD)
    for call in (symm_mem.get_mempool_allocator, symm_mem.get_mem_pool):
        with pytest.raises(NotImplementedError, match="not for cpu"):
            call("cpu")
    for answer in (True, False):
        torchs.is_nvshmem_available = lambda answer=answer: answer
        assert symm_mem.is_nvshmem_available() is answer
    with pytest.raises(ValueError, match="holds no channel"):
        symm_mem.set_signal_pad_size(0)
    size = symm_mem.get_signal_pad_size()
    symm_mem.set_signal_pad_size(2 * size)
    assert symm_mem.get_signal_pad_size() == 2 * size == torchs.get_signal_pad_size()
    window = symm_mem.rendezvous(symm_mem.empty(4, device="cpu"), dist.group.WORLD)
    assert window.signal_pad_size >= 2 * size


def test_wrong_arguments_are_refused() -> None:
    run_ranks(refusals, 2)

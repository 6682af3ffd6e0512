"""Tests of symmetric memory without a GPU; tests/cuda has the rest."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch_symm
from ranks import backend_of, on_threads, run_ranks
from torch_symm.testing import init_process_group

gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
without_gpu = pytest.mark.skipif(gpus > 0, reason="needs a machine without a GPU")
needs_cuda_torch = pytest.mark.skipif(torch.version.cuda is None, reason="needs a torch that was built for CUDA")
CPU = torch.device("cpu")


def library() -> ctypes.CDLL:
    from torch_symm._native import load

    found = ctypes.CDLL(str(load().__file__))
    found.symm_alloc.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    found.symm_alloc.restype = ctypes.c_void_p
    found.symm_free.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    found.symm_free.restype = None
    return found


@without_gpu
def test_a_refused_allocation_is_null_and_logged() -> None:
    """torch makes an OutOfMemoryError of a null pointer. Freeing wrong memory does not end the process."""

    def body(rank: int, world: int) -> None:
        functions = library()
        for device in (0, 7, -1):
            assert functions.symm_alloc(12_345_678, device, None) is None
        functions.symm_free(0x7F00_0000_0000, 4096, 0, None)
        functions.symm_free(None, 0, -1, None)

    (log,) = run_ranks(body, 1).logs
    assert log.count("12345678 bytes of symmetric memory on cuda:0 cannot be had: ") == 1, log
    assert "4096 bytes of symmetric memory at 0x7f0000000000 on cuda:0 stay taken: " in log, log


@pytest.mark.ranks(2)
def test_cpu_tensors_are_not_allocated(world_size: int) -> None:
    """FSDP2 queries support first; a caller that does not query gets an error that names the query."""
    backend = backend_of()
    for device in (CPU, torch.device("cpu", 0), torch.device("meta")):
        assert backend.supports_tensor_alloc(device) is False
        with pytest.raises(NotImplementedError, match=rf"{device} cannot have symmetric memory.*supports_tensor"):
            backend.allocate_tensor(8, dtype=torch.float32, device=device)
    with pytest.raises(ValueError, match="-1 elements"):
        backend.allocate_tensor(-1, dtype=torch.float32, device=CPU)
    dist.all_reduce(value := torch.ones(3))
    assert bool((value == world_size).all())


@without_gpu
@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
@pytest.mark.ranks(2, backend=None)
def test_without_a_gpu_there_is_none(debug: str) -> None:
    """Under DETAIL, the backend is torch's wrapper, which calls the C++ class."""
    dist.set_debug_level(getattr(dist.DebugLevel, debug))
    init_process_group()
    backend = backend_of()
    assert isinstance(backend, torch_symm.ProcessGroupSymm) == (debug == "OFF")
    for device in (CPU, torch.device("cuda"), torch.device("cuda", 0), torch.device("cuda", 100)):
        assert backend.supports_tensor_alloc(device) is False
        with pytest.raises(NotImplementedError, match=rf"{device} cannot have symmetric memory"):
            backend.allocate_tensor(8, dtype=torch.float32, device=device)
    for ask in (torch_symm.mem_allocator, lambda: backend.mem_allocator):
        with pytest.raises(NotImplementedError, match="none of 0 CUDA devices can have symmetric memory"):
            ask()


@needs_cuda_torch
@pytest.mark.ranks(2)
def test_one_allocator_of_the_class_that_pools_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes the object through C++ as if a device supported it: only making the pool needs a driver."""
    from torch_symm import _memory

    requested = []

    def shares(device: int) -> bool:
        requested.append(device)
        return device == 2

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    native = type("Native", (), {"_supports_symm_mem": staticmethod(shares), "__file__": _memory.load().__file__})
    monkeypatch.setattr(_memory, "load", lambda: native)
    allocator = torch_symm.mem_allocator()
    assert isinstance(allocator, torch._C._cuda_CUDAAllocator)
    assert requested == [2], "a context on another GPU"
    assert torch_symm.mem_allocator() is allocator
    backend, other = backend_of(), backend_of(dist.new_group([0, 1]))
    assert backend.mem_allocator is allocator and other.mem_allocator is allocator
    if gpus == 0:
        # The second message if a test has initialized CUDA in the process that forked this one.
        with pytest.raises(RuntimeError, match=r"no NVIDIA driver|in forked subprocess"):
            torch.cuda.MemPool(backend.mem_allocator)


def test_nothing_of_it_is_loaded_before_it_is_asked_for() -> None:
    code = """
import sys, torch, torch_symm
assert "mem_allocator" in torch_symm.__all__
assert sys.modules.keys().isdisjoint({"torch_symm._memory", "torch_symm._C", "torch_symm.symm_mem"})
torch_symm.mem_allocator
assert "torch_symm._memory" in sys.modules and "torch_symm._C" not in sys.modules
assert torch_symm.symm_mem.empty is sys.modules["torch_symm.symm_mem"].empty
assert "symm.fused_all_gather_matmul" in str(torch.ops.symm.fused_all_gather_matmul)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


class Pools:
    """Replaces torch's pools: counts the live ones."""

    alive = 0
    used = False

    def __init__(self, allocator: object) -> None:
        Pools.alive += 1

    def __del__(self) -> None:
        Pools.alive -= 1


@contextmanager
def use_pool(pool: Pools, device: torch.device) -> Iterator[None]:
    """Usable by one thread at a time, like torch's."""
    assert not pool.used, "already recording"
    pool.used = True
    time.sleep(0.001)
    yield
    pool.used = False


def test_a_pool_ends_with_its_last_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads allocate from one pool; stand-ins of torch's pools need no GPU."""
    from torch_symm import _memory

    monkeypatch.setattr(_memory, "mem_allocator", object)
    monkeypatch.setattr(torch.cuda, "MemPool", Pools)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_pool)
    place = torch.device("cpu", 0)
    first = _memory.allocate(1, 5, torch.int16, place)
    assert first.shape == (5,) and first.dtype == torch.int16
    _memory.allocate(2, 5, torch.int16, place)
    _memory.allocate(1, 5, torch.int16, place)
    assert Pools.alive == 1
    _memory.let_go(1)
    assert Pools.alive == 1
    _memory.let_go(3)
    _memory.let_go(2)
    assert Pools.alive == 0 and not _memory._pools

    def allocate(holder: int) -> None:
        for _ in range(5):
            assert _memory.allocate(holder, 3, torch.int8, place).shape == (3,)

    on_threads([lambda holder=holder: allocate(holder) for holder in range(8)])
    assert Pools.alive == 1
    for holder in range(8):
        _memory.let_go(holder)
    assert Pools.alive == 0

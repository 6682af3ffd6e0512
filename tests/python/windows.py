"""The behaviour of windows of torch's symmetric memory on CPU tensors and on GPUs: one scenario per behaviour."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch_symm
import torch_symm.symm_mem as ours
from torch._C._distributed_c10d import _SymmetricMemory
from torch_symm._native import load

#: Milliseconds after which a wait that cannot end must fail.
SHORT_MS = 300


@dataclass
class Here:
    """The device of the tensors, and the functions of the test kit that run on this device."""

    device: torch.device
    init: Callable[..., None]
    meet: Callable[..., None]
    settle: Callable[[], None]

    @property
    def on_cpu(self) -> bool:
        """Returns true if a failing call itself raises the error; on GPUs a later one does."""
        return self.device.type == "cpu"


CPU = Here(torch.device("cpu"), ranks.init, ranks.meet, lambda: None)


def group_name() -> str:
    return dist.group.WORLD.group_name


def opened(here: Here, *shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, Any]:
    """A tensor of zeros, and its window."""
    load()
    tensor = symm_mem.empty(*shape, dtype=dtype, device=here.device)
    return tensor.zero_(), symm_mem.rendezvous(tensor, group_name())


def pad_is_clear(window: Any) -> bool:
    pad = window.get_signal_pad(window.rank, [symm_mem.get_signal_pad_size() // 4], torch.int32)
    return not bool(pad.any())


def buffers(rank: int, world: int, here: Here) -> None:
    """Every rank can access every buffer, and nothing outside it."""
    tensor, window = opened(here, world, 100)
    assert (window.rank, window.world_size) == (rank, world)
    assert window.buffer_ptrs[rank] == tensor.data_ptr() and len(set(window.buffer_ptrs)) == world
    assert window.buffer_size == 4 * world * 100 and window.multicast_ptr == 0
    assert window.buffer_ptrs_dev != 0 and window.signal_pad_ptrs_dev != 0
    assert len(set(window.signal_pad_ptrs)) == world
    assert symm_mem.rendezvous(tensor, group_name()).buffer_ptrs == window.buffer_ptrs
    window.barrier()
    for peer in range(world):
        window.get_buffer(peer, (world, 100), torch.float32)[rank].fill_(10 * world + rank)
    window.barrier()
    expected = torch.arange(world, device=here.device) + 10.0 * world
    assert bool((tensor == expected[:, None]).all())
    peer = (rank + 1) % world
    part = window.get_buffer(peer, (50,), torch.float32, storage_offset=50)
    assert bool((part == 10 * world).all())
    assert bool((window.get_remote_tensor(peer, (world, 100), torch.float32) == expected[:, None]).all())
    wide = window.get_buffer(peer, (8,), torch.float64, storage_offset=10)
    assert wide.data_ptr() == window.buffer_ptrs[peer] + 80
    for bad in (
        lambda: window.get_buffer(0, (world, 101), torch.float32),
        lambda: window.get_buffer(0, (1,), torch.float32, storage_offset=world * 100),
        lambda: window.get_remote_tensor(0, (world, 51), torch.float64),
        lambda: window.get_signal_pad(0, (window.signal_pad_size // 4 + 1,)),
    ):
        with pytest.raises(RuntimeError, match=r"requested size \(\d+ bytes\) exceeds the allocated size"):
            bad()
    window.barrier()
    here.settle()
    assert pad_is_clear(window)


def ball(rank: int, world: int, here: Here) -> None:
    """A sum is passed from rank to rank 100 times, through the memory of the next rank."""
    tensor, window = opened(here, 1024)
    after, before = (rank + 1) % world, (rank - 1) % world
    theirs = window.get_buffer(after, (1024,), torch.float32)
    for turn in range(100):
        if rank > 0 or turn > 0:
            window.wait_signal(before, channel=turn % 7 if rank else (turn - 1) % 7)
        torch.add(tensor, 1, out=theirs)
        window.put_signal(after, channel=turn % 7)
    if rank == 0:
        window.wait_signal(before, channel=99 % 7)
        assert bool((tensor == 100 * world).all()), tensor[0]
    here.settle()
    dist.barrier()
    assert pad_is_clear(window)


def data_with_signals(rank: int, world: int, here: Here) -> None:
    """Each rank writes to the next one, in the middle of an allocation, and waits for the one before."""
    whole = ours.empty(3, 1000, dtype=torch.int32, device=here.device).fill_(-1)
    window = ours.rendezvous(whole, dist.group.WORLD)
    window.barrier()
    after, before = (rank + 1) % world, (rank - 1) % world
    for turn in range(50):
        sent = torch.full((1000,), 100 * turn + rank, dtype=torch.int32, device=here.device)
        ours.put_signal(sent, window, after, channel=1)
        ours.wait_signal(window, before, channel=1)
        assert bool((whole[0] == 100 * turn + before).all()) and bool((whole[1:] == -1).all()), turn
        window.barrier()
    here.settle()
    assert pad_is_clear(window)
    dist.barrier()


def barriers(rank: int, world: int, here: Here) -> None:
    """Each rank writes to all, then reads what all wrote; only the barrier separates the rounds."""
    tensor, window = opened(here, world)
    peers = [window.get_buffer(peer, (world,), torch.float32) for peer in range(world)]
    seen = []
    for turn in range(200):
        for peer in peers:
            peer[rank] = turn
        window.barrier(channel=turn % 3)
        seen.append(tensor.clone())
        window.barrier(channel=3)
    assert all(bool((each == turn).all()) for turn, each in enumerate(seen))
    here.settle()
    assert pad_is_clear(window)


def kept(
    rank: int,
    world: int,
    here: Here,
    make: Callable[[], torch.Tensor] | None = None,
    release: Callable[[], object] = lambda: None,
) -> None:
    """Views stay valid once all ranks have dropped tensors and handles, and no later tensor gets their memory.

    ``make``: makes the tensor in place of ``opened``. ``release``: is called once the tensor has a window.
    """
    count = 1 << 20
    tensor = make() if make else opened(here, count)[0]
    tensor.fill_(rank)
    window = symm_mem.rendezvous(tensor, group_name())
    release()
    window.barrier()
    views = [window.get_buffer(peer, (count,), torch.float32) for peer in range(world)]
    remote = window.get_remote_tensor((rank + 1) % world, (count,), torch.float32)
    pad = window.get_signal_pad(rank, (8,), torch.int32)
    parts = torch.ops.symm_mem.get_remote_tensors(tensor[5:9], group_name()) if here.on_cpu else views
    here.settle()
    dist.barrier()
    del tensor, window
    gc.collect()
    if not here.on_cpu:
        torch.cuda.empty_cache()
    others = [symm_mem.empty(count, device=here.device).fill_(-1) for _ in range(3)]
    dist.barrier()
    assert all(bool((view == peer).all()) for peer, view in [*enumerate(views), *enumerate(parts)])
    assert bool((remote == (rank + 1) % world).all())
    assert not bool(pad.any())
    dist.barrier()
    views[(rank + 1) % world][count // 2 :].fill_(100 + rank)
    here.settle()
    dist.barrier()
    assert bool((views[rank][count // 2 :] == 100 + (rank - 1) % world).all())
    assert all(bool((other == -1).all()) for other in others)
    dist.barrier()


def operators(rank: int, world: int, here: Here) -> None:
    """torch's operators: on CPU tensors ``test_symm_mem_ops.py`` compares bits."""
    ops, name = torch.ops.symm_mem, group_name()
    for dtype in (torch.float32, torch.bfloat16):
        for count in (64, 4096 * world, 1 << 20):
            tensor, _ = opened(here, count, dtype=dtype)
            generator = torch.Generator().manual_seed(count)
            data = torch.randn(world, count, generator=generator).to(dtype)
            expected = data.float().sum(0).to(dtype)
            near = {"atol": 0.1, "rtol": 0.05} if dtype == torch.bfloat16 else {"atol": 1e-4, "rtol": 1e-4}
            tensor.copy_(data[rank])
            out = torch.empty_like(tensor)
            ops.one_shot_all_reduce_out(tensor, "sum", name, out)
            for got in (
                out,
                ops.one_shot_all_reduce(tensor, "sum", name),
                ops.one_shot_all_reduce_copy(tensor, data[rank].to(here.device), "sum", name),
            ):
                torch.testing.assert_close(got.cpu(), expected, **near)
            dist.barrier()
            if count > 64 and count % world == 0:
                part = torch.empty(count // world, dtype=dtype, device=here.device)
                ops.reduce_scatter_out(tensor, name, False, part)
                torch.testing.assert_close(part.cpu(), expected.chunk(world)[rank], **near)
                dist.barrier()
            ops.two_shot_all_reduce_(tensor, "sum", name)
            torch.testing.assert_close(tensor.cpu(), expected, **near)
    tensor, _ = opened(here, 64, dtype=torch.uint32)
    ops.memset32_(tensor, 3, 7, 5)
    ops.stream_write_value32_(tensor, 20, 9)
    expected = torch.zeros(64, dtype=torch.int32)
    expected[3:8], expected[20] = 7, 9
    here.settle()
    assert torch.equal(tensor.cpu().view(torch.int32), expected)
    dist.barrier()
    remote = ops.get_remote_tensors(tensor, name)
    assert len(remote) == world and all(torch.equal(each.cpu().view(torch.int32), expected) for each in remote)
    dist.barrier()


def again(rank: int, world: int, here: Here) -> list[int]:
    """Memory is allocated, shared and freed 60 times; returns mappings (CPU) or free GPU memory in between."""
    found, count = [], 5000 if here.on_cpu else 1 << 20
    for turn in range(60):
        tensor, window = opened(here, count)
        window.barrier()
        window.get_buffer((rank + 1) % world, (count,), torch.float32).fill_(turn)
        window.barrier()
        assert bool((tensor == turn).all()), turn
        window.barrier()
        here.settle()
        dist.barrier()
        del tensor, window
        if here.on_cpu:
            found.append(Path("/proc/self/maps").read_text().count("memfd"))
        else:
            gc.collect()
            found += [torch.cuda.mem_get_info()[0]] * (turn % 20 == 0)
    # No old window stays mapped, except segments that peers have just advertised.
    assert not here.on_cpu or found[-1] <= found[4] + 4, found
    return found


def persistent(rank: int, world: int, here: Here) -> None:
    """An ``alloc_id`` identifies an address and a window, however often the tensor is reallocated."""
    load()

    def made(alloc_id: int, count: int = 1000) -> torch.Tensor:
        return _SymmetricMemory.empty_strided_p2p((count,), (1,), torch.float32, here.device, group_name(), alloc_id)

    tensor = made(1)
    address = tensor.data_ptr()
    window = symm_mem.rendezvous(tensor, group_name())
    pointers = window.buffer_ptrs
    with pytest.raises(RuntimeError, match=r"alloc_id == 1.*still active" if here.on_cpu else r"alloc_id == 1"):
        made(1)
    other = made(2)
    assert other.data_ptr() != address
    for turn in range(3):
        window.barrier()
        del tensor, window
        if not here.on_cpu:
            gc.collect()
        tensor = made(1).fill_(100 * turn + rank)
        assert tensor.data_ptr() == address
        window = symm_mem.rendezvous(tensor, group_name())
        assert window.buffer_ptrs == pointers
        window.barrier()
        peer = (rank + 1) % world
        assert bool((window.get_buffer(peer, (1000,), torch.float32) == 100 * turn + peer).all())
    window.barrier()
    # Without a name, the group of the allocation is used. The window is cached, so rank 0 does not wait for rank 1.
    if here.on_cpu and rank == 0:
        assert _SymmetricMemory.rendezvous(tensor).buffer_ptrs == pointers
    dist.barrier()
    del tensor, window
    size = r"requested allocation size \(8000\) is different.* 4000"
    with pytest.raises(RuntimeError, match=size if here.on_cpu else None):
        made(1, count=2000)
    here.settle()


def mismatched(rank: int, world: int, here: Here) -> None:
    """Sizes that differ are an error on all ranks, and the group stays usable; other tensors are not symmetric."""
    load()
    tensor = symm_mem.empty(1024 if rank else 2048, device=here.device)
    with pytest.raises(torch_symm.SymmMismatchError, match=r"rank 0.*8192 bytes.*rank 1.*4096 bytes"):
        symm_mem.rendezvous(tensor, group_name())
    # As torch defines it, the rendezvous returns None, so that callers can check whether a tensor is symmetric.
    for plain in (torch.zeros(64, device=here.device), torch.empty(0, device=here.device)):
        assert symm_mem.rendezvous(plain, group_name()) is None
    _, window = opened(here, 64)
    window.barrier()
    dist.all_reduce(value := torch.ones(1, device=here.device))
    assert value.item() == world
    here.settle()


#: The scenarios without faults.
SCENARIOS = (buffers, ball, data_with_signals, barriers, kept, again, persistent, mismatched)


def late(rank: int, world: int, here: Here, what: str) -> None:
    """Rank 0 waits for a signal that is never sent; its error names the peer, and the process continues."""
    _, window = opened(here, 64)
    here.settle()
    dist.barrier()
    calls: dict[str, Callable[[], object]] = {
        "wait_signal": lambda: window.wait_signal(1, channel=2, timeout_ms=SHORT_MS),
        "wait_signal of the package": lambda: ours.wait_signal(window, 1, channel=2, timeout_ms=SHORT_MS),
        "put_signal": lambda: [window.put_signal(1, channel=2, timeout_ms=SHORT_MS) for _ in range(2)],
        "barrier": lambda: window.barrier(channel=2, timeout_ms=SHORT_MS),
    }
    if rank == 0:
        begun = time.monotonic()
        with pytest.raises(torch_symm.SymmTimeoutError) as raised:
            calls[what]()
            # On a GPU, a later call reports the timeout.
            here.settle()
            window.barrier(channel=5, timeout_ms=SHORT_MS)
        waited, text = time.monotonic() - begun, str(raised.value)
        assert (SHORT_MS / 1000 if here.on_cpu else 0) <= waited < 5
        assert "rank 1" in text and f"pid {os.getpid()}" in text, text
        assert f"{what.split()[0]} on channel 2" in text if here.on_cpu else "channel 2" in text, text
    here.meet("named", rank, world)
    if here.on_cpu:
        # The group and the window go on.
        if rank == 1 and what == "put_signal":
            window.wait_signal(0, channel=2)
        window.barrier()
    # The device and the process work as before; so does a new group.
    assert float(torch.ones(8, device=here.device).sum()) == 8
    dist.destroy_process_group()
    here.init(rank, world, name="again")
    _, window = opened(here, 64)
    window.barrier()
    tensor = torch.ones(100, device=here.device)
    dist.all_reduce(tensor)
    assert float(tensor[0]) == world


def killed(rank: int, world: int, here: Here, what: str = "barrier") -> str:
    """The last rank exits; the others are in a barrier with it, or wait for its signal."""
    _, window = opened(here, 64)
    window.barrier()
    here.settle()
    dist.barrier()
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(torch_symm.SymmPeerError) as raised:
        while True:
            window.barrier(timeout_ms=20_000) if what == "barrier" else window.wait_signal(world - 1, 0)
            here.settle()
    assert time.monotonic() - begun < 10
    assert float(torch.ones(8, device=here.device).sum()) == 8
    return str(raised.value)

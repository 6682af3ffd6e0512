"""torch's symmetric memory on the CPU: allocation, rendezvous, signals, and how they fail.

test_symm_mem_ops.py has the operators.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch_symm
from ranks import file_store, init, meet, run_ranks
from torch._C._distributed_c10d import _SymmetricMemory
from torch_symm._native import load

#: Milliseconds after which a wait that cannot end shall fail.
SHORT_MS = 150


def cpu(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A new tensor in symmetric memory; every rank has to ask for the same."""
    load()
    return symm_mem.empty(*size, dtype=dtype, device="cpu")


def persistent(alloc_id: int, count: int = 16) -> torch.Tensor:
    load()
    device = torch.device("cpu")
    return _SymmetricMemory.empty_strided_p2p((count,), (1,), torch.float32, device, "0", alloc_id)


def handle_of(tensor: torch.Tensor, group: Any = None) -> Any:
    return symm_mem.rendezvous(tensor, group or dist.group.WORLD)


def pads_are_clear(handle: Any) -> bool:
    return not handle.get_signal_pad(handle.rank).view(torch.int32).any()


def test_backends_by_name() -> None:
    """The CPU has symmetric memory at once; that of CUDA is chosen with the first group."""

    def body(rank: int, world: int) -> tuple[str | None, ...]:
        load()
        before = symm_mem.get_backend("cuda")
        init(rank, world)
        return symm_mem.get_backend("cpu"), before, symm_mem.get_backend("cuda")

    assert run_ranks(body, 1, backend=None)[0] == ("SYMM", "CUDA", "SYMM")
    # Who names torch's own in the environment keeps it.
    assert run_ranks(body, 1, backend=None, env={"TORCH_SYMMMEM": "CUDA"})[0] == ("SYMM", "CUDA", "CUDA")


def test_a_used_backend_is_kept() -> None:
    def body(rank: int, world: int) -> str | None:
        load()
        cpu(4)  # torch knows one "in use" for all devices
        init(rank, world)
        dist.all_reduce(torch.ones(2))
        return symm_mem.get_backend("cuda")

    assert run_ranks(body, 1, backend=None)[0] == "CUDA"


@pytest.mark.parametrize("world", [2, 4])
def test_peers_see_what_is_written(world: int) -> None:
    def body(rank: int, world: int) -> None:
        tensor = cpu(4, 64)
        assert not tensor.any(), "new memory is zeroed"
        handle = handle_of(tensor)
        assert (handle.rank, handle.world_size, str(handle.device)) == (rank, world, "cpu")
        assert (handle.buffer_size, handle.offset) == (4 * 64 * 4, 0)
        assert handle.signal_pad_size == symm_mem.get_signal_pad_size()
        assert handle.buffer_ptrs[rank] == tensor.data_ptr()
        assert len(set(handle.buffer_ptrs)) == len(set(handle.signal_pad_ptrs)) == world
        assert not _SymmetricMemory.has_multicast_support(torch._C._autograd.DeviceType.CPU, 0)
        assert handle.multicast_ptr == 0
        tensor.fill_(rank + 1)
        handle.barrier()
        for peer in range(world):
            assert bool((handle.get_buffer(peer, (4, 64), torch.float32) == peer + 1).all())
            part = handle.get_buffer(peer, (8,), torch.float64, storage_offset=100)
            assert part.data_ptr() == handle.buffer_ptrs[peer] + 800
            assert bool((handle.get_remote_tensor(peer, (2, 64), torch.float32) == peer + 1).all())
        handle.barrier()
        # Into the peer's memory, through a view of the handle's buffer.
        handle.get_buffer((rank + 1) % world, (64,), torch.float32, storage_offset=64).fill_(100 + rank)
        handle.barrier()
        assert bool((tensor[1] == 100 + (rank - 1) % world).all())
        assert bool((tensor[0] == rank + 1).all())
        assert pads_are_clear(handle)

    run_ranks(body, world)


def test_pointer_arrays_hold_the_pointers() -> None:
    def body(rank: int, world: int) -> None:
        import ctypes

        handle = handle_of(cpu(16))
        for array, pointers in (
            (handle.buffer_ptrs_dev, handle.buffer_ptrs),
            (handle.signal_pad_ptrs_dev, handle.signal_pad_ptrs),
        ):
            assert list((ctypes.c_uint64 * world).from_address(array)) == pointers

    run_ranks(body, 2)


def test_one_window_for_a_tensor_and_its_views() -> None:
    def body(rank: int, world: int) -> None:
        tensor = cpu(2, 8)
        handle = handle_of(tensor)
        for view in (tensor, tensor[1], tensor.view(-1)[3:], tensor.t()):
            again = handle_of(view)
            assert again.buffer_ptrs == handle.buffer_ptrs
            assert again.signal_pad_ptrs == handle.signal_pad_ptrs
        # Cached: no other rank takes part.
        if rank == 0:
            handle_of(tensor)
        dist.barrier()
        other = handle_of(cpu(2, 8))
        assert other.signal_pad_ptrs[rank] not in handle.signal_pad_ptrs
        assert torch.ops.symm_mem._rendezvous(tensor, "0") is not None

    run_ranks(body, 2)


def test_requests_out_of_bounds_are_refused() -> None:
    def body(rank: int, world: int) -> None:
        handle = handle_of(cpu(100))
        for bad in (
            lambda: handle.get_buffer(1 - rank, (101,), torch.float32),
            lambda: handle.get_buffer(1 - rank, (100,), torch.float32, storage_offset=1),
            lambda: handle.get_remote_tensor(1 - rank, (51,), torch.float64),
            lambda: handle.get_signal_pad(1 - rank, (handle.signal_pad_size // 4 + 1,)),
        ):
            with pytest.raises(RuntimeError, match=r"requested size \(\d+ bytes\) exceeds the allocated size"):
                bad()
        assert handle.get_buffer(1 - rank, (100,), torch.float32).numel() == 100
        pad = handle.get_signal_pad(rank)
        assert (pad.dtype, pad.numel() * 4) == (torch.uint32, handle.signal_pad_size)

    run_ranks(body, 2)


def test_plain_tensors_are_not_symmetric() -> None:
    """None is what torch's own operators ask for; no rank waits for another."""

    def body(rank: int, world: int) -> None:
        for plain in (torch.ones(8), torch.empty(0)):
            assert handle_of(plain) is None
        with pytest.raises(RuntimeError, match="input must be allocated with empty_strided_p2p"):
            torch.ops.symm_mem.one_shot_all_reduce(torch.ones(8), "sum", "0")
        with pytest.raises(ValueError, match="not allocated from Symmetric Memory"):
            torch.ops.symm_mem.get_remote_tensors(torch.ones(8), "0")
        with pytest.raises(ValueError, match='there is no process group "nobody"'):
            symm_mem.rendezvous(cpu(4), "nobody")

    run_ranks(body, 2)


@pytest.mark.parametrize("world", [2, 4])
def test_a_ball_goes_round(world: int) -> None:
    def body(rank: int, world: int) -> None:
        ball = cpu(1, dtype=torch.int64)
        handle = handle_of(ball)
        before, after = (rank - 1) % world, (rank + 1) % world
        for turn in range(200):
            channel = turn % 3
            if rank > 0 or turn > 0:
                handle.wait_signal(before, (turn - 1) % 3 if rank == 0 else channel)
            assert ball.item() == turn * world + rank
            handle.get_buffer(after, (1,), torch.int64).fill_(turn * world + rank + 1)
            handle.put_signal(after, channel)
        if rank == 0:
            handle.wait_signal(before, 199 % 3)
        dist.barrier()
        assert pads_are_clear(handle)

    run_ranks(body, world)


@pytest.mark.parametrize("world", [2, 4])
def test_barriers_again_and_again(world: int) -> None:
    def body(rank: int, world: int) -> None:
        count = cpu(1, dtype=torch.int64)
        handle = handle_of(count)
        peers = [handle.get_buffer(peer, (1,), torch.int64) for peer in range(world)]
        for turn in range(1, 201):
            count.fill_(turn)
            handle.barrier(channel=turn % 2)
            assert all(peer.item() >= turn for peer in peers)
            handle.barrier(channel=5)
        torch.ops.symm_mem._barrier(handle.boxed())
        assert pads_are_clear(handle)

    run_ranks(body, world)


@pytest.mark.timed
def test_a_wait_leaves_other_threads_alone() -> None:
    """torch's bindings keep the GIL; a barrier that waits must not."""

    def body(rank: int, world: int) -> float:
        handle = handle_of(cpu(4))
        if rank == 1:
            time.sleep(0.4)
        turns = 0
        stop = threading.Event()

        def turn() -> None:
            nonlocal turns
            while not stop.is_set():
                turns += 1
                time.sleep(0.005)

        thread = threading.Thread(target=turn)
        thread.start()
        handle.barrier()
        stop.set()
        thread.join()
        return turns

    assert run_ranks(body, 2)[0] > 20


@pytest.mark.timed
def test_what_never_comes_is_named() -> None:
    """Each wait has a limit of its own; the group and the window go on."""

    def body(rank: int, world: int) -> None:
        handle = handle_of(cpu(4))
        if rank == 0:
            for wait, words in (
                (lambda: handle.wait_signal(1, 3, SHORT_MS), "wait_signal on channel 3"),
                (lambda: handle.barrier(4, SHORT_MS), "barrier on channel 4"),
            ):
                start = time.monotonic()
                with pytest.raises(torch_symm.SymmTimeout, match=words) as caught:
                    wait()
                assert "rank 1" in str(caught.value)
                assert SHORT_MS / 1000 <= time.monotonic() - start < 5
            handle.put_signal(1, 6)
            with pytest.raises(torch_symm.SymmTimeout, match="put_signal on channel 6") as caught:
                handle.put_signal(1, 6, SHORT_MS)
            assert "rank 1" in str(caught.value)
        dist.barrier()
        if rank == 1:
            handle.wait_signal(0, 6)
        handle.barrier()
        with pytest.raises(ValueError, match="channel 1000000 does not exist"):
            handle.barrier(1_000_000)
        with pytest.raises(ValueError, match="channel -1 does not exist"):
            handle.put_signal(1 - rank, -1)
        with pytest.raises(ValueError, match="rank 2 is outside the group of 2 ranks"):
            handle.wait_signal(2, 0)

    run_ranks(body, 2)


@pytest.mark.timed
def test_a_rank_that_does_not_come_to_rendezvous() -> None:
    def body(rank: int, world: int) -> None:
        tensor = cpu(4)
        if rank == 0:
            with pytest.raises(torch_symm.SymmTimeout, match="rank 1"):
                handle_of(tensor)
        meet("done", rank, world)

    run_ranks(body, 2, group_timeout=1)


@pytest.mark.parametrize("world", [2, 4])
def test_different_sizes_are_an_error_on_all_ranks(world: int) -> None:
    def body(rank: int, world: int) -> str:
        tensor = cpu(64 if rank == world - 1 else 32)
        with pytest.raises(torch_symm.SymmMismatch) as caught:
            handle_of(tensor)
        # The group goes on.
        dist.all_reduce(value := torch.ones(1))
        assert value.item() == world
        assert handle_of(cpu(8)).world_size == world
        return str(caught.value)

    messages = run_ranks(body, world)
    assert all("128 bytes" in message and "256 bytes" in message for message in messages), messages
    assert f"rank {world - 1}" in messages[0]


def test_memory_that_is_given_back_and_made_again() -> None:
    """New memory is zeroed and has a window of its own; nothing of the old one stays mapped."""

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd")

    def body(rank: int, world: int) -> None:
        counts = []
        for turn in range(50):
            tensor = cpu(5000)
            assert not tensor.any()
            handle = handle_of(tensor)
            tensor.fill_(turn * world + rank)
            handle.barrier()
            peer = (rank + 1) % world
            assert bool((handle.get_buffer(peer, (5000,), torch.float32) == turn * world + peer).all())
            handle.barrier()
            counts.append(mapped())
            del tensor, handle
            dist.barrier()
        assert counts[-1] <= counts[4] + 4, counts
        # With the handle kept, the window outlives its memory and nothing else.
        tensor = cpu(5000)
        kept = handle_of(tensor)
        del tensor
        dist.barrier()
        tensor = cpu(5000)
        fresh = handle_of(tensor)
        assert set(fresh.signal_pad_ptrs).isdisjoint(kept.signal_pad_ptrs)
        fresh.barrier()

    run_ranks(body, 2)


def test_an_allocation_by_id_has_one_address() -> None:
    def body(rank: int, world: int) -> None:
        tensor = persistent(42)
        address = tensor.data_ptr()
        handle = handle_of(tensor)
        pointers = handle.buffer_ptrs
        with pytest.raises(RuntimeError, match=r"alloc_id == 42.*still active"):
            persistent(42)
        other = persistent(43)
        assert other.data_ptr() != address
        del tensor
        with pytest.raises(RuntimeError, match=r"requested allocation size \(128\) is different.* 64"):
            persistent(42, count=32)
        again = persistent(42)
        assert again.data_ptr() == address
        # No group named: that of the allocation. Cached: rank 0 does not wait for rank 1.
        if rank == 0:
            assert _SymmetricMemory.rendezvous(again).buffer_ptrs == pointers
        dist.barrier()

    run_ranks(body, 2)


def test_tensors_without_elements() -> None:
    def body(rank: int, world: int) -> None:
        handle = handle_of(cpu(0))
        assert handle.buffer_size == 0
        handle.barrier()
        with pytest.raises(RuntimeError, match="exceeds the allocated size"):
            handle.get_buffer(rank, (1,), torch.uint8)

    run_ranks(body, 2)


def test_larger_signal_pads() -> None:
    def body(rank: int, world: int) -> None:
        before = symm_mem.get_signal_pad_size()
        symm_mem.set_signal_pad_size(4 * before)
        handle = handle_of(cpu(4))
        assert handle.signal_pad_size == 4 * before
        assert handle.get_signal_pad(1 - rank).numel() == before
        handle.barrier(channel=before // world - 1)  # the last, four times as many as before
        handle.barrier()  # the last word is a signal of that channel, which the peer may not have taken yet
        # Writes to the pad's end stay there.
        handle.get_signal_pad(1 - rank)[-1:].view(torch.int32).fill_(7)
        handle.barrier()
        assert handle.get_signal_pad(rank).view(torch.int32)[-1] == 7

    run_ranks(body, 2)


def test_two_groups_on_one_allocation_and_subgroups() -> None:
    def body(rank: int, world: int) -> None:
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        half = halves[rank // 2]
        tensor = cpu(64)
        whole, part = handle_of(tensor), handle_of(tensor, half)
        assert (part.rank, part.world_size) == (rank % 2, 2)
        assert part.buffer_ptrs[rank % 2] == whole.buffer_ptrs[rank] == tensor.data_ptr()
        assert set(part.signal_pad_ptrs).isdisjoint(whole.signal_pad_ptrs), "signals of two groups stay apart"
        tensor.fill_(rank)
        whole.barrier()
        assert bool((whole.get_buffer((rank + 1) % 4, (64,), torch.float32) == (rank + 1) % 4).all())
        peer = rank ^ 1
        assert bool((part.get_buffer(peer % 2, (64,), torch.float32) == peer).all())
        # A signal in one group is none in the other.
        part.put_signal(peer % 2, 1)
        with pytest.raises(torch_symm.SymmTimeout):
            whole.wait_signal(peer, 1, SHORT_MS)
        part.wait_signal(peer % 2, 1)
        whole.barrier()
        # Ranks that are in no group do not take part.
        some = dist.new_group([0, 2, 3])
        if rank != 1:
            assert handle_of(tensor, some).world_size == 3
        whole.barrier()
        assert pads_are_clear(whole) and pads_are_clear(part)

    run_ranks(body, 4)


@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:symm", "symm"])
def test_groups_of_other_backends(backend: str, debug: str) -> None:
    """Under DETAIL torch wraps every backend, and none is known as symm's."""

    def body(rank: int, world: int) -> None:
        load()
        init(rank, world, backend)
        tensor = cpu(16)
        handle = handle_of(tensor)
        tensor.fill_(rank)
        handle.barrier()
        assert bool((handle.get_buffer(1 - rank, (16,), torch.float32) == 1 - rank).all())
        result = torch.ops.symm_mem.one_shot_all_reduce(tensor, "sum", "0")
        assert bool((result == 1).all())
        second = dist.new_group([0, 1])
        assert handle_of(tensor, second).signal_pad_ptrs != handle.signal_pad_ptrs
        # Destroyed and made again under the same name: another group, another window.
        dist.barrier()
        dist.destroy_process_group()
        init(rank, world, backend, name="second")
        again = handle_of(tensor)
        assert set(again.signal_pad_ptrs).isdisjoint(handle.signal_pad_ptrs)
        again.barrier()

    run_ranks(body, 2, backend=None, env={"TORCH_DISTRIBUTED_DEBUG": debug})


def test_a_group_known_by_its_store_alone() -> None:
    def body(rank: int, world: int) -> None:
        load()
        _SymmetricMemory.set_group_info("by hand", rank, world, file_store("by-hand", world))
        tensor = cpu(16).fill_(rank)
        handle = symm_mem.rendezvous(tensor, "by hand")
        handle.barrier()
        assert bool((handle.get_buffer(1 - rank, (16,), torch.float32) == 1 - rank).all())
        handle.barrier()

    run_ranks(body, 2, backend=None)

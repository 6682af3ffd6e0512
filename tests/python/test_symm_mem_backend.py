"""torch's symmetric memory on the CPU: allocation, rendezvous, signals, and how they fail.

test_symm_mem_ops.py has the operators.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch_symm
import torch_symm.symm_mem as ours
import windows
from ranks import file_store, init, meet, run_ranks
from torch._C._distributed_c10d import _SymmetricMemory
from torch_symm._native import load

#: Milliseconds after which a wait that cannot end must fail.
SHORT_MS = 150


def cpu(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A new tensor in symmetric memory; every rank must request the same."""
    load()
    return symm_mem.empty(*size, dtype=dtype, device="cpu")


def handle_of(tensor: torch.Tensor, group: Any = None) -> Any:
    return symm_mem.rendezvous(tensor, group or dist.group.WORLD)


def pads_are_clear(handle: Any) -> bool:
    return not handle.get_signal_pad(handle.rank).view(torch.int32).any()


def test_backends_by_name() -> None:
    """The CPU has symmetric memory at once; the backend for CUDA is chosen with the first group."""

    def body(rank: int, world: int) -> tuple[str | None, ...]:
        load()
        before = symm_mem.get_backend("cuda")
        init(rank, world)
        return symm_mem.get_backend("cpu"), before, symm_mem.get_backend("cuda")

    assert run_ranks(body, 1, backend=None)[0] == ("SYMM", "CUDA", "SYMM")
    # A user who selects torch's backend in the environment keeps it.
    assert run_ranks(body, 1, backend=None, env={"TORCH_SYMMMEM": "CUDA"})[0] == ("SYMM", "CUDA", "CUDA")


def test_a_used_backend_is_kept() -> None:
    def body(rank: int, world: int) -> str | None:
        load()
        cpu(4)  # torch has one "in use" flag for all devices
        init(rank, world)
        dist.all_reduce(torch.ones(2))
        return symm_mem.get_backend("cuda")

    assert run_ranks(body, 1, backend=None)[0] == "CUDA"


@pytest.mark.parametrize(
    ("world", "scenario"),
    [*itertools.product((2, 4), windows.SCENARIOS), (1, windows.kept), (3, windows.kept)],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_windows(world: int, scenario: Callable[..., Any]) -> None:
    run_ranks(scenario, world, windows.CPU)


@pytest.mark.parametrize(("wait", "world"), [("barrier", 4), ("signal", 2)])
def test_a_killed_peer_is_named(wait: str, world: int) -> None:
    messages = run_ranks(windows.killed, world, windows.CPU, wait, expect_killed=[world - 1])
    assert all(f"rank {world - 1}" in message for message in messages[:-1]), messages


def test_new_memory_is_zeroed_and_described() -> None:
    def body(rank: int, world: int) -> None:
        tensor = cpu(4, 64)
        assert not tensor.any()
        handle = handle_of(tensor)
        assert (str(handle.device), handle.buffer_size, handle.offset) == ("cpu", 4 * 64 * 4, 0)
        assert handle.signal_pad_size == symm_mem.get_signal_pad_size()
        pad = handle.get_signal_pad(rank)
        assert (pad.dtype, pad.numel() * 4) == (torch.uint32, handle.signal_pad_size)
        assert not _SymmetricMemory.has_multicast_support(torch._C._autograd.DeviceType.CPU, 0)
        torch.ops.symm_mem._barrier(handle.boxed())

    run_ranks(body, 2)


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
        # The window is cached, so no other rank takes part.
        if rank == 0:
            handle_of(tensor)
        dist.barrier()
        other = handle_of(cpu(2, 8))
        assert other.signal_pad_ptrs[rank] not in handle.signal_pad_ptrs
        assert torch.ops.symm_mem._rendezvous(tensor, "0") is not None

    run_ranks(body, 2)


def test_plain_tensors_are_not_symmetric() -> None:
    """The operators raise the error; no rank waits for another."""

    def body(rank: int, world: int) -> None:
        with pytest.raises(RuntimeError, match="input must be allocated with empty_strided_p2p"):
            torch.ops.symm_mem.one_shot_all_reduce(torch.ones(8), "sum", "0")
        with pytest.raises(ValueError, match="not allocated from Symmetric Memory"):
            torch.ops.symm_mem.get_remote_tensors(torch.ones(8), "0")
        with pytest.raises(ValueError, match='there is no process group "nobody"'):
            symm_mem.rendezvous(cpu(4), "nobody")

    run_ranks(body, 2)


# proves P6
@pytest.mark.timed
def test_what_never_comes_is_named() -> None:
    """Each wait has a separate timeout, and the group and the window stay usable."""

    def body(rank: int, world: int) -> None:
        handle = handle_of(cpu(4))
        if rank == 0:
            handle.put_signal(1, 6)
            for wait, words in (
                (lambda: handle.wait_signal(1, 3, SHORT_MS), "wait_signal on channel 3"),
                (lambda: ours.wait_signal(handle, 1, channel=2, timeout_ms=SHORT_MS), "wait_signal on channel 2"),
                (lambda: handle.barrier(4, SHORT_MS), "barrier on channel 4"),
                (lambda: handle.put_signal(1, 6, SHORT_MS), "put_signal on channel 6"),
            ):
                start = time.monotonic()
                with pytest.raises(torch_symm.SymmTimeoutError, match=rf"(?s)(?=.*rank 1).*{words}"):
                    wait()
                assert SHORT_MS / 1000 <= time.monotonic() - start < 5
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
@pytest.mark.parametrize("what", ["rendezvous", "operator"])
def test_a_rank_that_does_not_come_is_named(what: str) -> None:
    def body(rank: int, world: int) -> None:
        tensor = cpu(4)
        if what == "operator":
            handle_of(tensor)
        if rank == 0:
            with pytest.raises(torch_symm.SymmTimeoutError, match="rank 1"):
                handle_of(tensor) if what == "rendezvous" else torch.ops.symm_mem.one_shot_all_reduce(
                    tensor, "sum", "0"
                )
        meet("done", rank, world)

    run_ranks(body, 2, group_timeout=1)


def test_a_kept_handle_has_its_window_to_itself() -> None:
    def body(rank: int, world: int) -> None:
        tensor = cpu(5000)
        kept = handle_of(tensor)
        del tensor
        dist.barrier()
        tensor = cpu(5000)
        assert not tensor.any()
        fresh = handle_of(tensor)
        assert set(fresh.signal_pad_ptrs).isdisjoint(kept.signal_pad_ptrs)
        fresh.barrier()

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
        handle.barrier()  # the last word is a signal of that channel, which the peer may not have read yet
        # Later writes at the end of the pad are kept.
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
        # A signal in one group does not appear in the other.
        part.put_signal(peer % 2, 1)
        with pytest.raises(torch_symm.SymmTimeoutError):
            whole.wait_signal(peer, 1, SHORT_MS)
        part.wait_signal(peer % 2, 1)
        whole.barrier()
        # Ranks outside the group do not take part.
        some = dist.new_group([0, 2, 3])
        if rank != 1:
            assert handle_of(tensor, some).world_size == 3
        whole.barrier()
        assert pads_are_clear(whole) and pads_are_clear(part)

    run_ranks(body, 4)


@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:symm", "symm"])
def test_groups_of_other_backends(backend: str, debug: str) -> None:
    """Under DETAIL torch wraps every backend, so symm's cannot be recognized."""

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
        # A group that is destroyed and made again under the same name is another group, with another window.
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

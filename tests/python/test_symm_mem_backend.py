"""torch's symmetric memory on the CPU: allocation, rendezvous, signals, and how they fail.

test_symm_mem_ops.py has the operators.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch_symm
import torch_symm.symm_mem as ours
import windows
from ranks import init, meet, run_ranks
from torch._C._distributed_c10d import _SymmetricMemory
from torch_symm._native import load
from torch_symm.testing import init_process_group, shared_tmp_path

#: Milliseconds after which a wait that cannot end must fail.
SHORT_MS = 150


def cpu(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A new tensor in symmetric memory; every rank must request the same."""
    load()
    return symm_mem.empty(*size, dtype=dtype, device="cpu")


def handle_of(tensor: torch.Tensor, group: Any = None) -> Any:
    return symm_mem.rendezvous(tensor, group or dist.group.WORLD)


def test_backends_by_name() -> None:
    """The CPU has symmetric memory at once. The backend for CUDA is chosen with the first group.

    A backend that is in use, or that a user selects in the environment, is kept.
    """

    def body(rank: int, world: int, used: bool) -> tuple[str | None, ...]:
        load()
        before = symm_mem.get_backend("cuda")
        if used:
            cpu(4)  # torch has one "in use" flag for all devices
        init(rank, world)
        dist.all_reduce(torch.ones(2))
        return symm_mem.get_backend("cpu"), before, symm_mem.get_backend("cuda")

    for env, used, chosen in (({}, False, "SYMM"), ({"TORCH_SYMMMEM": "CUDA"}, False, "CUDA"), ({}, True, "CUDA")):
        assert run_ranks(body, 1, used, backend=None, env=env)[0] == ("SYMM", "CUDA", chosen)


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


@pytest.mark.ranks([1, 2, 4])
def test_tensors_of_peers(rank: int, world_size: int) -> None:
    assert ours.get_backend("cpu") == "SYMM"
    for t in (
        ours.empty(4, 6, device="cpu"),
        ours.empty((4, 6), dtype=torch.int16, device=torch.device("cpu")),
        ours.empty([3], dtype=torch.float64),
        ours.empty(0, 3),
    ):
        assert t.is_contiguous() and t.device.type == "cpu"
        t.fill_(rank)
        window = ours.rendezvous(t, dist.group.WORLD)
        assert (window.rank, window.world_size) == (rank, world_size)
        window.barrier()
        for peer in range(world_size):
            theirs = window.get_buffer(peer, t.shape, t.dtype)
            assert theirs.shape == t.shape and bool((theirs == peer).all())
        window.barrier()
    assert ours.empty(4, 6).shape == (4, 6) and ours.empty((4, 6)).dtype == torch.get_default_dtype()
    address = ours.empty(100, device="cpu", alloc_id=7).data_ptr()
    assert ours.empty(100, device="cpu", alloc_id=7).data_ptr() == address


@pytest.mark.ranks(2)
def test_a_tensor_and_its_views_have_a_window_to_themselves(rank: int, world_size: int) -> None:
    """No other tensor shares the window, even while only a handle keeps its memory. New memory is zeroed."""
    tensor = cpu(4, 64)
    assert not tensor.any()
    handle = handle_of(tensor)
    assert (str(handle.device), handle.buffer_size, handle.offset) == ("cpu", 4 * 64 * 4, 0)
    assert handle.signal_pad_size == symm_mem.get_signal_pad_size()
    pad = handle.get_signal_pad(rank)
    assert (pad.dtype, pad.numel() * 4) == (torch.uint32, handle.signal_pad_size)
    assert not _SymmetricMemory.has_multicast_support(torch._C._autograd.DeviceType.CPU, 0)
    for array, pointers in (
        (handle.buffer_ptrs_dev, handle.buffer_ptrs),
        (handle.signal_pad_ptrs_dev, handle.signal_pad_ptrs),
    ):
        assert list((ctypes.c_uint64 * world_size).from_address(array)) == pointers
    for view in (tensor, tensor[1], tensor.view(-1)[3:], tensor.t()):
        again = handle_of(view)
        assert (again.buffer_ptrs, again.signal_pad_ptrs) == (handle.buffer_ptrs, handle.signal_pad_ptrs)
    # The window is cached, so no other rank takes part.
    if rank == 0:
        handle_of(tensor)
    dist.barrier()
    assert torch.ops.symm_mem._rendezvous(tensor, "0") is not None
    others = [cpu(4, 64)]
    pads = [handle_of(others[0]).signal_pad_ptrs]
    del tensor, view, again
    dist.barrier()
    others.append(cpu(4, 64))
    fresh = handle_of(others[1])
    assert set(handle.signal_pad_ptrs).isdisjoint([*pads[0], *fresh.signal_pad_ptrs])
    if rank == 0:
        handle.wait_signal(src_rank=1)
        assert bool((handle.get_buffer(rank, (4, 64), torch.float32) == 42).all())
    else:
        handle.get_buffer(0, (4, 64), torch.float32).fill_(42)
        handle.put_signal(dst_rank=0)
    torch.ops.symm_mem._barrier(fresh.boxed())
    assert not any(bool(other.any()) for other in others)


@pytest.mark.ranks(2)
def test_wrong_requests_are_refused(rank: int, world_size: int) -> None:
    """No rank waits for another."""
    window, nothing = handle_of(cpu(1000)), handle_of(cpu(0))
    assert nothing.buffer_size == 0
    nothing.barrier()
    size = (RuntimeError, r"requested size \(.* bytes\) exceeds the allocated size")
    place = (ValueError, "outside the group of 2|cannot begin -1|cannot have the sizes")
    calls: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (*size, lambda: nothing.get_buffer(rank, (1,), torch.uint8)),
        (*size, lambda: window.get_buffer(0, (1 << 62,), torch.float32)),
        (*size, lambda: window.get_buffer(0, (1 << 33, 1 << 33), torch.float32)),
        (*size, lambda: window.get_buffer(0, (1,), torch.float64, 1 << 61)),
        (*size, lambda: window.get_buffer(0, (1,), torch.float32, (1 << 63) - 1)),
        (*size, lambda: window.get_remote_tensor(0, (1 << 62, 4), torch.int8)),
        (*size, lambda: window.get_signal_pad(0, (1 << 62,), torch.int32)),
        (*place, lambda: window.get_buffer(-1, (1,), torch.float32)),
        (*place, lambda: window.get_buffer(world_size, (1,), torch.float32)),
        (*place, lambda: window.get_signal_pad(world_size, (1,))),
        (*place, lambda: window.get_buffer(0, (1,), torch.float32, -1)),
        (*place, lambda: window.get_signal_pad(0, (1,), torch.int32, -1)),
        (*place, lambda: window.get_buffer(0, (-5, -5), torch.float32)),
        (ValueError, "rank 2 is outside the group of 2 ranks", lambda: window.wait_signal(2, 0)),
        (ValueError, "channel 1000000 does not exist", lambda: window.barrier(1_000_000)),
        (ValueError, "channel -1 does not exist", lambda: window.put_signal(1 - rank, -1)),
        (ValueError, 'there is no process group "nobody"', lambda: symm_mem.rendezvous(cpu(4), "nobody")),
        (TypeError, "unsupported group type", lambda: ours.rendezvous(cpu(4), 3)),  # type: ignore[arg-type]
        (RuntimeError, "", lambda: ours.rendezvous(torch.empty(4), dist.group.WORLD)),
        (NotImplementedError, "not for cpu", lambda: ours.get_mempool_allocator("cpu")),
        (NotImplementedError, "not for cpu", lambda: ours.get_mem_pool("cpu")),
    ]

    def refused(error: type[Exception], words: str, shape: tuple[int, ...], **options: Any) -> None:
        calls.append((error, words, lambda: ours.empty(shape, device="cpu", **options)))

    refused(torch_symm.SymmConfigError, f"out of memory.* {1 << 62} bytes", (1 << 62,), dtype=torch.int8)
    for shape in ((-3,), (-3, -3), (0, -1)):
        refused(ValueError, "cannot have the shape", shape)
    for shape, dtype in (((1 << 62,), torch.float64), ((1 << 61, 4), torch.int8), ((1 << 40, 1 << 40), torch.int8)):
        for alloc_id in (None, 9):
            words = rf" {math.prod(shape) * dtype.itemsize} bytes, more than"
            refused(ValueError, words, shape, dtype=dtype, alloc_id=alloc_id)
    for error, words, call in calls:
        with pytest.raises(error, match=words):
            call()
    for answer in (True, False):
        symm_mem.is_nvshmem_available = lambda answer=answer: answer
        assert ours.is_nvshmem_available() is answer


# proves P6
@pytest.mark.timed
@pytest.mark.parametrize("what", ["wait_signal", "wait_signal of the package", "put_signal", "barrier"])
def test_what_never_comes_is_named(what: str) -> None:
    run_ranks(windows.late, 2, windows.CPU, what)


@pytest.mark.timed
@pytest.mark.parametrize(("what", "words"), [("rendezvous", "rendezvous"), ("operator", "a barrier on channel 0")])
def test_a_rank_that_does_not_come_is_named(what: str, words: str) -> None:
    def body(rank: int, world: int) -> None:
        tensor = cpu(4)
        if what == "operator":
            handle_of(tensor)
        if rank == 0:
            with pytest.raises(torch_symm.SymmTimeoutError, match=rf"(?s)(?=.*rank 1).*{words}"):
                handle_of(tensor) if what == "rendezvous" else torch.ops.symm_mem.one_shot_all_reduce(
                    tensor, "sum", "0"
                )
        meet("done", rank, world)

    run_ranks(body, 2, group_timeout=1)


@pytest.mark.ranks(2)
def test_larger_signal_pads(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="holds no channel"):
        ours.set_signal_pad_size(0)
    before = symm_mem.get_signal_pad_size()
    ours.set_signal_pad_size(4 * before)
    assert ours.get_signal_pad_size() == symm_mem.get_signal_pad_size() == 4 * before
    handle = handle_of(cpu(4))
    assert handle.signal_pad_size == 4 * before
    assert handle.get_signal_pad(1 - rank).numel() == before
    handle.barrier(channel=before // world_size - 1)  # the last, four times as many as before
    handle.barrier()  # the last word is a signal of that channel, which the peer may not have read yet
    # Later writes at the end of the pad are kept.
    handle.get_signal_pad(1 - rank)[-1:].view(torch.int32).fill_(7)
    handle.barrier()
    assert handle.get_signal_pad(rank).view(torch.int32)[-1] == 7


@pytest.mark.ranks(4)
def test_two_groups_on_one_allocation_and_subgroups(rank: int) -> None:
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
    assert windows.pad_is_clear(whole) and windows.pad_is_clear(part)


@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:symm", "symm"])
@pytest.mark.ranks(2, backend=None)
def test_groups_of_other_backends(rank: int, world_size: int, backend: str, debug: str) -> None:
    """Under DETAIL torch wraps every backend. A store may also serve as a group."""
    dist.set_debug_level(getattr(dist.DebugLevel, debug))
    load()
    store = torch_symm.FileStore(shared_tmp_path() / "by-hand", world_size)
    _SymmetricMemory.set_group_info("by hand", rank, world_size, store)
    tensor = cpu(16).fill_(rank)
    by_hand = symm_mem.rendezvous(tensor, "by hand")
    init_process_group(backend)
    handle = handle_of(tensor)
    for each in (by_hand, handle):
        each.barrier()
        assert bool((each.get_buffer(1 - rank, (16,), torch.float32) == 1 - rank).all())
    result = torch.ops.symm_mem.one_shot_all_reduce(tensor, "sum", "0")
    assert bool((result == 1).all())
    second = dist.new_group([0, 1])
    assert handle_of(tensor, second).signal_pad_ptrs != handle.signal_pad_ptrs
    # A group that is destroyed and made again under the same name is another group, with another window.
    dist.barrier()
    dist.destroy_process_group()
    init_process_group(backend, name="second")
    again = handle_of(tensor)
    assert set(again.signal_pad_ptrs).isdisjoint(handle.signal_pad_ptrs)
    again.barrier()

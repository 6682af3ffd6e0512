"""How long symmetric memory lasts: as long as a tensor, a handle or a view of it. What a forked child may do."""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torchs
import torch_symm
import torch_symm.symm_mem as symm_mem
from ranks import meet, run_ranks
from torch._C._distributed_c10d import _SymmetricMemory

#: Number of elements of a tensor, which fills some pages.
COUNT = 5000


def opened(value: float, count: int = COUNT, group: Any = None) -> tuple[torch.Tensor, _SymmetricMemory]:
    tensor = symm_mem.empty(count, device="cpu").fill_(value)
    return tensor, symm_mem.rendezvous(tensor, group or dist.group.WORLD)


def view(window: _SymmetricMemory, rank: int) -> torch.Tensor:
    return window.get_buffer(rank, (COUNT,), torch.float32)


def kilobytes() -> int:
    """Size of this process's unnamed files, the group's own memory included."""
    files = {}
    for link in Path("/proc/self/fd").iterdir():
        try:
            if "memfd:symm" in os.readlink(link):
                stat = link.stat()
                files[stat.st_ino] = stat.st_blocks // 2
        except FileNotFoundError:  # of the directory itself
            continue
    return sum(files.values())


def test_a_handle_keeps_the_memory() -> None:
    """A handle keeps its memory, as handles of torch's own backends do."""

    def body(rank: int, world: int) -> None:
        tensor = _SymmetricMemory.empty_strided_p2p((64, 64), (64, 1), torch.float32, torch.device("cpu"), "0")
        handle = _SymmetricMemory.rendezvous(tensor)
        dist.barrier()
        del tensor
        dist.barrier()
        own = handle.get_buffer(rank, (64, 64), torch.float32)
        if rank == 0:
            handle.wait_signal(src_rank=1)
            assert bool(own.eq(42).all())
        else:
            handle.get_buffer(0, (64, 64), torch.float32).fill_(42)
            handle.put_signal(dst_rank=0)
        handle.barrier()

    run_ranks(body, 2)


@pytest.mark.timed
def test_views_outlive_their_group() -> None:
    """Mapped memory stays mapped and readable; signals fail at once."""

    def body(rank: int, world: int) -> None:
        tensor, window = opened(rank)
        own, theirs = view(window, rank), view(window, 1 - rank)
        window.barrier()
        dist.barrier()
        dist.destroy_process_group()
        start = time.monotonic()
        with pytest.raises(torch_symm.SymmAbortedError, match="destroyed"):
            window.barrier()
        assert time.monotonic() - start < 5
        assert bool((view(window, 1 - rank) == 1 - rank).all())
        with pytest.raises(ValueError, match='there is no process group "0"'):
            torchs.rendezvous(tensor, "0")
        del tensor, window
        gc.collect()
        assert bool((own == rank).all()) and bool((theirs == 1 - rank).all())
        meet("seen", rank, world)

    run_ranks(body, 2)


def test_all_memory_is_given_back() -> None:
    """Memory lasts until tensor, handle and view are dropped, in any order, and with and without their group."""

    def body(rank: int, world: int) -> None:
        opened(0)
        gc.collect()
        dist.barrier()
        before = kilobytes()
        for turn in range(30):
            tensor, window = opened(turn, count=100_000)
            again = symm_mem.rendezvous(tensor, dist.group.WORLD)
            own = view(window, rank)
            window.barrier()
            held = [[tensor], [window, again], [own]]
            del tensor, window, again, own
            assert kilobytes() >= before + 390
            for step in range(3):
                held[(turn + step) % 3].clear()
            assert kilobytes() <= before + 8, f"turn {turn}"
            # A segment that a peer advertises next arrives with a file descriptor, open here until it is mapped.
            dist.barrier()
        for _ in range(10):
            group = dist.new_group(list(range(world)))
            tensor, window = opened(1, group=group)
            window.barrier()
            own = view(window, rank)
            dist.destroy_process_group(group)
            del tensor, window, group
            assert bool((own == 1).all())
            del own
            gc.collect()
        assert kilobytes() <= before + 8

    run_ranks(body, 2)


def test_requests_that_wrap_around_are_refused() -> None:
    def body(rank: int, world: int) -> None:
        _, window = opened(0)
        for bad in (
            lambda: window.get_buffer(0, (1 << 62,), torch.float32),
            lambda: window.get_buffer(0, (1 << 33, 1 << 33), torch.float32),
            lambda: window.get_buffer(0, (1,), torch.float64, 1 << 61),
            lambda: window.get_buffer(0, (1,), torch.float32, (1 << 63) - 1),
            lambda: window.get_remote_tensor(0, (1 << 62, 4), torch.int8),
            lambda: window.get_signal_pad(0, (1 << 62,), torch.int32),
        ):
            with pytest.raises(RuntimeError, match=r"requested size \(.* bytes\) exceeds the allocated size"):
                bad()
        for outside in (
            lambda: window.get_buffer(-1, (1,), torch.float32),
            lambda: window.get_buffer(world, (1,), torch.float32),
            lambda: window.get_signal_pad(world, (1,)),
            lambda: window.get_buffer(0, (1,), torch.float32, -1),
            lambda: window.get_signal_pad(0, (1,), torch.int32, -1),
            lambda: window.get_buffer(0, (-5, -5), torch.float32),
        ):
            with pytest.raises(ValueError, match=r"outside the group of 2|cannot begin -1|cannot have the sizes"):
                outside()
        dist.barrier()

    run_ranks(body, 2)


def in_child(body: Callable[[], None]) -> None:
    """Runs ``body`` in a forked child, and fails if it fails there."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            body()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert status == 0


def test_p14_a_forked_child_uses_no_window() -> None:
    """The child does not harm its parent's windows when it drops them."""

    def body(rank: int, world: int) -> None:
        ops, A, B = torch.ops.symm_mem, torch.ones(4, 3), torch.ones(3, 2)
        tensor, window = opened(rank)
        splits, layout = symm_mem.empty(world, dtype=torch.int64), symm_mem.empty(2, world, dtype=torch.int64)
        ops.all_to_all_vdev(tensor, tensor.clone(), splits.zero_(), layout, "0")
        symm_mem.fused_all_gather_matmul(A, [B], 0, "0")
        symm_mem.fused_matmul_reduce_scatter(A, B, "sum", 0, "0")
        held: list[Any] = [tensor, window, view(window, rank), view(window, 1 - rank)]
        window.barrier()
        del tensor, window

        def child() -> None:
            for use in (
                lambda: held[1].barrier(channel=1),
                lambda: held[1].put_signal(1 - rank, channel=1),
                lambda: held[1].wait_signal(1 - rank, channel=1),
                lambda: view(held[1], 1 - rank),
                lambda: held[1].get_remote_tensor(0, (1,), torch.float32),
                lambda: held[1].get_signal_pad(0),
                lambda: held[1].buffer_ptrs,
                lambda: held[1].signal_pad_ptrs,
                lambda: held[1].buffer_ptrs_dev,
                lambda: held[1].signal_pad_ptrs_dev,
                lambda: symm_mem.put_signal(held[0][:4].clone(), held[1], 1 - rank),
                lambda: symm_mem.wait_signal(held[1], 1 - rank),
                lambda: symm_mem.rendezvous(held[0], dist.group.WORLD),
                lambda: symm_mem.rendezvous(symm_mem.empty(4), dist.group.WORLD),
                lambda: symm_mem.get_symm_mem_workspace("0", 8, device=torch.device("cpu")).barrier(),
                lambda: ops.one_shot_all_reduce(held[0], "sum", "0"),
                lambda: ops.two_shot_all_reduce_(held[0], "sum", "0"),
                lambda: ops.get_remote_tensors(held[0], "0"),
                lambda: ops._low_contention_all_gather(held[0], "0"),
                lambda: ops._low_contention_all_gather(held[0].clone(), "0"),
                lambda: ops._low_contention_reduce_scatter(held[0], "sum", "0"),
                lambda: ops.all_to_all_vdev(held[0], held[0].clone(), splits, layout, "0"),
                lambda: symm_mem.fused_all_gather_matmul(A, [B], 0, "0"),
                lambda: symm_mem.fused_matmul_reduce_scatter(A, B, "sum", 0, "0"),
            ):
                with pytest.raises(torch_symm.SymmConfigError, match="is a forked child; make a new group"):
                    use()
            held.clear()
            gc.collect()

        in_child(child)
        assert [float(each[3]) for each in held[2:]] == [rank, 1 - rank]
        assert float(held[0][3]) == rank
        held[1].barrier()
        assert not held[1].get_signal_pad(rank).view(torch.int32).any()
        own = held[2]
        held.clear()
        # The last reference to the memory is dropped in the child.
        in_child(lambda: None if float(own[3]) == rank else os._exit(1))
        dist.barrier()
        assert float(own[3]) == rank

    results = run_ranks(body, 2)
    assert all("stays taken" not in log for log in results.logs), results.logs

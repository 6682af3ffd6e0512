"""Which groups have symmetric memory, the workspaces that groups keep, and how long memory and windows last."""

from __future__ import annotations

import gc
import os
import time
from datetime import timedelta
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
from torch_symm.launch.ranks import fork
from torch_symm.symm_mem import _groups, _test_mode, _workspace
from torch_symm.testing import barrier, init_process_group, shared_tmp_path


@pytest.mark.ranks(2)
def test_symm_groups_are_enabled_and_others_can_be() -> None:
    name, gloo = dist.group.WORLD.group_name, dist.new_group(backend="gloo")
    is_enabled = symm_mem.is_symm_mem_enabled_for_group
    assert is_enabled(name) and is_enabled(dist.new_group([0, 1]).group_name)
    assert not is_enabled(gloo.group_name) and not is_enabled("no such group")
    with _test_mode():
        assert is_enabled(gloo.group_name) and is_enabled("no such group")
        with _test_mode({"one", name}):
            assert is_enabled("one") and not is_enabled(gloo.group_name)
        assert is_enabled(gloo.group_name)
    assert not is_enabled(gloo.group_name)
    symm_mem.enable_symm_mem_for_group(gloo.group_name)
    symm_mem.enable_symm_mem_for_group(gloo.group_name)
    dist.barrier()
    store = dist.distributed_c10d._get_process_group_store(gloo)
    assert [key for key in store.list_keys() if "symm_mem/nodes" in key] == []
    assert is_enabled(gloo.group_name) and gloo.group_name in torchs._group_name_to_store
    with pytest.raises(RuntimeError, match="no such group"):
        symm_mem.enable_symm_mem_for_group("no such group")


@pytest.mark.ranks(2, backend=None)
def test_a_group_of_the_same_name_is_enabled_anew() -> None:
    is_enabled = symm_mem.is_symm_mem_enabled_for_group
    for turn, enable in enumerate((torchs.enable_symm_mem_for_group, symm_mem.enable_symm_mem_for_group) * 2):
        init_process_group(backend="gloo", name=f"turn {turn}")
        name = dist.group.WORLD.group_name
        assert not is_enabled(name), turn
        if turn != 2:  # torch's own function enables a name only once
            enable(name)
            assert is_enabled(name), turn
        dist.destroy_process_group()
        assert not is_enabled(name), turn


@pytest.mark.ranks(3, backend="gloo")
def test_a_group_on_two_nodes_is_refused_by_name(rank: int) -> None:
    _groups._this_node = lambda: (f"boot-{rank // 2}", f"node{rank // 2}")  # type: ignore[assignment]
    name = dist.group.WORLD.group_name
    with pytest.raises(torch_symm.SymmConfigError) as caught:
        symm_mem.enable_symm_mem_for_group(name)
    assert f"group {name!r} has rank 0 on node0, rank 1 on node0, rank 2 on node1" in str(caught.value)
    assert not symm_mem.is_symm_mem_enabled_for_group(name)
    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    symm_mem.enable_symm_mem_for_group(pairs[rank // 2].group_name)


@pytest.mark.parametrize("torchs_file_store", [False, True])
@pytest.mark.ranks(3, backend=None, timeout=30)
def test_ranks_that_do_not_come_are_named(rank: int, torchs_file_store: bool) -> None:
    if torchs_file_store:
        url = f"file://{shared_tmp_path()}/store"
        dist.init_process_group("gloo", init_method=url, rank=rank, world_size=3, timeout=timedelta(seconds=2))
    else:
        init_process_group(backend="gloo", timeout=2)
    if rank != 1:
        with pytest.raises(torch_symm.SymmTimeoutError, match=rf"rank {rank}: .* for rank 1 of 3"):
            symm_mem.enable_symm_mem_for_group(dist.group.WORLD.group_name)
    barrier("ended")


@pytest.mark.ranks([1, 2, 4])
def test_workspaces_grow(rank: int, world_size: int) -> None:
    name = dist.group.WORLD.group_name
    small = symm_mem.get_symm_mem_workspace(name, 1000)
    assert small.buffer_size >= 1000 and (small.rank, small.world_size) == (rank, world_size)
    assert symm_mem.get_symm_mem_workspace(name, 10).buffer_ptrs == small.buffer_ptrs
    large = symm_mem.get_symm_mem_workspace(name, 3_000_000)
    assert large.buffer_size >= 3_000_000
    assert symm_mem.get_symm_mem_workspace(name, 3_000_000).buffer_ptrs == large.buffer_ptrs
    large.get_buffer(rank, (5,), torch.int64).fill_(rank)
    large.barrier(channel=0)
    for peer in range(world_size):
        assert large.get_buffer(peer, (5,), torch.int64).tolist() == [peer] * 5
    large.barrier(channel=0)
    other = dist.new_group()
    assert symm_mem.get_symm_mem_workspace(other.group_name, 16).buffer_ptrs != large.buffer_ptrs


@pytest.mark.ranks(2, backend=None)
def test_a_workspace_goes_with_its_group(rank: int, world_size: int) -> None:
    for turn in range(3):
        init_process_group(name=f"turn-{turn}")
        name = dist.group.WORLD.group_name
        window = symm_mem.get_symm_mem_workspace(name, 4096)
        window.get_buffer(rank, (1,), torch.int32).fill_(turn * world_size + rank)
        window.barrier(channel=0)
        peer = world_size - 1 - rank
        assert int(window.get_buffer(peer, (1,), torch.int32)) == turn * world_size + peer
        window.barrier(channel=0)
        assert len(_workspace._workspaces) == 1
        del window
        dist.destroy_process_group()
        gc.collect()
        assert not _workspace._workspaces


def test_a_workspace_does_not_grow_during_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"requested size \(4096 bytes\) is greater than .* workspace \(16 bytes\)"):
        _workspace._grown(None, "0", torch.device("cuda", 0), 16, 4096)


@pytest.mark.ranks([2, 4])
def test_pipelines_call_for_every_rank(rank: int, world_size: int) -> None:
    name = dist.group.WORLD.group_name
    shards: list[torch.Tensor] = [torch.full((3, 5), float(rank)), torch.full((1,), rank, dtype=torch.uint8)]
    wholes = [torch.empty(3 * world_size, 5), torch.empty(world_size, dtype=torch.uint8)]
    for needed in (True, False, True):
        seen: list[tuple[int, int]] = []

        def consume(parts: list[torch.Tensor], peer: int, seen: list[tuple[int, int]] = seen) -> None:
            assert torch.equal(parts[0], torch.full((3, 5), float(peer))) and parts[0].is_contiguous()
            seen.append((peer, int(parts[1])))

        symm_mem._pipelined_multi_all_gather_and_consume(shards, consume, wholes, name, needed)
        order = [(rank + step) % world_size for step in range(world_size)]
        assert seen == [(peer, peer) for peer in order]
        if needed:
            assert wholes[1].tolist() == wholes[0][::3, 0].tolist() == list(range(world_size))
    with pytest.raises(ValueError, match="must be contiguous"):
        symm_mem._pipelined_all_gather_and_consume(torch.ones(4, 2).t(), print, torch.ones(2 * world_size, 4), name)
    with pytest.raises(ValueError, match="do not make"):
        symm_mem._pipelined_all_gather_and_consume(torch.ones(2, 2), print, torch.ones(2 * world_size, 3), name)

    for dim, shape in ((0, (2 * world_size, 3)), (1, (3, 2 * world_size))):
        output, made = torch.empty(shape), []

        def produce(peer: int, out: torch.Tensor, made: list[int] = made) -> None:
            made.append(peer)
            out.fill_(100.0 * rank + peer)

        symm_mem._pipelined_produce_and_all2all(produce, output, name, out_chunk_dim=dim)
        assert sorted(made) == list(range(world_size)) and made[-1] == rank
        got = [float(part.unique()) for part in output.chunk(world_size, dim)]
        assert got == [100.0 * peer + rank for peer in range(world_size)]

    # A failed pipeline leaves nothing to the next.
    def fail(part: torch.Tensor, peer: int) -> None:
        raise KeyError("mine")

    whole = torch.empty(2 * world_size, 2)
    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            symm_mem._pipelined_all_gather_and_consume(torch.ones(2, 2), fail, torch.empty(2 * world_size, 2), name)
        own = torch.full((2, 2), float(rank))
        symm_mem._pipelined_all_gather_and_consume(own, lambda part, peer: None, whole, name)
        assert whole[::2, 0].tolist() == list(range(world_size))
    with pytest.raises(ValueError, match="do not divide dimension 0"):
        symm_mem._pipelined_produce_and_all2all(print, torch.empty(world_size + 1, 1), name)


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


@pytest.mark.ranks(2)
def test_all_memory_is_given_back(rank: int, world_size: int) -> None:
    """Memory lasts until tensor, handle and view are dropped, in any order, and with and without their group."""
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
        # Without this barrier, the next segment that a peer advertises could count here until it is mapped.
        dist.barrier()
    for _ in range(10):
        group = dist.new_group(list(range(world_size)))
        tensor, window = opened(1, group=group)
        window.barrier()
        own = view(window, rank)
        dist.destroy_process_group(group)
        del tensor, window, group
        assert bool((own == 1).all())
        del own
        gc.collect()
    assert kilobytes() <= before + 8


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

        assert os.waitpid(fork(child), 0)[1] == 0
        assert [float(each[3]) for each in held[2:]] == [rank, 1 - rank]
        assert float(held[0][3]) == rank
        held[1].barrier()
        assert not held[1].get_signal_pad(rank).view(torch.int32).any()
        own = held[2]
        held.clear()
        # The last reference to the memory is dropped in the child.
        assert os.waitpid(fork(lambda: None if float(own[3]) == rank else os._exit(1)), 0)[1] == 0
        dist.barrier()
        assert float(own[3]) == rank

    results = run_ranks(body, 2)
    assert all("stays taken" not in log for log in results.logs), results.logs

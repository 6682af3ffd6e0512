"""Which groups have symmetric memory, and the workspaces that groups keep."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torchs
import torch_symm
import torch_symm.symm_mem as symm_mem
from ranks import init, meet, run_ranks
from torch_symm.symm_mem import _groups, _test_mode, _workspace


def enabled(rank: int, world: int) -> None:
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
    assert is_enabled(gloo.group_name) and gloo.group_name in torchs._group_name_to_store
    with pytest.raises(RuntimeError, match="no such group"):
        symm_mem.enable_symm_mem_for_group("no such group")


def test_symm_groups_are_enabled_and_others_can_be() -> None:
    run_ranks(enabled, 2)


def on_two_nodes(rank: int, world: int) -> None:
    _groups._this_node = lambda: (f"boot-{rank // 2}", f"node{rank // 2}")  # type: ignore[assignment]
    name = dist.group.WORLD.group_name
    with pytest.raises(torch_symm.SymmConfigError) as caught:
        symm_mem.enable_symm_mem_for_group(name)
    assert f"group {name!r} has rank 0 on node0, rank 1 on node0, rank 2 on node1" in str(caught.value)
    assert not symm_mem.is_symm_mem_enabled_for_group(name)
    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    symm_mem.enable_symm_mem_for_group(pairs[rank // 2].group_name)


def test_a_group_on_two_nodes_is_refused_by_name() -> None:
    run_ranks(on_two_nodes, 3, backend="gloo")


def one_does_not_come(rank: int, world: int) -> None:
    init(rank, world, backend="gloo", timeout=2)
    if rank != 1:
        with pytest.raises(torch_symm.SymmTimeoutError, match=rf"rank {rank}: .* for rank 1 of 3"):
            symm_mem.enable_symm_mem_for_group(dist.group.WORLD.group_name)
    meet("ended", rank, world)


def test_ranks_that_do_not_come_are_named() -> None:
    run_ranks(one_does_not_come, 3, backend=None, timeout=30)


def workspaces(rank: int, world: int) -> None:
    name = dist.group.WORLD.group_name
    small = symm_mem.get_symm_mem_workspace(name, 1000)
    assert small.buffer_size >= 1000 and (small.rank, small.world_size) == (rank, world)
    assert symm_mem.get_symm_mem_workspace(name, 10).buffer_ptrs == small.buffer_ptrs
    large = symm_mem.get_symm_mem_workspace(name, 3_000_000)
    assert large.buffer_size >= 3_000_000
    assert symm_mem.get_symm_mem_workspace(name, 3_000_000).buffer_ptrs == large.buffer_ptrs
    large.get_buffer(rank, (5,), torch.int64).fill_(rank)
    large.barrier(channel=0)
    for peer in range(world):
        assert large.get_buffer(peer, (5,), torch.int64).tolist() == [peer] * 5
    large.barrier(channel=0)
    other = dist.new_group()
    assert symm_mem.get_symm_mem_workspace(other.group_name, 16).buffer_ptrs != large.buffer_ptrs


@pytest.mark.parametrize("world", (1, 2, 4))
def test_workspaces_grow(world: int) -> None:
    run_ranks(workspaces, world)


def groups_of_one_name(rank: int, world: int) -> None:
    for turn in range(3):
        init(rank, world, name=f"turn-{turn}")
        name = dist.group.WORLD.group_name
        window = symm_mem.get_symm_mem_workspace(name, 4096)
        window.get_buffer(rank, (1,), torch.int32).fill_(turn * world + rank)
        window.barrier(channel=0)
        assert int(window.get_buffer(world - 1 - rank, (1,), torch.int32)) == turn * world + world - 1 - rank
        window.barrier(channel=0)
        assert len(_workspace._workspaces) == 1
        del window
        dist.destroy_process_group()
        gc.collect()
        assert not _workspace._workspaces


def test_a_workspace_goes_with_its_group() -> None:
    run_ranks(groups_of_one_name, 2, backend=None)


def test_a_workspace_does_not_grow_during_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    sentence = (
        r"get_symm_mem_workspace\(\): the requested size \(4096 bytes\) is greater than the size of the "
        r"currently allocated workspace \(16 bytes\)"
    )
    with pytest.raises(RuntimeError, match=sentence):
        _workspace._grown(None, "0", torch.device("cuda", 0), 16, 4096)


def pipelines(rank: int, world: int) -> None:
    name = dist.group.WORLD.group_name
    shards: list[torch.Tensor] = [torch.full((3, 5), float(rank)), torch.full((1,), rank, dtype=torch.uint8)]
    wholes = [torch.empty(3 * world, 5), torch.empty(world, dtype=torch.uint8)]
    for needed in (True, False, True):
        seen: list[tuple[int, int]] = []

        def consume(parts: list[torch.Tensor], peer: int, seen: list[tuple[int, int]] = seen) -> None:
            assert torch.equal(parts[0], torch.full((3, 5), float(peer))) and parts[0].is_contiguous()
            seen.append((peer, int(parts[1])))

        symm_mem._pipelined_multi_all_gather_and_consume(shards, consume, wholes, name, needed)
        order = [(rank + step) % world for step in range(world)]
        assert seen == [(peer, peer) for peer in order]
        if needed:
            assert wholes[1].tolist() == list(range(world)) and wholes[0][::3, 0].tolist() == list(range(world))
    with pytest.raises(ValueError, match="must be contiguous"):
        symm_mem._pipelined_all_gather_and_consume(torch.ones(4, 2).t(), print, torch.ones(2 * world, 4), name)
    with pytest.raises(ValueError, match="do not make"):
        symm_mem._pipelined_all_gather_and_consume(torch.ones(2, 2), print, torch.ones(2 * world, 3), name)

    for dim, shape in ((0, (2 * world, 3)), (1, (3, 2 * world))):
        output, made = torch.empty(shape), []

        def produce(peer: int, out: torch.Tensor, made: list[int] = made) -> None:
            made.append(peer)
            out.fill_(100.0 * rank + peer)

        symm_mem._pipelined_produce_and_all2all(produce, output, name, out_chunk_dim=dim)
        assert sorted(made) == list(range(world)) and made[-1] == rank
        assert [float(part.unique()) for part in output.chunk(world, dim)] == [
            100.0 * peer + rank for peer in range(world)
        ]
    with pytest.raises(ValueError, match="do not divide dimension 0"):
        symm_mem._pipelined_produce_and_all2all(print, torch.empty(world + 1, 1), name)


@pytest.mark.parametrize("world", (2, 4))
def test_pipelines_call_for_every_rank(world: int) -> None:
    run_ranks(pipelines, world)


def failing_consumer(rank: int, world: int) -> None:
    name = dist.group.WORLD.group_name

    def fail(part: torch.Tensor, peer: int) -> None:
        raise KeyError("mine")

    def ignore(part: Any, peer: Any) -> None:
        pass

    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            symm_mem._pipelined_all_gather_and_consume(torch.ones(2, 2), fail, torch.empty(2 * world, 2), name)
        whole = torch.empty(2 * world, 2)
        symm_mem._pipelined_all_gather_and_consume(torch.full((2, 2), float(rank)), ignore, whole, name)
        assert whole[::2, 0].tolist() == list(range(world))


def test_a_failed_pipeline_leaves_nothing_to_the_next() -> None:
    run_ranks(failing_consumer, 2)

"""Multi-node groups: how they are made, rejected, split, and used."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch_symm
from launch import on_nodes, run_nodes


def total(group: dist.ProcessGroup | None = None) -> float:
    tensor = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


@on_nodes(2, 2)
def test_groups_of_ranks_here_and_there(rank: int) -> None:
    assert total() == 10
    for members in ([0, 1], [1, 2], [0, 1, 3], [3]):
        group = dist.new_group(members)
        if rank in members:
            assert total(group) == sum(member + 1 for member in members)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    assert total(mesh["shard"].get_group()) == (3 if rank < 2 else 7)
    assert total(mesh["replicate"].get_group()) == (4 if rank % 2 == 0 else 6)
    assert f'node "{"ba"[rank // 2]}"' in torch_symm.describe()
    with pytest.raises(
        torch_symm.SymmConfigError, match=r'several nodes: node "a" \(ranks 0 and 1\), node "b".*intra_node_group'
    ):
        symm_mem.rendezvous(symm_mem.empty(16, device="cpu"), dist.group.WORLD.group_name)
    neighbour = rank ^ 1
    if rank < neighbour:
        dist.send(torch.full((3,), float(rank)), neighbour)
    else:
        got = torch.zeros(3)
        assert dist.recv(got, neighbour) == neighbour and got.tolist() == [float(neighbour)] * 3
    assert total() == 10, "a refusal leaves the group alone"
    node = torch_symm.intra_node_group()
    assert dist.get_process_group_ranks(node) == ([0, 1] if rank < 2 else [2, 3])
    assert torch_symm.intra_node_group() is node and total(node) == (3 if rank < 2 else 7)
    dist.destroy_process_group(node)
    assert torch_symm.intra_node_group() is not node and total(torch_symm.intra_node_group()) == (3 if rank < 2 else 7)


@on_nodes(2, 2)
def test_ranks_that_list_other_members_are_refused(rank: int) -> None:
    # Ranks 0 and 3 each list a group of both nodes, then one of their own node.
    for here, there in (([0, 2], [1, 3]), ([0, 1], [2, 3])):
        if rank in (0, 3):
            with pytest.raises(torch_symm.SymmConfigError) as refused:
                dist.new_group(here if rank == 0 else there, timeout=timedelta(seconds=60))
            for word in ("disagree on the members of group", "its rank 0 lists", str(here), "its rank ", str(there)):
                assert word in str(refused.value), refused.value
        else:
            # This rank does not make the group, but must number later groups as the others do.
            dist.distributed_c10d._world.group_count += 1
    assert total() == 10


@on_nodes(2, 2)
def test_a_failed_join_leaves_the_records_of_a_node_that_misses_a_rank(rank: int, world_size: int) -> None:
    store: Any = dist.distributed_c10d._get_default_store()

    def ours() -> set[str]:
        return {key.rpartition("//")[2] for key in store.list_keys() if "symm-" in key or "//symm/" in key}

    ranks.meet("joined", rank, world_size)
    before = ours()
    ranks.meet("before", rank, world_size)
    if rank == 3:
        dist.distributed_c10d._world.group_count += 1
    else:
        # Long enough for ranks 0 and 1 to meet on a busy node.
        with pytest.raises(torch_symm.SymmTimeoutError, match="for rank 3 "):
            dist.new_group(timeout=timedelta(seconds=3))
    ranks.meet("failed", rank, world_size)
    # Rank 2, whose node misses a rank, has left its record. The ranks of the other node have all joined and left
    # nothing.
    left = before | {f"symm-node/2/1/symm/{dist.distributed_c10d._world.group_count - 1}/0/0"}
    assert ours() == left
    ranks.meet("seen", rank, world_size)
    # The next group succeeds in spite of the record, and leaves no key.
    group = dist.new_group()
    assert total(group) == 10
    ranks.meet("again", rank, world_size)
    assert ours() == left


@pytest.mark.skipif(not hasattr(dist.ProcessGroup, "merge_remote_group"), reason="this torch cannot merge groups")
@on_nodes(2, 2)
def test_groups_of_several_nodes_merge(rank: int, world_size: int) -> None:
    limit = timedelta(seconds=20)
    whole: Any = dist.group.WORLD
    members = [0, 1] if rank < 2 else [2, 3]
    part = whole.split_group(members, group_name=f"part-{rank // 2}", timeout=limit)
    store = dist.PrefixStore("merge", dist.distributed_c10d._get_default_store())
    again = part.merge_remote_group(store, world_size, group_name="merged", timeout=limit)
    tensor = torch.tensor([float(rank + 1)])
    again.allreduce([tensor]).wait()
    assert tensor.item() == 10 and again.size() == world_size


def on_one_of_two_nodes(rank: int) -> None:
    os.environ["SYMM_TEST_NODE"] = "ab"[rank]
    os.environ.pop("SYMM_INTER_NODE_BACKEND", None)


@pytest.mark.ranks(2, backend=None, env={"GLOO_SOCKET_IFNAME": "lo"})
@pytest.mark.parametrize("refusing", [(), (0, 1), (1,)], ids=str)
def test_nodes_are_connected_unless_a_rank_refuses(rank: int, world_size: int, refusing: tuple[int, ...]) -> None:
    on_one_of_two_nodes(rank)
    if not refusing:
        ranks.init(rank, world_size)
        assert total() == 3
        return
    if rank in refusing:
        os.environ["SYMM_INTER_NODE_BACKEND"] = "none"
    why = (
        rf'different nodes \("a" and "b", .*rank {refusing[0]} has SYMM_INTER_NODE_BACKEND=none or '
        'inter_node_backend="none", auto on'
    )
    with pytest.raises(torch_symm.SymmConfigError, match=why):
        ranks.init(rank, world_size)


@pytest.mark.ranks(2, backend=None, env={"GLOO_SOCKET_IFNAME": "lo"})
def test_nodes_that_did_not_meet_in_time_meet_at_the_next_attempt(rank: int, world_size: int) -> None:
    on_one_of_two_nodes(rank)
    store = ranks.file_store("default", world_size)
    if rank == 0:
        with pytest.raises(torch_symm.SymmTimeoutError, match="for rank 1 to join"):
            dist.init_process_group("symm", store=store, rank=0, world_size=2, timeout=timedelta(seconds=0.5))
        store.set("failed", "")
    else:
        store.wait(["failed"], timedelta(seconds=30))
    dist.init_process_group("symm", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    assert total() == 3


@pytest.mark.ranks(3, backend=None)
@pytest.mark.parametrize("wrong", [0, 1], ids=["first node", "second node"])
def test_all_ranks_are_told_of_a_node_that_cannot_be_reached(rank: int, world_size: int, wrong: int) -> None:
    node = int(rank == 2) if wrong == 0 else int(rank > 0)
    os.environ.update(SYMM_TEST_NODE="ab"[node], GLOO_SOCKET_IFNAME="nothing0" if node == wrong else "lo")
    os.environ.pop("SYMM_INTER_NODE_BACKEND", None)
    listens = r'rank [01] \(node "a", pid \d+\) cannot listen for the other nodes of .*GLOO_SOCKET_IFNAME="nothing0"'
    expected = listens if wrong == 0 else r'rank 1 \(node "b", pid \d+\) could not make rail 0 .*nothing0'
    begun = time.monotonic()
    with pytest.raises(dist.DistBackendError, match=expected):
        ranks.init(rank, world_size, timeout=100)
    assert time.monotonic() - begun < 50


def test_a_forked_child_reads_its_own_settings() -> None:
    # This call makes the parent read its settings, if it has not read them before.
    torch_symm.dump_trace()
    members = run_nodes(lambda rank, world_size: dist.get_process_group_ranks(torch_symm.intra_node_group()), (1, 1))
    assert list(members) == [[0], [1]]


def in_a_child(use: Callable[[], object]) -> str:
    """The outcome of ``use`` in a forked child, which must not hang."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            use()
            answer = "returned"
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    ready, _, _ = select.select([reader], [], [], 10)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    answer = os.read(reader, 10_000).decode() if ready else "hangs"
    os.close(reader)
    return answer


@on_nodes(1, 1)
def test_a_forked_child_cannot_use_the_group_and_leaves_it_alone(rank: int, world_size: int) -> None:
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    tensor, got = torch.full((4,), 1.0 + rank), torch.zeros(2)
    dist.barrier()
    if rank == 0:
        reduced, received = dist.all_reduce(tensor, async_op=True), dist.irecv(got, 1)
        any_source = dist.irecv(got, tag=5)
        assert reduced is not None and received is not None and any_source is not None
        overlapping, freed = torch.ones(1).expand(4), torch.ones(4)
        freed.untyped_storage().resize_(0)
        refused: list[Callable[[], object]] = [
            reduced.wait,
            received.wait,
            any_source.wait,
            lambda: reduced.wait(timedelta(milliseconds=1)),
            lambda: dist.all_reduce(torch.ones(4)),
            lambda: dist.barrier(async_op=True),
            lambda: dist.send(torch.ones(1), 1),
            lambda: dist.recv(torch.ones(1)),
            dist.monitored_barrier,
        ]
        for use in refused:
            answer = in_a_child(use)
            assert answer.startswith("SymmConfigError") and "is a forked child" in answer, answer
        own_errors: list[Callable[[], object]] = [
            lambda: dist.all_reduce(overlapping),
            lambda: dist.send(freed, 1),
            lambda: dist.recv(overlapping),
        ]
        for use in own_errors:
            assert in_a_child(use) not in ("hangs", "returned")
        # These calls return normally in a child.
        for use in (reduced.is_completed, received.is_completed, backend.abort, dist.destroy_process_group):
            assert in_a_child(use) == "returned"
        assert not any("symm-monitored" in key for key in ranks.file_store("default", world_size).list_keys())
        ranks.meet("forked", rank, world_size)
        assert reduced.wait() and received.wait() and got.tolist() == [7, 7]
        dist.send(torch.ones(2), 1)
        assert any_source.wait()
    else:
        ranks.meet("forked", rank, world_size, timeout=120)
        dist.all_reduce(tensor)
        dist.send(torch.full((2,), 7.0), 0)
        dist.recv(got, 0)
        dist.send(got, 0, tag=5)
    assert bool((tensor == 3).all())
    backend.monitored_barrier()


@pytest.mark.ranks(2, backend=None, env={"GLOO_SOCKET_IFNAME": "lo"})
def test_options_choose_for_later_groups_too(rank: int, world_size: int) -> None:
    on_one_of_two_nodes(rank)
    os.environ["SYMM_INTER_NODE_BACKEND"] = "none"
    store = ranks.file_store("default", world_size)
    options = torch_symm.Options(timeout=30, inter_node_backend="gloo")
    dist.init_process_group("symm", store=store, rank=rank, world_size=world_size, pg_options=options)
    assert total() == 3 and total(dist.new_group([0, 1])) == 3


@pytest.mark.parametrize("timeout", [timedelta(days=365 * 250), timedelta(days=365 * 300)], ids=str)
@on_nodes(1, 1)
def test_a_group_may_have_a_timeout_of_centuries(rank: int, timeout: timedelta) -> None:
    group = dist.new_group([0, 1], timeout=timeout)
    dist.all_reduce(tensor := torch.ones(100_000), group=group)
    assert bool((tensor == 2).all())
    if rank == 0:
        dist.send(tensor, 1, group=group)
    else:
        dist.recv(got := torch.zeros(100_000), 0, group=group)
        assert bool((got == 2).all())


@pytest.mark.parametrize(
    ("option", "usual", "other", "differing"), [("order", "rank", "tree", 2), ("reduce_dtype", "tensor", "float32", 3)]
)
@on_nodes(2, 2)
def test_ranks_that_choose_differently_are_told_at_joining(
    rank: int, world_size: int, option: str, usual: str, other: str, differing: int
) -> None:
    options = torch_symm.Options(**{option: other if rank >= differing else usual})
    with pytest.raises(torch_symm.SymmConfigError) as caught:
        dist.new_group(list(range(world_size)), pg_options=options)
    text = str(caught.value)
    assert 'rank 0 (node "a", pid' in text and f'has {option}="{usual}"' in text, text
    assert f'rank {differing} (node "b", pid' in text, text
    assert f'has {option}="{other}"; give torch_symm.Options({option}=' in text, text


@pytest.mark.parametrize("choice", ["nccl", "auto"])
def test_cpu_tensors_go_through_gloo_under_every_choice(choice: str) -> None:
    def summed(rank: int, world_size: int) -> None:
        assert total() == 3 and total(dist.new_group([0, 1])) == 3

    run_nodes(summed, (1, 1), choice=choice)


@on_nodes(2, 2)
def test_groups_leave_no_keys_in_the_store(rank: int, world_size: int) -> None:
    store = ranks.file_store("default", world_size)

    def soon_without(unwanted: Callable[[str], bool]) -> None:
        until = time.monotonic() + 10
        while (keys := [key for key in store.list_keys() if unwanted(key)]) and time.monotonic() < until:
            time.sleep(0.01)
        assert not keys, keys

    dist.barrier()
    ranks.meet("joined", rank, world_size)
    before = set(store.list_keys())
    ranks.meet("seen", rank, world_size)
    group = dist.new_group([0, 1, 2, 3])
    assert total(group) == total() == 10
    # The ranks may still be removing the addresses of their rails when they have joined.
    dist.barrier()
    ranks.meet("used", rank, world_size)
    soon_without(lambda key: "symm-rail" in key)
    peer = (rank + 2) % 4
    for count in (3, 100_000):
        work = dist.isend(torch.ones(count), peer, group=group)
        dist.recv(torch.empty(count), peer, group=group)
        assert work is not None
        work.wait()
    # This message goes only in one direction.
    if rank == 0:
        dist.send(torch.ones(3), 3, group=group)
    elif rank == 3:
        dist.recv(torch.empty(3), 0, group=group)
    dist.destroy_process_group(group)
    ranks.meet("left", rank, world_size)
    soon_without(lambda key: key not in before)


@on_nodes(2, 2, env={"TORCH_GLOO_LAZY_INIT": "1"})
def test_gloo_that_connects_later_finds_its_addresses() -> None:
    group = dist.new_group([0, 1, 2, 3])
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor, group=group)
    assert bool((tensor == 4).all())

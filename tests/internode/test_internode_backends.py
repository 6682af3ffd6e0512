"""Nodes that are connected by a backend that the user names: plug-ins in C++ and in Python."""

from __future__ import annotations

import os
from typing import Any

import expected
import pytest
import ranks
import torch
import torch.distributed as dist
import torch_symm
from launch import on_nodes, run_nodes
from torch.distributed import distributed_c10d

LAYOUT = (2, 2)
#: The calls that a backend needs to connect nodes.
CALLS = ("_allgather_base", "alltoall_base", "broadcast", "send", "recv")
made: list[str] = []


def plain(store: Any, rank: int, size: int, timeout: Any) -> Any:
    """Gloo under a different name, registered by torch's shorter interface for plug-ins."""
    made.append("plain")
    return distributed_c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)


def extended(options: Any, chosen: Any) -> Any:
    """Gloo under a different name, registered by torch's longer interface for plug-ins."""
    assert chosen is None and options.group_id and options.global_ranks_in_group == list(range(options.group_size))
    made.append("extended")
    return distributed_c10d.ProcessGroupGloo(
        options.store, options.group_rank, options.group_size, timeout=options.timeout
    )


class InPython(torch._C._distributed_c10d.Backend):
    """A backend of a Python class, which counts its calls."""

    lacking: str = ""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self.gloo = distributed_c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)
        made.append("inpython")

    def called(self, name: str, *arguments: Any) -> Any:
        if name == self.lacking:
            raise NotImplementedError(f"there is no {name}")
        made.append(name)
        return getattr(self.gloo, name)(*arguments)

    def all_gather_single(self, *arguments: Any) -> Any:
        return self.called("_allgather_base", *arguments)

    def all_to_all_single(self, *arguments: Any) -> Any:
        return self.called("alltoall_base", *arguments)

    def broadcast(self, *arguments: Any) -> Any:
        return self.called("broadcast", *arguments)

    def send(self, *arguments: Any) -> Any:
        return self.called("send", *arguments)

    def recv(self, *arguments: Any) -> Any:
        return self.called("recv", *arguments)

    def abort(self) -> None:
        self.gloo = None


class Lacking(InPython):
    lacking = "alltoall_base"


def register() -> None:
    """Registers the plug-ins of this file with torch, in each process before a group is made."""
    for name, create, longer in (
        ("plain", plain, False),
        ("extended", extended, True),
        ("inpython", InPython, False),
        ("lacking", Lacking, False),
    ):
        dist.Backend.register_backend(name, create, longer, devices=["cpu"])
    dist.Backend.register_backend("forgpus", plain, devices=["cuda"])


def results(group: dist.ProcessGroup | None, rank: int, world_size: int) -> list[torch.Tensor]:
    """The results of collectives and messages, short and long."""
    found = []
    for count in (3, 5000, 400_003):
        mine = expected.seeded(torch.bfloat16, (count,), rank)
        found.append(mine.clone())
        dist.all_reduce(found[-1], group=group)
        found.append(torch.empty(world_size * count, dtype=mine.dtype))
        dist.all_gather_into_tensor(found[-1], mine, group=group)
        sent = expected.seeded(torch.int32, (world_size * count,), rank)
        found.append(torch.empty_like(sent))
        dist.all_to_all_single(found[-1], sent, group=group)
        found.append(mine.clone())
        dist.broadcast(found[-1], 1, group=group)
        found.append(torch.empty(count, dtype=mine.dtype))
        work = dist.isend(mine, (rank + 2) % world_size, group=group, tag=5)
        dist.recv(found[-1], (rank + 2) % world_size, group=group, tag=5)
        assert work is not None
        work.wait()
    return found


def as_gloo(rank: int, world_size: int, choice: str, backend: str) -> list[str]:
    """Compares a group that uses ``choice`` between nodes with one that uses Gloo; returns the plug-in's calls."""
    register()
    wanted = results(None, rank, world_size)
    made.clear()
    group = dist.new_group(
        list(range(world_size)), pg_options=torch_symm.Options(timeout=60, inter_node_backend=choice)
    )
    assert group is not None
    for got, right in zip(results(group, rank, world_size), wanted, strict=True):
        expected.assert_same_bits(got, right, choice)
    paths = torch_symm.stats()["inter_node"][group.group_name]
    assert paths.keys() == {f"{backend} rail {rank % 2}", f"{backend} rank {(rank + 2) % world_size}"}, paths
    assert all(path["sent"] > 400_000 for path in paths.values()), paths
    calls = list(made)
    dist.destroy_process_group(group)
    return calls


@pytest.mark.parametrize(
    ("choice", "backend"),
    [("plain", "plain"), ("cpu:extended,cuda:nccl", "extended"), ("CPU:Plain", "plain"), ("inpython", "inpython")],
)
def test_a_plug_in_gives_the_bits_of_gloo(choice: str, backend: str) -> None:
    for calls in run_nodes(as_gloo, LAYOUT, choice, backend):
        # The rail, and the link with one peer.
        assert [call for call in calls if call not in CALLS] == [backend] * 2, calls
        assert backend != "inpython" or all(calls.count(call) > 1 for call in CALLS), calls


@pytest.mark.ranks(4, backend=None)
def test_the_environment_names_a_plug_in(rank: int, world_size: int) -> None:
    """The environment chooses the backend, also for later groups."""
    os.environ.update(SYMM_INTER_NODE_BACKEND="plain", SYMM_TEST_NODE="ab"[rank // 2], GLOO_SOCKET_IFNAME="lo")
    register()
    ranks.init(rank, world_size)
    for group in (dist.group.WORLD, dist.new_group([0, 3, 1])):
        if rank in (0, 1, 3):
            dist.all_reduce(tensor := torch.ones(70_000), group=group if rank != 2 else None)
            assert tensor[0].item() == dist.get_world_size(group)
        elif group is dist.group.WORLD:
            dist.all_reduce(torch.ones(70_000))
    # Rank 1 has no rail in the second group, because that group has only one rank on node b.
    assert made == (["plain"] if rank in (1, 2) else ["plain"] * 2), made


@on_nodes(1, 1)
def test_cpu_tensors_that_nobody_serves_go_by_gloo() -> None:
    """A backend of CUDA tensors leaves CPU tensors to Gloo."""
    register()
    group = dist.new_group([0, 1], pg_options=torch_symm.Options(timeout=60, inter_node_backend="forgpus"))
    dist.all_reduce(tensor := torch.ones(3), group=group)
    assert tensor.tolist() == [2.0] * 3 and not made
    assert list(torch_symm.stats()["inter_node"][group.group_name]) == ["gloo rail 0"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("choice", "why"),
    [
        ("nobody", r"torch knows no backend 'nobody'; there are 'none', 'auto',.* 'gloo',.*'plain'"),
        ("cpu:gloo,cuda:nobody", "torch knows no backend 'nobody'"),
        ("cpu:forgpus", "'forgpus' serves cuda, not cpu"),
        ("xpu:plain", "'xpu:plain' is for 'xpu'; nodes are connected for cpu and cuda"),
        ("plain,gloo", "'plain' names no device: cpu:NAME,cuda:NAME does"),
        ("symm", "'symm' cannot connect nodes: it connects the ranks of one node"),
        ("mpi", "'mpi' cannot connect nodes: torch makes its groups by all ranks of a job at once"),
        ("x" * 200, "the names are longer than 100 characters"),
    ],
)
@pytest.mark.ranks(2, backend=None)
def test_an_unknown_choice_is_refused_with_those_there_are(rank: int, world_size: int, choice: str, why: str) -> None:
    register()
    store = ranks.file_store("default", world_size)
    os.environ["SYMM_INTER_NODE_BACKEND"] = choice
    options = torch_symm.Options(timeout=30, inter_node_backend=choice)
    with pytest.raises(ValueError, match=f'inter_node_backend="{choice}": {why}'):
        dist.init_process_group("symm", store=store, rank=rank, world_size=world_size, pg_options=options)
    with pytest.raises(torch_symm.SymmConfigError, match=f"SYMM_INTER_NODE_BACKEND={choice}: {why}"):
        dist.init_process_group("symm", store=store, rank=rank, world_size=world_size)


@on_nodes(*LAYOUT)
def test_a_backend_that_lacks_a_call_is_named(world_size: int) -> None:
    register()
    why = "'lacking' cannot connect nodes: all_to_all of one tensor with uneven parts: there is no alltoall_base"
    with pytest.raises(dist.DistBackendError, match=why):
        dist.new_group(list(range(world_size)), pg_options=torch_symm.Options(timeout=60, inter_node_backend="lacking"))


@pytest.mark.parametrize(
    ("layout", "other"), [((2, 2), 0), ((2, 2), 1), ((2, 2), 3), ((1, 1, 1), 2), ((3, 3), 5)], ids=str
)
@on_nodes()
def test_ranks_that_name_different_backends_are_told_at_joining(rank: int, world_size: int, other: int) -> None:
    register()
    options = torch_symm.Options(timeout=60, inter_node_backend="plain" if rank == other else "gloo")
    with pytest.raises(torch_symm.SymmConfigError) as caught:
        dist.new_group(list(range(world_size)), pg_options=options)
    text = str(caught.value)
    assert "would connect nodes by different backends: rank 0 (node" in text, text
    assert 'by "cpu:plain"' in text and 'by "cpu:gloo"' in text, text
    assert other == 0 or f"rank {other} (node" in text, text

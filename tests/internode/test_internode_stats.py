"""``torch_symm.stats()`` reports what each rail, and each pair of ranks, has sent to other nodes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch_symm
from launch import on_nodes

#: Size of the header slot, which a node sends to each other node in every call.
SLOT = 4096

Counts = dict[str, int]


def grown(path: str, before: dict[str, Any]) -> Counts:
    """The counts of ``path`` of the default group since ``before``; empty if nothing was ever sent on it."""
    old = before.get("inter_node", {}).get("default", {}).get(path, {})
    new = torch_symm.stats()["inter_node"]["default"].get(path, {})
    return {key: count - old.get(key, 0) for key, count in new.items()}


@on_nodes(2, 2)
def test_rails_share_the_bytes_of_a_call(rank: int) -> None:
    # Every call starts with one slot, on rail 0; the two rails of a node share the rest.
    head, rail = SLOT * (rank % 2 == 0), f"gloo rail {rank % 2}"
    found = []
    for call in (
        lambda: dist.all_reduce(torch.ones(4)),
        lambda: dist.all_reduce(torch.ones(1 << 20)),
        lambda: dist.broadcast(torch.ones(1 << 20), 0),
        lambda: dist.all_gather_into_tensor(torch.empty(4 << 18), torch.ones(1 << 18)),
    ):
        before = torch_symm.stats()
        call()
        found.append(grown(rail, before))
    short, long, broadcast, gathered = found
    assert short == ({"calls": 1, "transfers": 1, "sent": SLOT, "received": SLOT} if head else {})
    assert (long["calls"], long["sent"], long["received"]) == (1, (2 << 20) + head, (2 << 20) + head)
    assert (broadcast["sent"], broadcast["received"])[rank // 2] == (2 << 20) + head
    assert (broadcast["received"], broadcast["sent"])[rank // 2] == head
    assert (gathered["sent"], gathered["received"]) == ((1 << 20) + head, (1 << 20) + head)
    other = f"gloo rail {1 - rank % 2}"
    assert other not in torch_symm.stats()["inter_node"]["default"], "this rank has one rail"


@on_nodes(1, 1, 1)
def test_bytes_count_for_each_node_that_they_go_to() -> None:
    before = torch_symm.stats()
    dist.all_gather_into_tensor(torch.empty(3 << 16), torch.ones(1 << 16))
    count = grown("gloo rail 0", before)
    assert count["sent"] == count["received"] == 2 * ((4 << 16) + SLOT)


@on_nodes(2, 2)
def test_messages_are_counted_by_their_peer(rank: int) -> None:
    before, size = torch_symm.stats(), 100_000
    peer = (rank + 2) % 4
    for _ in range(2):
        work = dist.isend(torch.ones(size), peer)
        dist.recv(torch.empty(size), peer)
        assert work is not None
        work.wait()
    dist.barrier()
    count = grown(f"gloo rank {peer}", before)
    # The payloads of two messages, and their frames.
    assert count["calls"] == 4 and 8 * size < count["sent"] < 8 * size + 40 * SLOT, count
    assert 8 * size < count["received"] < 8 * size + 40 * SLOT, count
    dist.send(torch.ones(1), rank ^ 1) if rank % 2 else dist.recv(torch.empty(1), rank ^ 1)
    paths = torch_symm.stats()["inter_node"]["default"]
    assert [path for path in paths if "rank" in path] == [f"gloo rank {peer}"], "a message on one node is none"


@on_nodes(2, 2)
def test_each_group_has_counts_of_its_own() -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replicate, shard = (mesh[name].get_group() for name in ("replicate", "shard"))
    dist.all_reduce(torch.ones(4), group=shard)
    dist.all_reduce(torch.ones(1 << 20), group=replicate)
    counted = torch_symm.stats()["inter_node"]
    assert counted[replicate.group_name]["gloo rail 0"]["sent"] > 4 << 20
    assert shard.group_name not in counted, "nothing of a group on one node goes between nodes"
    name = replicate.group_name
    dist.destroy_process_group(replicate)
    assert torch_symm.stats()["inter_node"][name] == counted[name], "counts stay"

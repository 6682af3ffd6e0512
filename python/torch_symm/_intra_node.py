"""Multi-node groups: the part of a group on this node."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d

from torch_symm import _torch_compat

_of_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def intra_node_group(group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """Returns the ranks of ``group`` (the default group if ``None``) on this node, as their own group.

    Collective: all ranks of ``group`` call it. The first call makes the group, with the timeout of ``group``; later
    calls return the same one, until it is destroyed: all ranks destroy theirs, and the next call makes another.
    Functions that require one node, such as symmetric memory, work in it.

    Raises:
        SymmConfigError, SymmTimeoutError: the group cannot be formed.
    """
    whole = group if group is not None else distributed_c10d._get_default_group()
    if _of_groups.get(whole) not in distributed_c10d._world.pg_map:
        _of_groups[whole] = _make_node_group(whole)
    return _of_groups[whole]


def _make_node_group(whole: dist.ProcessGroup) -> dist.ProcessGroup:
    members = dist.get_process_group_ranks(whole)
    told: list[Any] = [None] * len(members)
    dist.all_gather_object(told, (_identity(), _torch_compat.next_number()), group=whole)
    own = [rank for rank, (node, _) in zip(members, told, strict=True) if node == _identity()]
    numbers, timeout = [number for _, number in told], _torch_compat.timeout_of(whole)
    return _torch_compat.new_group_among(own, numbers, backend="symm", timeout=timeout)


def _identity() -> str:
    from torch_symm._native import load

    return str(load()._node_id())

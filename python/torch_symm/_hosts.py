"""Groups on several hosts: engines between them, and the part of a group on this host."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend, Store


def make_backend(name: str, store: Store, rank: int, size: int, timeout: timedelta) -> Backend:
    """A Gloo group between hosts, one rank of each."""
    plugin = distributed_c10d.Backend._plugins.get("GLOO")
    if plugin is not None:  # from torch 2.14 on
        options = distributed_c10d._DistributedBackendOptions()
        options.store, options.group_rank, options.group_size = store, rank, size
        options.timeout, options.group_id = timeout, name
        made: Any = (
            plugin.creator_fn(options, None) if plugin.extended_api else plugin.creator_fn(store, rank, size, timeout)
        )
    else:
        if not dist.is_gloo_available():
            raise RuntimeError("this torch was built without Gloo, which is to connect the hosts")
        made = distributed_c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)
    return made  # type: ignore[no-any-return]


_of_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def host_group(group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """The ranks of ``group`` (the default group if ``None``) on this host, as a group of their own.

    Collective: all ranks of ``group`` call it. The first call makes the group, later ones return the same.
    What needs one host, such as symmetric memory, works there.

    Raises:
        SymmConfigError, SymmTimeout: the group cannot be formed.
    """
    whole = group if group is not None else distributed_c10d._get_default_group()
    if whole not in _of_groups:
        members = dist.get_process_group_ranks(whole)
        hosts: list[Any] = [None] * len(members)
        dist.all_gather_object(hosts, _identity(), group=whole)
        own = hosts[dist.get_rank(whole)]
        ranks = [rank for rank, host in zip(members, hosts, strict=True) if host == own]
        made = dist.new_group(ranks, backend="symm", use_local_synchronization=True, group_desc="host_group")
        assert isinstance(made, dist.ProcessGroup)
        _of_groups[whole] = made
    return _of_groups[whole]


def _identity() -> str:
    from torch_symm._native import load

    return str(load()._host())

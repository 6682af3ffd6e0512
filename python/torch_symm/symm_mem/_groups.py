"""Which groups have symmetric memory."""

from __future__ import annotations

import json
import platform
import time
import warnings
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch.distributed._symmetric_memory as torchs
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.distributed_c10d import GroupName

from torch_symm._native import load
from torch_symm._torch_compat import backend_of, timeout_of

#: One state for both modules, so that torch's and our functions use their fallbacks together.
_test_mode = torchs._test_mode

#: Groups whose ranks were found on one node.
_enabled: WeakSet[Any] = WeakSet()


def in_test_mode() -> bool:
    """Returns true inside ``_test_mode`` of this thread of execution."""
    return torchs._is_test_mode


def resolve(group_name: str) -> Any:
    """Returns the process group of this name.

    Raises:
        RuntimeError: no group has this name.
    """
    return _resolve_process_group(GroupName(group_name))


def is_symm(group: Any, device_type: str) -> bool:
    """Returns true if the ranks of ``group`` exchange tensors of ``device_type`` through symm."""
    try:
        return bool(backend_of(group, device_type).name() == "symm")
    except RuntimeError:  # the group has no backend for the device
        return False


def is_symm_mem_enabled_for_group(group_name: str) -> bool:
    """Returns true if the group ``group_name`` can use symmetric memory: it uses symm, or was enabled.

    Also true under ``_test_mode``. False for a name that no group has.
    """
    if in_test_mode():
        return _enabled_in_torch(GroupName(group_name))
    try:
        group = resolve(group_name)
    except RuntimeError:
        return False
    return (
        group in _enabled or _is_enabled_by_torch(group, group_name) or is_symm(group, "cpu") or is_symm(group, "cuda")
    )


def _is_enabled_by_torch(group: Any, group_name: str) -> bool:
    """Returns true if torch's own function enabled this group, and not an earlier group of the same name."""
    store = torchs._group_name_to_store.get(GroupName(group_name))
    return isinstance(store, c10d.PrefixStore) and store.underlying_store is c10d._get_process_group_store(group)


#: torch's own function, which `enable_fused_ops` may later replace in torch's module.
_enabled_in_torch = torchs.is_symm_mem_enabled_for_group


def enable_symm_mem_for_group(group_name: str) -> None:
    """Enables symmetric memory in the group ``group_name`` of any backend; symm groups need no such call. Collective.

    The ranks exchange their nodes through the group's store. The group's timeout limits the wait.

    Raises:
        SymmConfigError: the ranks are on several nodes; the message names the node of each rank.
        SymmTimeoutError: ranks did not call it in time; the message names them.
    """
    group = resolve(group_name)
    if group in _enabled:
        return
    _check_one_node(group, group_name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch says that its own backends need no such call
        torchs.enable_symm_mem_for_group(GroupName(group_name))
    _enabled.add(group)


def _check_one_node(group: Any, group_name: str) -> None:
    rank, ranks = group.rank(), group.size()
    store = c10d.PrefixStore("symm_mem/nodes", c10d._get_process_group_store(group))
    timeout = timeout_of(group)
    deadline = time.monotonic() + timeout.total_seconds()
    store.set(str(rank), json.dumps(_this_node()))
    nodes = []
    for peer in range(ranks):
        try:
            store.wait([str(peer)], timedelta(seconds=max(0.001, deadline - time.monotonic())))
        except RuntimeError as error:  # torch's FileStore does not raise the DistStoreError of the other stores
            late = [str(other) for other in range(peer, ranks) if not store.check([str(other)])]
            raise load().SymmTimeoutError(
                f"rank {rank}: enable_symm_mem_for_group({group_name!r}) waited {timeout.total_seconds():g} s "
                f"for rank {', '.join(late) or peer} of {ranks}"
            ) from error
        nodes.append(json.loads(store.get(str(peer))))
    with suppress(RuntimeError):  # the store cannot delete keys
        if store.add("read", 1) == ranks:
            for key in ("read", *map(str, range(ranks))):
                store.delete_key(key)
    if any(boot != nodes[0][0] for boot, _ in nodes):
        places = ", ".join(f"rank {peer} on {name}" for peer, (_, name) in enumerate(nodes))
        raise load().SymmConfigError(
            f"symmetric memory needs all ranks on one node, but group {group_name!r} has {places}"
        )


def _this_node() -> tuple[str, str]:
    """Returns the identity of the running kernel, and its name for human readers."""
    name = platform.node()
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), name
    return name, name

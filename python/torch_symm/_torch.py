"""Every difference between the versions of torch that the package's Python code goes by.

``torch_backend/compat.hpp`` has those of C++; ``_version.py`` names the versions.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend, Store
    from torch.distributed.device_mesh import DeviceMesh


def group_name(mesh: DeviceMesh, mesh_dim: int) -> Any:
    """The name of the group of one mesh dimension, also where Dynamo traces.

    ``funcol._resolve_group_name`` says the same, but in 2.12 and later makes a ``GroupName`` of it, which Dynamo does
    not follow.
    """
    # Whoever has a mesh has imported it; no group shall wait for that.
    funcol = torch.distributed._functional_collectives
    if hasattr(funcol, "_resolve_group"):
        group = funcol._resolve_group((mesh, mesh_dim))
        return group if isinstance(group, str) else group.group_name
    return funcol._resolve_group_name((mesh, mesh_dim))


def record_without_torch() -> None:
    """Tells torch that groups of symm record their calls themselves, as those of gloo do.

    From 2.15 on torch attaches a flight recorder of its own to every group of another backend, which costs some 2 µs a
    call. It still does where the program states how large that should be.
    """
    stated = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    recording = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if recording is not None and not any(map(os.environ.get, stated)):
        recording.add("symm")


def new_group(ranks: list[int] | None = None, **options: Any) -> dist.ProcessGroup:
    """``dist.new_group`` with one type for all versions; what a rank gets that is no member must not be used."""
    group: Any = dist.new_group(ranks, **options)
    return cast("dist.ProcessGroup", group)


def gloo(name: str, store: Store, rank: int, size: int, timeout: timedelta) -> Backend:
    """A Gloo backend that belongs to no group of torch's; it is a plug-in from 2.14 on.

    Raises:
        RuntimeError: this torch was built without Gloo, or its ranks do not meet.
    """
    plugin: Any = distributed_c10d.Backend._plugins.get("GLOO")
    if plugin is None:
        if not distributed_c10d.is_gloo_available():
            raise RuntimeError("this torch was built without Gloo")
        return distributed_c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)
    if not plugin.extended_api:
        made: Backend = plugin.creator_fn(store, rank, size, timeout)
        return made
    options: Any = torch._C._distributed_c10d._DistributedBackendOptions()
    options.store, options.group_rank, options.group_size = store, rank, size
    options.timeout, options.group_id = timeout, name
    made = plugin.creator_fn(options, None)
    return made


def nccl(name: str, store: Store, rank: int, size: int, timeout: timedelta) -> Backend:
    """An NCCL backend that belongs to no group of torch's: ``ProcessGroupNCCL``, also where 2.15 has another one, too.

    Raises:
        RuntimeError: this torch was built without NCCL, or finds no GPU.
    """
    if not distributed_c10d.is_nccl_available():
        raise RuntimeError("this torch was built without NCCL")
    backend: Any = distributed_c10d.ProcessGroupNCCL
    options = backend.Options()
    options._timeout, options.group_name, options.global_ranks_in_group = timeout, name, list(range(size))
    # It reads these when it is made: who watches the group ends what hangs, and no process ends because of that.
    watchful = dict.fromkeys(
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT"), "0"
    )
    before = {setting: os.environ.get(setting) for setting in watchful}
    os.environ.update(watchful)
    try:
        made: Backend = backend(store, rank, size, options)
    finally:
        for setting, value in before.items():
            if value is None:
                del os.environ[setting]
            else:
                os.environ[setting] = value
    return made

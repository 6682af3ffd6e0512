"""All differences between versions and settings of torch that matter to the package's Python code.

``torch_backend/compat.hpp`` has the C++ differences; ``_version.py`` lists the versions.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import wraps
from threading import Lock, local
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend, Store
    from torch.distributed.device_mesh import DeviceMesh


def group_name(mesh: DeviceMesh, mesh_dim: int) -> Any:
    """Returns the name of the group of one mesh dimension, also where Dynamo traces.

    ``funcol._resolve_group_name`` returns the same, but in 2.12 and later as a ``GroupName``, which Dynamo cannot
    trace.
    """
    # Not imported above, so that making a group does not wait for this module; code with a mesh has imported it.
    funcol = torch.distributed._functional_collectives
    if hasattr(funcol, "_resolve_group"):
        group = funcol._resolve_group((mesh, mesh_dim))
        return group if isinstance(group, str) else group.group_name
    return funcol._resolve_group_name((mesh, mesh_dim))


def backend_of(group: Any, device: torch.device | str) -> Any:
    """Returns the backend of a group for ``device``, without the wrapper of ``TORCH_DISTRIBUTED_DEBUG=DETAIL``.

    Raises:
        RuntimeError: the group has no backend for the device.
    """
    backend = group._get_backend(torch.device(device))
    return getattr(backend, "wrapped_pg", backend)


def timeout_of(group: Any) -> timedelta:
    """Returns the timeout of a group's calls; torch's default for its backend if the backend does not state one."""
    for device in group._device_types:
        with suppress(RuntimeError, AttributeError):
            timeout = backend_of(group, device).options._timeout
            if isinstance(timeout, timedelta):
                return timeout
    return distributed_c10d._get_default_timeout(distributed_c10d.get_backend(group))


def record_without_torch() -> None:
    """Makes torch treat groups of symm like groups of Gloo, which record their calls themselves.

    From 2.15 on, torch attaches its own flight recorder to every group of another backend, which costs some 2 µs per
    call. torch still does so if the program sets the recorder's size.
    """
    stated = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    recording = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if recording is not None and not any(map(os.environ.get, stated)):
        recording.add("symm")


def compare_split_sources() -> None:
    """Keeps torch from splitting the default group's backend for a new group if either of the two is symm.

    With ``device_id``, torch before 2.15 splits the backend without comparing the types of the two groups. If the
    parent is symm and the new group NCCL, NCCL rejects the parent. If the parent is NCCL and the new group symm, the
    ranks outside the new group wait in NCCL's split, which no member calls. A second call of this function has no
    effect.
    """
    there: Any = distributed_c10d
    usual = getattr(there, "_get_split_source", None)
    if usual is None or usual.__code__.co_argcount > 1:  # from 2.15 on, and after the first call
        return

    def get_split_source(pg: Any, requested: Any = None) -> Any:
        found = usual(pg)
        requested = requested or sys._getframe(1).f_locals.get("backend")  # which torch does not pass
        if found is None or pg.bound_device_id is None:
            return found
        names = f"{requested},{there._world.pg_map[pg][0]}".lower().split(",")
        return found if {"symm", f"{pg.bound_device_id.type}:symm"}.isdisjoint(names) else None

    there._get_split_source = get_split_source


def new_group(ranks: list[int] | None = None, **options: Any) -> dist.ProcessGroup:
    """``dist.new_group`` with one type for all versions; the result on a rank that is not a member must not be used."""
    group: Any = dist.new_group(ranks, **options)
    return cast("dist.ProcessGroup", group)


#: The last number that a group of :func:`new_group_among` got in this process.
_number = 0


def next_number() -> int:
    """Returns this rank's proposal for the number of a group of :func:`new_group_among`."""
    return _number + 1


def new_group_among(ranks: Sequence[int], proposals: Iterable[int], **options: Any) -> dist.ProcessGroup:
    """:func:`new_group`, called by the members only. It does not change the names of groups that all ranks make later.

    torch would derive the name from a count that can differ among members: up to 2.14, of the groups that a rank is in;
    from 2.15 on, of the groups that it made. The latter would then be higher on members than on other ranks, and later
    groups would get other names on them.

    Args:
        ranks: the members, which are ranks of the default group.
        proposals: the result of :func:`next_number` on each member.
        **options: other arguments of ``dist.new_group``.
    """
    global _number
    # This name is unique: groups that share their lowest rank have different numbers, because that rank counts them.
    number = max(proposals)
    _number = max(_number, number)
    _name_as_agreed()
    _agreed.name = f"symm_{min(ranks)}_{number}"
    try:
        return new_group(list(ranks), use_local_synchronization=True, **options)
    finally:
        _agreed.name = None


class _Agreed(local):
    """The name of the group that this thread makes next; ``None``: torch names it."""

    name: str | None = None


_agreed = _Agreed()
#: The function that names torch's groups once :func:`_name_as_agreed` has replaced torch's; otherwise ``None``.
_naming: Any = None


def _name_as_agreed() -> None:
    """Makes torch's name of a group the one that the calling thread has agreed on, if it has; does not restore torch's.

    If each group replaced and restored torch's function, threads that make groups at the same time would restore each
    other's. A second call of this function has no effect.
    """
    global _naming
    there: Any = distributed_c10d
    usual = there._process_group_name
    if usual is _naming:
        return

    @wraps(usual)
    def agreed_or_usual(*given: Any, **named: Any) -> Any:
        name, _agreed.name = _agreed.name, None
        return usual(*given, **named) if name is None else name

    _naming = there._process_group_name = agreed_or_usual


def set_timeout(timeout: timedelta) -> None:
    """Sets the timeout of the default group's later calls; torch has a public function for it from 2.15 on."""
    there: Any = dist
    if hasattr(there, "set_timeout"):
        there.set_timeout(timeout)
        return
    # Before 2.15, torch's own _set_pg_timeout supports only NCCL and Gloo; from 2.15 on, its name is set_timeout.
    group: Any = dist.group.WORLD
    for device in group._device_types:
        backend_of(group, device)._set_default_timeout(timeout)


#: torch's own plug-in entry for Gloo (2.14 and later), kept once :func:`make_gloo_by` has replaced it; otherwise
#: ``None``.
_own_gloo: Any = None


def gloo(name: str, store: Store, rank: int, size: int, timeout: timedelta, ranks: list[int] | None = None) -> Backend:
    """Makes a Gloo backend that belongs to no group of torch. ``ranks`` are global.

    From torch 2.14 on, Gloo is a plug-in.

    Raises:
        RuntimeError: this torch was built without Gloo, or its ranks do not meet.
    """
    plugin: Any = _own_gloo or distributed_c10d.Backend._plugins.get("GLOO")
    if plugin is None:
        if not distributed_c10d.is_gloo_available():
            raise RuntimeError("this torch was built without Gloo")
        # Not `distributed_c10d.ProcessGroupGloo`, which torch_symm may have replaced by its own class.
        own: Any = torch._C._distributed_c10d.ProcessGroupGloo
        made: Backend = own(store, rank, size, timeout=timeout)
        options: Any = made.options
        options.group_name, options.global_ranks_in_group = name, ranks or []
        return made
    if not plugin.extended_api:
        made = plugin.creator_fn(store, rank, size, timeout)
        return made
    options = torch._C._distributed_c10d._DistributedBackendOptions()
    options.store, options.group_rank, options.group_size = store, rank, size
    options.timeout, options.group_id, options.global_ranks_in_group = timeout, name, ranks or []
    made = plugin.creator_fn(options, None)
    return made


def make_gloo_by(create: Callable[[Any, Any], Any]) -> None:
    """Makes torch create every backend of the name ``gloo`` through ``create``, as through the function of a plug-in.

    :func:`gloo` and the helper of ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` still create torch's own Gloo backend. A second
    call of this function has no effect.

    Raises:
        RuntimeError: this torch was built without Gloo.
    """
    global _own_gloo
    if not distributed_c10d.is_gloo_available():
        raise RuntimeError("this torch was built without Gloo")
    there: Any = distributed_c10d
    plugins = distributed_c10d.Backend._plugins
    if "GLOO" not in plugins and hasattr(there, "_register_builtin_gloo_backend"):
        # Otherwise torch would register it on the first request for a group.
        there._register_builtin_gloo_backend()
    plugin: Any = plugins.get("GLOO")
    if plugin is None:
        if not isinstance(there.ProcessGroupGloo, _GlooMaker):
            there.ProcessGroupGloo = _GlooMaker(there.ProcessGroupGloo, create)
    elif _own_gloo is None:
        _own_gloo = plugin
        plugins["GLOO"] = type(plugin)(create, True)


class _GlooMaker:
    """Replaces the class ``ProcessGroupGloo`` in torch's module, which before 2.14 calls the class for each group."""

    def __init__(self, own: Any, create: Callable[[Any, Any], Any]) -> None:
        self._own, self._create = own, create

    def __call__(self, store: Any, rank: int, size: int, **given: Any) -> Any:
        caller = sys._getframe(1)
        if caller.f_code.co_name != "_new_process_group_helper":
            return self._own(store, rank, size, **given)
        found = caller.f_locals
        options: Any = torch._C._distributed_c10d._DistributedBackendOptions()
        options.store, options.group_rank, options.group_size = store, rank, size
        options.timeout, options.group_id = given["timeout"], found["group_name"]
        options.global_ranks_in_group = found["global_ranks_in_group"]
        return self._create(options, found.get("backend_options"))

    def __instancecheck__(self, backend: object) -> bool:
        return isinstance(backend, self._own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


def nccl(name: str, store: Store, rank: int, size: int, timeout: timedelta) -> Backend:
    """Makes an NCCL backend that belongs to no group of torch.

    It is a ``ProcessGroupNCCL``, even though torch 2.15 has a second implementation.

    Raises:
        RuntimeError: this torch was built without NCCL, or finds no GPU.
    """
    if not distributed_c10d.is_nccl_available():
        raise RuntimeError("this torch was built without NCCL")
    backend: Any = distributed_c10d.ProcessGroupNCCL
    options = backend.Options()
    options._timeout, options.group_name, options.global_ranks_in_group = timeout, name, list(range(size))
    with _unwatched():
        made: Backend = backend(store, rank, size, options)
    return made


#: Settings of NCCL's watchdog, and their values while no thread makes a backend without the watchdog.
_WATCHDOG = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT")
_watchful: dict[str, str | None] = {}
#: Number of threads that make a backend without the watchdog, and the lock for it and for :data:`_watchful`.
_unwatching, _unwatching_lock = 0, Lock()


@contextmanager
def _unwatched() -> Iterator[None]:
    """Disables NCCL's watchdog, because symm ends calls that hang. A backend reads these settings when it is made.

    Of the threads that are in this context at the same time, the last one restores the settings.
    """
    global _unwatching
    with _unwatching_lock:
        if not _unwatching:
            _watchful.update({setting: os.environ.get(setting) for setting in _WATCHDOG})
            os.environ.update(dict.fromkeys(_WATCHDOG, "0"))
        _unwatching += 1
    try:
        yield
    finally:
        with _unwatching_lock:
            _unwatching -= 1
            if not _unwatching:
                for setting, value in _watchful.items():
                    if value is None:
                        os.environ.pop(setting, None)
                    else:
                        os.environ[setting] = value


def knows_backend(name: str) -> bool:
    """Returns true if torch can make a backend of this name: a plug-in, or one that it was built with."""
    backends: Any = distributed_c10d.Backend
    if hasattr(backends, "_ensure_backend_registered"):
        # From 2.15 on, torch may register plug-ins and its own backends on first use.
        backends._ensure_backend_registered(name)
    built: dict[str, Callable[[], bool]] = {
        "gloo": distributed_c10d.is_gloo_available,
        "nccl": distributed_c10d.is_nccl_available,
        "ucc": distributed_c10d.is_ucc_available,
    }
    return name.upper() in backends._plugins or (name in built and built[name]())


def backend(kind: str, name: str, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Makes a backend, outside torch's groups, of a name ``kind`` that :func:`knows_backend` accepts.

    The result may be a backend that is written in Python, or a process group.
    """
    plugin: Any = distributed_c10d.Backend._plugins.get(kind.upper())
    if plugin is None:
        return distributed_c10d.ProcessGroupUCC(store, rank, size, timeout=timeout)
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)
    options: Any = torch._C._distributed_c10d._DistributedBackendOptions()
    options.store, options.group_rank, options.group_size = store, rank, size
    options.timeout, options.group_id, options.global_ranks_in_group = timeout, name, list(range(size))
    with _unwatched():
        return plugin.creator_fn(options, None)

"""Common code of the plug-ins for all engines: checks of an engine's methods, and symm groups of an engine's ranks."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torch_symm import _torch_compat
from torch_symm._native import load
from torch_symm._version import __version__
from torch_symm.symm_mem._groups import _this_node

#: Names of methods, and their parameters without ``self`` or ``cls``.
Expected = dict[str, tuple[str, ...]]


class Declined(Exception):
    """The reason why symm does not serve a group, known to all its ranks."""


def problem(owner: type, expected: Expected) -> str:
    """Returns how the methods of ``owner`` differ from those ``expected``; empty if they do not.

    Additional parameters are accepted if they have defaults.
    """
    for name, wanted in expected.items():
        found = inspect.getattr_static(owner, name, None)
        function: Any = getattr(found, "__func__", found)
        if not callable(function):
            return f"{owner.__qualname__} has no method {name}; this version was not tested"
        parameters = list(inspect.signature(function).parameters.values())[not isinstance(found, staticmethod) :]
        names = tuple(each.name for each in parameters)
        more = [
            each for each in parameters[len(wanted) :] if each.default is each.empty and each.kind < each.VAR_KEYWORD
        ]
        if names[: len(wanted)] != wanted or more:
            had, wants = ", ".join(names), ", ".join(wanted)
            return f"{owner.__qualname__}.{name} has the parameters ({had}), not ({wants}); this version was not tested"
    return ""


def native_problem() -> str:
    """Returns why the native part of torch-symm cannot be loaded; empty if it can."""
    try:
        load()
    except (ImportError, OSError) as error:
        return str(error)
    return ""


def join(log: logging.Logger, engine: str, group: Any, *, one_node: bool = False) -> Any:
    """Returns a symm group of the ranks of ``group``, an engine's object; on all ranks ``None`` if it cannot be made.

    The first rank logs whether symm serves the group. :func:`start` documents the other arguments.
    """
    made, first = None, group.rank_in_group == 0
    try:
        made = start(group.cpu_group, group.device_group, group.ranks, one_node=one_node)
    except Declined as reason:
        if first:
            log.warning("symm does not serve group %s, %s does: %s", group.unique_name, engine, reason)
    if first and made is not None:
        log.info("symm serves group %s of %s ranks", group.unique_name, group.world_size)
    return made


def start(
    cpu_group: Any,
    device_group: Any,
    ranks: Sequence[int],
    *,
    one_node: bool = False,
    warm: Callable[[Any], None] | None = None,
) -> Any:
    """Returns a new symm group of ``ranks``, which are ranks of the default group. Collective among ``ranks`` only.

    Args:
        cpu_group: the engine's Gloo group of ``ranks``, through which they agree.
        device_group: the engine's group of ``ranks`` for tensors, whose timeout the new group gets.
        ranks: the members, in ascending order.
        one_node: whether all of them must be on one node.
        warm: makes first calls on the group.

    Raises:
        Declined: the group cannot be made, or ``warm`` raised; all ranks raise it.
    """
    if cpu_group not in c10d._world.pg_map:
        raise Declined("it is not a group of torch.distributed")
    found = _from_all(cpu_group, (_why_not(ranks), __version__, _this_node(), _torch_compat.next_number()))
    reasons, versions, nodes, numbers = ([each[i] for each in found] for i in range(4))
    if any(reasons):
        raise Declined(next(filter(None, reasons)))
    if len(set(versions)) > 1:
        raise Declined(f"its ranks have versions {', '.join(sorted(set(versions)))} of torch-symm")
    if one_node and len({boot for boot, _ in nodes}) > 1:
        raise Declined(f"it spans several nodes: {', '.join(sorted({name for _, name in nodes}))}")
    group, error = None, ""
    try:
        timeout = _torch_compat.timeout_of(device_group)
        group = _torch_compat.new_group_among(ranks, numbers, backend="symm", timeout=timeout)
        if warm is not None:
            warm(group)
    except Exception as caught:
        error = f"rank {dist.get_rank(cpu_group)}: {type(caught).__name__}: {caught}"
        _leave(group)  # ranks that wait for this one fail at once
    if errors := [each for each in _from_all(cpu_group, error) if each]:
        if not error:
            _leave(group)
        raise Declined(errors[0])
    return group


def _why_not(ranks: Sequence[int]) -> str:
    if list(ranks) != sorted(ranks):
        return f"its ranks are in the order {list(ranks)}"
    return native_problem()


def _from_all(cpu_group: Any, own: Any) -> list[Any]:
    found: list[Any] = [None] * cpu_group.size()
    dist.all_gather_object(found, own, group=cpu_group)
    return found


def _leave(group: Any) -> None:
    if group is not None:
        with suppress(Exception):
            dist.destroy_process_group(group)

"""Common code of the plug-ins for all engines: checks of an engine's methods, and symm groups of an engine's ranks."""

from __future__ import annotations

import inspect
import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torch_symm import _torch_compat
from torch_symm._native import load
from torch_symm._version import __version__

#: Names of methods, and their parameters without ``self`` or ``cls``.
Expected = dict[str, tuple[str, ...]]
#: Seconds that a rank waits for the others to take part; half the timeout of the engine's group if this is shorter.
WAIT_S = 60.0
#: How many exchanges of this process used each name of a group. An engine that starts again reuses names.
_exchanges: Counter[str] = Counter()


class Declined(Exception):
    """The reason why symm does not serve a group, known to all its ranks that took part in the decision."""


class AbsentError(Declined):
    """Some ranks did not take part, so they do not know that symm does not serve the group."""


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

    The first rank logs whether symm serves the group; if ranks are absent, every other rank logs it.
    :func:`start` documents the other arguments.
    """
    made, first = None, group.rank_in_group == 0
    try:
        made = start(engine, group.cpu_group, group.device_group, group.ranks, one_node=one_node)
    except Declined as reason:
        if first or isinstance(reason, AbsentError):
            log.warning("symm does not serve group %s, %s does: %s", group.unique_name, engine, reason)
    if first and made is not None:
        log.info("symm serves group %s of %s ranks", group.unique_name, group.world_size)
    return made


def start(
    engine: str,
    cpu_group: Any,
    device_group: Any,
    ranks: Sequence[int],
    *,
    one_node: bool = False,
    warm: Callable[[Any], None] | None = None,
) -> Any:
    """Returns a new symm group of ``ranks``, which are ranks of the default group. Called by ``ranks`` only.

    Makes no call of the engine's groups, so a rank that does not take part cannot receive a message meant for symm.

    Args:
        engine: the name of the engine.
        cpu_group: the engine's group of ``ranks`` whose store they use to agree.
        device_group: the engine's group of ``ranks`` for tensors, whose timeout the new group gets.
        ranks: the members, in ascending order.
        one_node: whether all of them must be on one node.
        warm: makes first calls on the group.

    Raises:
        Declined: the group cannot be made, or ``warm`` raised; all ranks that called this raise it.
        AbsentError: ranks did not call this; the message names them.
    """
    if cpu_group not in c10d._world.pg_map:
        raise Declined("it is not a group of torch.distributed")
    agreement = _Agreement(cpu_group, ranks)
    absent = f"install torch-symm and set SYMM_{engine.upper()} there; the log of that rank has other reasons"
    problem = _why_not(ranks)
    own = None if problem else (__version__, _this_node(), _torch_compat.next_number())
    found = agreement.reach("take part", own, problem, absent)
    versions, nodes, numbers = ([each[i] for each in found] for i in range(3))
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
        error = f"rank {dist.get_rank()}: {type(caught).__name__}: {caught}"
    try:
        agreement.reach("start", None, error)
    except Declined:
        leave(group)  # ranks that wait for this one fail at once
        raise
    agreement.remove_keys()
    return group


def leave(group: Any) -> None:
    """Leaves a symm group; has no effect for ``None``, after an error, and if the engine has left all groups."""
    if group is not None:
        with suppress(Exception):
            dist.destroy_process_group(group)


def _why_not(ranks: Sequence[int]) -> str:
    if list(ranks) != sorted(ranks):
        return f"its ranks are in the order {list(ranks)}"
    problem = native_problem()
    return problem and f"rank {dist.get_rank()}: {problem}"


def _this_node() -> tuple[str, str]:
    # Not imported above, because symm_mem cannot be imported without the native part.
    from torch_symm.symm_mem import _groups

    return _groups._this_node()


class _Agreement:
    """Leads all ranks that take part to the same outcome, through the store of the engine's group.

    The first outcome that a rank proposes for a step is the outcome for all ranks, also for a rank that arrives later.
    """

    def __init__(self, group: Any, ranks: Sequence[int]) -> None:
        name = c10d._world.pg_names[group]
        _exchanges[name] += 1
        self._store = c10d.PrefixStore(f"symm/engine/{_exchanges[name]}", c10d._get_process_group_store(group))
        self._ranks, self._rank = ranks, dist.get_rank(group)
        self._seconds = min(WAIT_S, _torch_compat.timeout_of(group).total_seconds() / 2)
        self._steps: list[str] = []

    def reach(self, step: str, own: Any, problem: str, remedy: str = "") -> list[Any]:
        """Returns the value ``own`` of each rank.

        Raises:
            Declined: a rank has a ``problem``.
            AbsentError: ranks did not reach this step in time; the message names them and ends with ``remedy``.
        """
        self._steps.append(step)
        store, outcome = self._store, f"problem {problem}"
        if not problem:
            store.set(f"{step}/{self._rank}", json.dumps(own))
            last = store.add(f"{step}/ranks", 1) == len(self._ranks)
            outcome = "agreed" if last else self._wait(step, remedy)
        if outcome:
            store.compare_set(step, "", outcome)
        kind, _, reason = store.get(step).decode().partition(" ")
        if kind != "agreed":
            raise (AbsentError if kind == "absent" else Declined)(reason)
        return [json.loads(store.get(f"{step}/{rank}")) for rank in range(len(self._ranks))]

    def _wait(self, step: str, remedy: str) -> str:
        """Waits for the outcome of ``step``; after the timeout returns the outcome to propose, otherwise nothing."""
        try:
            self._store.wait([step], timedelta(seconds=self._seconds))
            return ""
        except RuntimeError:  # the class for a timeout depends on the store
            late = [each for rank, each in enumerate(self._ranks) if not self._store.check([f"{step}/{rank}"])]
            said = f"rank {', '.join(map(str, late))} did not {step} within {self._seconds:g} s"
            return f"absent {': '.join(filter(None, (said, remedy)))}" if late else "agreed"

    def remove_keys(self) -> None:
        """Removes the keys once all ranks have called this; does not wait."""
        names = ["read"]
        for step in self._steps:
            names += [step, f"{step}/ranks", *(f"{step}/{rank}" for rank in range(len(self._ranks)))]
        with suppress(RuntimeError):  # the store cannot delete keys
            if self._store.add("read", 1) == len(self._ranks):
                for name in names:
                    self._store.delete_key(name)

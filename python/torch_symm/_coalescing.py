"""Ends a block of torch's ``_coalescing_manager`` that an exception leaves, on groups of symm.

torch opens a block in two places, ``_world.pg_coalesce_state`` and the backend, and closes them only if no exception
passes. After an exception, later calls on the group would be recorded for a block that never ends: they would return
and do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed import distributed_c10d

from torch_symm._native import load
from torch_symm._torch_compat import backend_of


def end_blocks_at_exceptions() -> None:
    """Installs the change for every caller of ``_coalescing_manager``, including callers that imported it before.

    For that, it changes the generator function in the closure of torch's function, not the name in torch's module.
    Groups without a backend of symm keep torch's behaviour. Calling it again does nothing.
    """
    there: Any = distributed_c10d
    manager = there._coalescing_manager
    try:
        place = manager.__closure__[manager.__code__.co_freevars.index("func")]
    except (AttributeError, TypeError, ValueError):  # another package has replaced it
        return
    if not getattr(place.cell_contents, "ends_at_exceptions", False):
        place.cell_contents = _ending(place.cell_contents)


def _ending(blocks: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def block(group: Any = None, *given: Any, **named: Any) -> Iterator[Any]:
        found = distributed_c10d.GroupMember.WORLD if group is None else group
        # True within another block of the same group; the outer block then ends both blocks.
        inner = found in distributed_c10d._world.pg_coalesce_state
        try:
            yield from blocks(group, *given, **named)
        except BaseException:
            if not inner:
                _end(found)
            raise

    block.ends_at_exceptions = True  # type: ignore[attr-defined]
    return block


def _end(group: Any) -> None:
    backends = _of_symm(group)
    if backends:
        distributed_c10d._world.pg_coalesce_state.pop(group, None)
    for backend in backends:
        backend._drop_coalesced()


def _of_symm(group: Any) -> list[Any]:
    """The backends of symm in a group."""
    found = []
    for device in getattr(group, "_device_types", ()):
        backend = backend_of(group, device)
        if issubclass(type(backend), load().ProcessGroupSymm):
            found.append(backend)
    return found

"""Describes a group, and which algorithm it uses for each size."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_symm._native import load

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from torch_symm._C import ProcessGroupSymm

#: torch's names of the collectives that have a price.
OPS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "broadcast")
#: Size of the largest tensor to consider, in bytes.
LARGEST = 1 << 30
#: Resolution of sizes in bytes.
STEP = 8


def describe(group: ProcessGroup | ProcessGroupSymm | None = None) -> str:
    """Returns a group's name, rank, ranks and devices, and the algorithm for each size of a collective.

    Sizes are bytes of a tensor: the output of an all-gather, the input of a reduce-scatter and an all-to-all. A CUDA
    device appears once the group has been used on one (or was made with ``device_id``). ``torch-symm topo`` shows the
    algorithms without a group; ``docs/design/cpu-collectives.md`` and ``docs/design/cuda-kernels.md`` explain their
    names. Not collective: any rank may call it.

    Args:
        group: a group of torch or this package; ``None``: the default group.

    Returns:
        A line that is the group's ``repr``, and a table for each device.

    Raises:
        ValueError: the group's CPU tensors are not served by symm, or there is no default group.
        TypeError: ``group`` is not a group.
        ImportError: the native part cannot serve this torch.
    """
    own = _own(group)
    ranks, device = own.size(), own._device()
    lines = [repr(own)]
    others = _other_nodes(own)
    if others:
        lines.append(f"  on several nodes, with {others}: two_level, with the algorithms of one node")
        return "\n".join(lines)
    for kind, shown in [("cpu", "cpu")] + ([] if device is None else [("cuda", f"cuda:{device}")]):
        rows = dict(_rows(kind, ranks))
        width = max(map(len, rows))
        lines.append(f"  {shown}:")
        lines += [f"    {op:<{width}}  {said}" for op, said in rows.items()]
    return "\n".join(lines)


def _own(group: Any) -> Any:
    import torch.distributed as dist

    from torch_symm._torch_compat import backend_of

    native = load()
    if isinstance(group, native.ProcessGroupSymm):
        return group
    if group is None:
        if not dist.is_initialized():
            raise ValueError("there is no default group: call torch.distributed.init_process_group first")
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"a ProcessGroup of torch or torch_symm is expected, not {type(group).__name__}: {group!r}")
    for device in ("cpu", "cuda"):
        try:
            own = backend_of(group, device)
        except RuntimeError:  # the group has no backend for this device
            continue
        if isinstance(own, native.ProcessGroupSymm):
            return own
    raise ValueError(f"no tensors of this group are served by symm: {group!r}")


def on_several_nodes() -> set[str]:
    """Returns torch's names of this process's groups that span nodes and use symm."""
    from torch_symm._trace import trace

    found = [known["name"] for known in trace()["groups"] if known["other_nodes"] and known["left_ns"] is None]
    return {"0" if name == "default" else name for name in found}


def _other_nodes(own: Any) -> str:
    from torch_symm._repr import group_name
    from torch_symm._trace import trace

    # In the trace, the `rank` of a multi-node group is this rank's number among the ranks of its node.
    same = [
        known["other_nodes"] or ""
        for known in trace()["groups"]
        if (known["name"], known["left_ns"]) == (group_name(own), None)
        and (known["other_nodes"] or known["rank"] == own.rank())
    ]
    return same[-1] if same else ""


def prices(device: str, ranks: int, world: int, source: str, profile: Path | None = None) -> Any:
    """Returns the prices in groups of ``ranks``, with all ``world`` ranks on one node; ``None`` without measurements.

    Raises:
        SymmConfigError: the profile is faulty or of other hardware.
    """
    path = os.fsencode(profile) if profile else b""
    return load()._open_cost_model(device, [ranks], world, world, source, profile=path)


def _rows(device: str, ranks: int) -> Iterator[tuple[str, str]]:
    if ranks == 1:
        yield "all", "alone: nothing moves"
        return
    known = prices(device, ranks, ranks, "measured") or prices(device, ranks, ranks, "links")
    for op in OPS:
        steps = list(_steps(lambda size, op=op: known.price(op, size, 0)[1]))  # type: ignore[misc]
        yield op, ", ".join(name if most is None else f"{name} to {_bytes(most)}" for name, most in steps)


def _steps(name_at: Callable[[int], str]) -> Iterator[tuple[str, int | None]]:
    """Yields each algorithm and the largest size for which it is used; ``None`` if that size has no limit."""
    size, name = STEP, name_at(STEP)
    while size < LARGEST:
        above = 2 * size
        if name_at(above) != name:
            low, high = size // STEP, above // STEP
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if name_at(middle * STEP) == name else (low, middle)
            yield name, low * STEP
            size, name = high * STEP, name_at(high * STEP)
        else:
            size = above
    yield name, None


def _bytes(count: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size and count * 10 % size == 0:
            return f"{count / size:g} {unit}"
    return f"{count} bytes"

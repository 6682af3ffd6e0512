"""Parses a request: operations, types and sizes, by the names of nccl-tests and of this package."""

from __future__ import annotations

from dataclasses import dataclass

from torch_symm.tools.command import named

from .ops import DTYPES, OPS, PLACEMENTS, REDOPS

#: nccl-tests' names of types, by the names of this package.
NCCL_TYPES = {
    "f64": "double",
    "f32": "float",
    "f16": "half",
    "bf16": "bfloat16",
    "i32": "int32",
    "i64": "int64",
    "i8": "int8",
    "u8": "uint8",
}
_TYPES = {name: name for name in DTYPES} | {theirs: ours for ours, theirs in NCCL_TYPES.items()}
_OTHER_OPS = {"alltoall": "all_to_all", "sendrecv": "send_recv", "allreduce": "all_reduce", "allgather": "all_gather"}
_OTHER_REDOPS = {"product": "prod", "mean": "avg"}
#: Operations that combine values, and operations that have a root.
REDUCING = ("all_reduce", "functional_all_reduce", "reduce_scatter", "reduce")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
#: Maximum number of sizes of a run.
MOST_SIZES = 200


@dataclass(frozen=True)
class Wanted:
    """A row to measure. ``size``: in bytes, rounded up to whole elements (per rank); ``root`` -1: no root."""

    op: str
    dtype: str
    redop: str
    root: int
    size: int
    world: int

    @property
    def count(self) -> int:
        """Number of elements as nccl-tests counts them: of each rank's part if the tensor is divided."""
        return self.size // DTYPES[self.dtype].itemsize // (self.world if OPS[self.op].divided else 1)

    @property
    def bus_factor(self) -> float:
        """Bus bandwidth / algorithm bandwidth."""
        return OPS[self.op].bus_factor(self.world)


def operations(words: list[str]) -> list[str]:
    """Parses operations by our name or nccl-tests', such as ``all_reduce_perf``; or ``all``.

    Raises:
        ValueError: no operation has this name.
    """
    if words == ["all"]:
        return list(PLACEMENTS)
    plain = (word.removesuffix("_perf") for word in words)
    return [named("operation", _OTHER_OPS.get(word, word), OPS) for word in plain]


def types(text: str) -> list[str]:
    """Parses types by our name or nccl-tests', separated by commas; or ``all``.

    Raises:
        ValueError: no type has this name.
    """
    return list(DTYPES) if text == "all" else [_TYPES[named("type", word, _TYPES)] for word in text.lower().split(",")]


def reductions(text: str) -> list[str]:
    """Parses reduce operations, separated by commas; or ``all``.

    Raises:
        ValueError: no reduction has this name.
    """
    if text == "all":
        return list(REDOPS)
    return [named("reduction", _OTHER_REDOPS.get(word, word), REDOPS) for word in text.lower().split(",")]


def sizes(least: int, most: int, factor: float | None, step: int | None) -> list[int]:
    """Returns sizes in bytes from ``least`` to ``most``, each ``factor`` times the one before, or ``step`` more.

    Raises:
        ValueError: they do not rise, or are too many.
    """
    if most < least:
        raise ValueError(f"-e {most} is below -b {least}: the last size is the largest")
    if factor is not None and factor <= 1:
        raise ValueError(f"-f {factor:g} gives no larger size; try -f 2")
    found, size = [], least
    while size <= most:
        found.append(size)
        if len(found) > MOST_SIZES:
            raise ValueError(f"more than {MOST_SIZES} sizes; try -f 2, or a larger -i")
        size = size + step if step else max(size + 1, int(size * factor)) if factor else most + 1
    return found


def rows(
    ops: list[str], dtypes: list[str], redops: list[str], roots: list[int], sizes: list[int], world: int
) -> list[Wanted]:
    """Returns every distinct combination, operation by operation, from small to large."""
    found: dict[Wanted, None] = {}
    for op in ops:
        for dtype in dtypes if op != "barrier" else dtypes[:1]:
            for redop in redops if op in REDUCING else ["none"]:
                for root in roots if op in ROOTED else [-1]:
                    for size in sizes if op != "barrier" else [0]:
                        unit = DTYPES[dtype].itemsize * (world if OPS[op].divided else 1)
                        found[Wanted(op, dtype, redop, root, -(-size // unit) * unit, world)] = None
    return list(found)

"""Which calls are made."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .reference import DTYPES, REDOPS, served

REDUCING = ("all_reduce", "reduce", "reduce_scatter")
MOVING = (
    "broadcast",
    "all_gather",
    "all_gather_uneven",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_uneven",
    "send_recv",
)
OPS = (*REDUCING, *MOVING, "barrier")
#: Elements a rank: none, fewer than ranks, around vectors and cache lines, and what goes in pieces.
LENGTHS = (0, 1, 3, 7, 17, 65, 1023, 4099)
QUICK_LENGTHS = (0, 1, 17)
LONG_LENGTHS = (70_001, (1 << 20) + 3)
#: Types whose long tensors are compared.
LONG_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """One call. ``redop``: empty where nothing is reduced; ``number``: chooses root, alignment and whether to wait."""

    op: str
    dtype: torch.dtype
    redop: str
    count: int
    number: int

    @property
    def asynchronous(self) -> bool:
        """Whether it is called with ``async_op`` and awaited."""
        return self.number % 3 == 1

    @property
    def offset(self) -> int:
        """Elements by which tensors begin behind an aligned address."""
        return self.number % 2

    def __str__(self) -> str:
        redop = f" {self.redop}" if self.redop else ""
        how = " asynchronous" * self.asynchronous + " misaligned" * self.offset
        return f"{self.op}{redop} {str(self.dtype).removeprefix('torch.')} × {self.count}{how}"


def blocks(ops: tuple[str, ...], quick: bool) -> list[list[Case]]:
    """The cases by operation and type; between blocks ranks meet, and may stop."""
    lengths, number = QUICK_LENGTHS if quick else LENGTHS, 0
    found = []
    for op in ops:
        if op == "barrier":
            found.append([Case(op, torch.uint8, "", 0, each) for each in range(4)])
            continue
        for dtype in DTYPES:
            block = []
            for redop in [one for one in REDOPS if served(one, dtype)] if op in REDUCING else [""]:
                long = not quick and dtype in LONG_DTYPES and redop in ("SUM", "")
                for count in (*lengths, *(LONG_LENGTHS if long else ())):
                    block.append(Case(op, dtype, redop, count, number))
                    number += 1
            found.append(block)
    return found

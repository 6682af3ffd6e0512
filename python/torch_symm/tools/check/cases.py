"""The calls that ``torch-symm check`` makes."""

from __future__ import annotations

from dataclasses import dataclass, field

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
#: Elements per rank: none, fewer than ranks, around vectors and cache lines, and enough for several pieces.
LENGTHS = (0, 1, 3, 7, 17, 65, 1023, 4099)
QUICK_LENGTHS = (0, 1, 17)
LONG_LENGTHS = (70_001, (1 << 20) + 3)
#: Types whose long tensors are compared.
LONG_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """One call. ``redop``: empty without a reduction; ``number``: determines root, alignment and whether to wait."""

    op: str
    dtype: torch.dtype
    redop: str
    count: int
    number: int

    @property
    def asynchronous(self) -> bool:
        """True if it is called with ``async_op`` and awaited."""
        return self.number % 3 == 1

    @property
    def offset(self) -> int:
        """Number of elements between an aligned address and the start of tensors."""
        return self.number % 2

    def __str__(self) -> str:
        redop = f" {self.redop}" if self.redop else ""
        how = " asynchronous" * self.asynchronous + " misaligned" * self.offset
        return f"{self.op}{redop} {str(self.dtype).removeprefix('torch.')} × {self.count}{how}"


@dataclass
class Covered:
    """The types, reductions, lengths and modes of some calls."""

    dtypes: set[str] = field(default_factory=set)
    redops: set[str] = field(default_factory=set)
    counts: set[int] = field(default_factory=set)
    alignments: set[str] = field(default_factory=set)
    manners: set[str] = field(default_factory=set)

    def add(self, case: Case) -> None:
        """Adds a call. A barrier has neither a type nor a length."""
        self.manners.add("asynchronous" if case.asynchronous else "blocking")
        if case.op == "barrier":
            return
        self.dtypes.add(str(case.dtype).removeprefix("torch."))
        self.redops |= {case.redop} - {""}
        self.counts.add(case.count)
        self.alignments.add("misaligned" if case.offset else "aligned")

    def __str__(self) -> str:
        parts = [_number(len(self.dtypes), "type"), _number(len(self.redops), "reduction")]
        if self.counts:
            parts.append(f"{min(self.counts)} to {max(self.counts)} elements a rank")
        parts += [" and ".join(sorted(self.alignments)), " and ".join(sorted(self.manners, reverse=True))]
        return ", ".join(filter(None, parts))


def _number(count: int, of: str) -> str:
    return f"{count} {of}{'s' * (count > 1)}" if count else ""


def blocks(ops: tuple[str, ...], quick: bool) -> list[list[Case]]:
    """Returns the cases by operation and type; between blocks, ranks meet, and may stop."""
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

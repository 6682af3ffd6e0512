"""Rows of any type, reduction and root: the operations and exact values of `..ops`, on the device."""

from __future__ import annotations

from ..ops import DTYPES, Shape
from ..ops import OPS as PLACED
from ..pattern import WrongResult
from .calls import OPS
from .contenders import Builder
from .inputs import RANDOM, GpuCall, Setting
from .record import Cell

#: Operations that torch has in both forms, and that are called in place here.
IN_PLACE = ("all_reduce", "broadcast", "reduce")


def wanted(cell: Cell) -> bool:
    """Returns true if ``cell`` is not among those that every side measures with random values."""
    return cell.op not in OPS or cell.dtype not in RANDOM or (cell.redop, cell.root) != ("sum", 0)


def builder(cell: Cell) -> Builder:
    """Makes the call of ``cell`` on its own tensors, in ordinary memory."""
    out_of_place, in_place = PLACED[cell.op].builds
    build = in_place if cell.op in IN_PLACE else out_of_place
    assert build is not None, cell.op

    def made(at: Setting) -> GpuCall:
        dtype = DTYPES[cell.dtype]
        count = cell.bytes // dtype.itemsize
        work = build(Shape(at.rank, at.world, dtype, count, cell.redop, cell.root, at.inputs.device))

        def check(calls: int) -> str | None:
            if calls != 1 and not work.checks_chain:
                # Each call uses the result of the call before, and the result of several calls is undefined.
                return None
            try:
                work.check(calls)
            except WrongResult as wrong:
                return f"{wrong.count} elements wrong: {wrong}"
            return None

        return GpuCall(work.reset, lambda: work.call(at.group), check)

    return made

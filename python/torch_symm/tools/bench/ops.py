"""The benchmarked operations: tensors, call, exact check, bus factor and bytes moved, in one table.

``S`` is the size as nccl-tests counts it: the tensor for all_reduce, broadcast, reduce and send/recv;
the output of all_gather and of gather at its root; the input of reduce_scatter, of all_to_all and of scatter at its
root. If a tensor is divided among ranks, S is rounded up to one element per rank. algbw = S / t, busbw = algbw ×
factor. send/recv is a ping-pong between ranks 0 and 1 while the others idle; its time is half a round trip.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from torch_symm._trace.annotate import BUS_FACTORS
from torch_symm.symm_mem._groups import is_symm

from .pattern import Pattern, check_parts, pieces

DTYPES: dict[str, torch.dtype] = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i32": torch.int32,
    "i64": torch.int64,
    "i8": torch.int8,
    "u8": torch.uint8,
}
REDOPS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "avg": dist.ReduceOp.AVG,
}
POISON = -1


@dataclass(frozen=True)
class Shape:
    """The inputs of a builder: rank, element type and number of elements of S, reduction, root and device."""

    rank: int
    world: int
    dtype: torch.dtype
    count: int
    redop: str = "sum"
    root: int = 0
    device: torch.device | None = None

    @property
    def reduce_op(self) -> dist.ReduceOp.RedOpType:
        """The reduction as torch's type."""
        return REDOPS[self.redop]

    @property
    def is_root(self) -> bool:
        """True if this rank is the root."""
        return self.rank == self.root

    @property
    def share(self) -> int:
        """Number of elements of one rank's part of S."""
        return self.count // self.world

    def pattern(self, ranks: range | list[int], start: int, count: int) -> Pattern:
        """Returns the expected values of ``count`` elements from ``start``: the reduction over ``ranks``."""
        return Pattern(ranks, start, count, self.world, self.dtype, self.redop, self.device)

    def empty(self, count: int) -> torch.Tensor:
        """A flat tensor of ``count`` elements."""
        return torch.empty(count, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Work:
    """One rank's side of a cell. ``check(k)`` holds after ``reset`` and ``k`` calls."""

    reset: Callable[[], None]
    call: Callable[[dist.ProcessGroup], object]
    check: Callable[[int], None]
    checks_chain: bool = True
    """False: only the result after exactly one call is defined."""


@dataclass(frozen=True)
class Op:
    """One row of the table. ``floor`` and ``staged`` are bytes / S for n ranks: see `limits`.

    ``builds``: its out-of-place and in-place calls; ``None`` if torch lacks the call.
    """

    builds: tuple[Callable[[Shape], Work] | None, Callable[[Shape], Work] | None]
    bus_factor: Callable[[int], float]
    floor: Callable[[int], float]
    staged: Callable[[int], float]
    divided: bool = False
    messages_per_call: int = 1


def _nothing() -> None:
    return None


def _all_reduce(shape: Shape) -> Work:
    own = shape.pattern([shape.rank], 0, shape.count)
    total = shape.pattern(range(shape.world), 0, shape.count)
    tensor = shape.empty(shape.count)
    op, growth = shape.reduce_op, shape.world if shape.redop == "sum" else 1
    exact = growth & (growth - 1) == 0 and shape.dtype.is_floating_point and shape.redop != "prod"
    return Work(
        lambda: own.fill(tensor),
        lambda group: dist.all_reduce(tensor, op, group=group),
        lambda calls: total.check(tensor, "all_reduce", float(growth ** (calls - 1))),
        checks_chain=exact,
    )


def _functional_all_reduce(shape: Shape) -> Work:
    own = shape.pattern([shape.rank], 0, shape.count)
    total = shape.pattern(range(shape.world), 0, shape.count)
    tensor, results = shape.empty(shape.count), [shape.empty(0)]
    # The functional collective uses the names of torch's enumeration.
    name = "product" if shape.redop == "prod" else shape.redop

    def call(group: dist.ProcessGroup) -> None:
        results[0] = funcol.wait_tensor(funcol.all_reduce(tensor, name, group))  # type: ignore[no-untyped-call]

    return Work(lambda: own.fill(tensor), call, lambda _calls: total.check(results[0], "functional all_reduce"))


def _all_reduce_out_of_place(shape: Shape) -> Work:
    """Uses ``torch.ops.symm.all_reduce`` on a group of symm, and the functional collective on others."""
    own = shape.pattern([shape.rank], 0, shape.count)
    total = shape.pattern(range(shape.world), 0, shape.count)
    tensor, results = shape.empty(shape.count), [shape.empty(0)]
    name = "product" if shape.redop == "prod" else shape.redop
    operators: dict[dist.ProcessGroup, Callable[[], torch.Tensor]] = {}

    def chosen(group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
        if is_symm(group, tensor.device.type):
            return partial(torch.ops.symm.all_reduce, tensor, name, group.group_name)
        return lambda: funcol.wait_tensor(funcol.all_reduce(tensor, name, group))  # type: ignore[no-untyped-call]

    def call(group: dist.ProcessGroup) -> None:
        if group not in operators:
            operators[group] = chosen(group)
        results[0] = operators[group]()

    return Work(lambda: own.fill(tensor), call, lambda _calls: total.check(results[0], "all_reduce out of place"))


def _all_gather(shape: Shape) -> Work:
    parts = [shape.pattern([rank], 0, shape.share) for rank in range(shape.world)]
    source, output = shape.empty(shape.share), shape.empty(shape.count)
    parts[shape.rank].fill(source)

    return Work(
        lambda: _refill(output),
        lambda group: dist.all_gather_into_tensor(output, source, group=group),
        lambda _calls: check_parts(parts, pieces(output, shape.share), "all_gather_into_tensor"),
    )


def _all_gather_in_place(shape: Shape) -> Work:
    parts = [shape.pattern([rank], 0, shape.share) for rank in range(shape.world)]
    output = shape.empty(shape.count)
    source = output[shape.rank * shape.share : (shape.rank + 1) * shape.share]

    def reset() -> None:
        _refill(output)
        parts[shape.rank].fill(source)

    return Work(
        reset,
        lambda group: dist.all_gather_into_tensor(output, source, group=group),
        lambda _calls: check_parts(parts, pieces(output, shape.share), "all_gather_into_tensor in place"),
    )


def _reduce_scatter(shape: Shape) -> Work:
    source, output = shape.empty(shape.count), shape.empty(shape.share)
    shape.pattern([shape.rank], 0, shape.count).fill(source)
    total = shape.pattern(range(shape.world), shape.rank * shape.share, shape.share)
    op = shape.reduce_op
    return Work(
        lambda: _refill(output),
        lambda group: dist.reduce_scatter_tensor(output, source, op, group=group),
        lambda _calls: total.check(output, "reduce_scatter_tensor"),
    )


def _reduce_scatter_in_place(shape: Shape) -> Work:
    source, op = shape.empty(shape.count), shape.reduce_op
    output = source[shape.rank * shape.share : (shape.rank + 1) * shape.share]
    own = shape.pattern([shape.rank], 0, shape.count)
    total = shape.pattern(range(shape.world), shape.rank * shape.share, shape.share)
    return Work(
        lambda: own.fill(source),
        lambda group: dist.reduce_scatter_tensor(output, source, op, group=group),
        lambda _calls: total.check(output, "reduce_scatter_tensor in place"),
        checks_chain=False,
    )


def _all_to_all(shape: Shape) -> Work:
    source, output = shape.empty(shape.count), shape.empty(shape.count)
    shape.pattern([shape.rank], 0, shape.count).fill(source)
    start = shape.rank * shape.share
    parts = [shape.pattern([rank], start, shape.share) for rank in range(shape.world)]

    return Work(
        lambda: _refill(output),
        lambda group: dist.all_to_all_single(output, source, group=group),
        lambda _calls: check_parts(parts, pieces(output, shape.share), "all_to_all_single"),
    )


def _broadcast(shape: Shape) -> Work:
    root = shape.pattern([shape.root], 0, shape.count)
    tensor = shape.empty(shape.count)
    return Work(
        lambda: root.fill(tensor) if shape.is_root else _refill(tensor),
        lambda group: dist.broadcast(tensor, shape.root, group=group),
        lambda _calls: root.check(tensor, "broadcast"),
    )


def _functional_broadcast(shape: Shape) -> Work:
    root = shape.pattern([shape.root], 0, shape.count)
    tensor, results = shape.empty(shape.count), [shape.empty(0)]

    def call(group: dist.ProcessGroup) -> None:
        results[0] = funcol.wait_tensor(funcol.broadcast(tensor, shape.root, group))  # type: ignore[no-untyped-call]

    return Work(
        lambda: root.fill(tensor) if shape.is_root else _refill(tensor),
        call,
        lambda _calls: root.check(results[0], "functional broadcast"),
    )


def _reduce(shape: Shape) -> Work:
    own = shape.pattern([shape.rank], 0, shape.count)
    total = shape.pattern(range(shape.world), 0, shape.count)
    tensor, op = shape.empty(shape.count), shape.reduce_op
    # The other ranks' tensors are undefined afterwards, so only one call has a defined result.
    return Work(
        lambda: own.fill(tensor),
        lambda group: dist.reduce(tensor, shape.root, op, group=group),
        lambda _calls: total.check(tensor, "reduce") if shape.is_root else None,
        checks_chain=False,
    )


def _gather(shape: Shape) -> Work:
    source = shape.empty(shape.share)
    shape.pattern([shape.rank], 0, shape.share).fill(source)
    if not shape.is_root:
        return Work(_nothing, lambda group: dist.gather(source, None, shape.root, group=group), lambda _calls: None)
    outputs = [shape.empty(shape.share) for _ in range(shape.world)]
    parts = [shape.pattern([rank], 0, shape.share) for rank in range(shape.world)]

    return Work(
        lambda: _refill(*outputs),
        lambda group: dist.gather(source, outputs, shape.root, group=group),
        lambda _calls: check_parts(parts, outputs, "gather"),
    )


def _scatter(shape: Shape) -> Work:
    output = shape.empty(shape.share)
    wanted = shape.pattern([shape.root], shape.rank * shape.share, shape.share)
    sources: list[torch.Tensor] | None = None
    if shape.is_root:
        sources = [shape.empty(shape.share) for _ in range(shape.world)]
        for rank, source in enumerate(sources):
            shape.pattern([shape.root], rank * shape.share, shape.share).fill(source)
    return Work(
        lambda: _refill(output),
        lambda group: dist.scatter(output, sources, shape.root, group=group),
        lambda _calls: wanted.check(output, "scatter"),
    )


def _send_recv(shape: Shape) -> Work:
    if shape.rank > 1:
        return Work(_nothing, lambda _group: None, lambda _calls: None)
    peer = 1 - shape.rank
    mine, theirs = shape.pattern([shape.rank], 0, shape.count), shape.pattern([peer], 0, shape.count)
    source, output = shape.empty(shape.count), shape.empty(shape.count)
    mine.fill(source)

    def call(group: dist.ProcessGroup) -> None:
        if shape.rank == 0:
            dist.send(source, peer, group=group)
            dist.recv(output, peer, group=group)
        else:
            dist.recv(output, peer, group=group)
            dist.send(source, peer, group=group)

    return Work(lambda: _refill(output), call, lambda _calls: theirs.check(output, "send/recv"))


def _barrier(_shape: Shape) -> Work:
    return Work(_nothing, lambda group: dist.barrier(group=group), lambda _calls: None)


def _refill(*outputs: torch.Tensor) -> None:
    for output in outputs:
        output.fill_(POISON)


# Derivation of `floor` and `staged`: docs/guide/benchmarking.md, "Memory limit".
OPS: dict[str, Op] = {
    "all_reduce": Op(
        (_all_reduce_out_of_place, _all_reduce), BUS_FACTORS["all_reduce"], lambda n: 2.0 * n, lambda n: 5.0 * n - 2
    ),
    # As DTensor and torch.compile call all_reduce: asynchronous, into a new tensor, and waited for at once.
    "functional_all_reduce": Op(
        (_functional_all_reduce, None), BUS_FACTORS["all_reduce"], lambda n: 4.0 * n, lambda n: 7.0 * n - 2
    ),
    "all_gather": Op(
        (_all_gather, _all_gather_in_place),
        BUS_FACTORS["all_gather"],
        lambda n: 1.0 + n,
        lambda n: 2.0 * n + 1,
        divided=True,
    ),
    "reduce_scatter": Op(
        (_reduce_scatter, _reduce_scatter_in_place),
        BUS_FACTORS["reduce_scatter"],
        lambda n: 1.0 + n,
        lambda n: 3.0 * n - 1,
        divided=True,
    ),
    "all_to_all": Op(
        (_all_to_all, None), BUS_FACTORS["all_to_all"], lambda n: 2.0 * n, lambda n: 4.0 * n - 2, divided=True
    ),
    "broadcast": Op((_functional_broadcast, _broadcast), BUS_FACTORS["broadcast"], float, lambda n: 2.0 * n),
    "reduce": Op((None, _reduce), BUS_FACTORS["reduce"], lambda n: n + 1.0, lambda n: 3.0 * n - 1),
    "gather": Op((_gather, None), BUS_FACTORS["gather"], lambda _n: 2.0, lambda n: 2.0 + 2 * (n - 1) / n, divided=True),
    "scatter": Op(
        (_scatter, None), BUS_FACTORS["scatter"], lambda _n: 2.0, lambda n: 2.0 + 2 * (n - 1) / n, divided=True
    ),
    "send_recv": Op((_send_recv, None), BUS_FACTORS["send_recv"], lambda _n: 2.0, lambda _n: 4.0, messages_per_call=2),
    "barrier": Op((None, _barrier), BUS_FACTORS["barrier"], lambda _n: 0.0, lambda _n: 0.0),
}

#: The operations of nccl-tests.
PLACEMENTS = tuple(op for op in OPS if op not in ("functional_all_reduce", "barrier"))

"""Ranks that disagree: rank 1 makes a different call than the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from .case import RIGHT, WRONG, Promise, Saw
from .processes import WORLD, Stage, scene

ROW = "25 mismatches between ranks (collective, shape, dtype, op, root, splits, order)"
TARGET = "an error on all in < 50 ms, both calls named, no tensor written"
TIMEOUT_S = 2.0

#: Takes whether this rank is the odd one; returns the tensors that the call may write, and the call.
Make = Callable[[bool], tuple[list[torch.Tensor], Callable[[], object]]]


def ones(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(count, dtype=dtype)


def all_reduce(
    tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> tuple[list[torch.Tensor], Callable[[], object]]:
    return [tensor], lambda: dist.all_reduce(tensor, op)


def broadcast(tensor: torch.Tensor, root: int) -> tuple[list[torch.Tensor], Callable[[], object]]:
    return [tensor], lambda: dist.broadcast(tensor, root)


def all_gather(count: int) -> tuple[list[torch.Tensor], Callable[[], object]]:
    output = ones(WORLD * count)
    return [output], lambda: dist.all_gather_into_tensor(output, ones(count))


def reduce_scatter(
    count: int, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> tuple[list[torch.Tensor], Callable[[], object]]:
    output = ones(count)
    return [output], lambda: dist.reduce_scatter_tensor(output, ones(WORLD * count), op)


def rooted(call: Callable[..., object], odd: bool) -> tuple[list[torch.Tensor], Callable[[], object]]:
    """Gathers or scatters; the odd rank has another root."""
    tensor = ones(4)
    pieces = [ones(4) for _ in range(WORLD)] if dist.get_rank() == odd else None
    return [tensor, *(pieces or [])], lambda: call(tensor, pieces, int(odd))


def lists(odd: bool) -> tuple[list[torch.Tensor], Callable[[], object]]:
    """The sum of the lengths is the same on all ranks, but the lengths are not."""
    lengths = [2, 3, 1, 1] if odd else [1, 3, 2, 1]
    outputs = [ones(length) for length in lengths]
    return outputs, lambda: dist.all_gather(outputs, ones(lengths[dist.get_rank()]))


def reduced_to(root: int) -> tuple[list[torch.Tensor], Callable[[], object]]:
    tensor = ones(4)
    return [tensor], lambda: dist.reduce(tensor, root)


def asynchronous(count: int) -> tuple[list[torch.Tensor], Callable[[], object]]:
    tensor = ones(count)
    return [tensor], lambda: dist.all_reduce(tensor, async_op=True).wait()


def splits(odd: bool) -> tuple[list[torch.Tensor], Callable[[], object]]:
    """The odd rank sends two rows to rank 0, which expects one."""
    sent = [2, 1, 1, 1] if odd else [1, 1, 1, 1]
    output = ones(WORLD)
    return [output], lambda: dist.all_to_all_single(output, ones(sum(sent)), [1] * WORLD, sent)


def in_a_row(
    odd: bool, usual: tuple[int, int], other: tuple[int, ...]
) -> tuple[list[torch.Tensor], Callable[[], object]]:
    tensors = [ones(count) for count in (other if odd else usual)]

    def calls() -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)

    return tensors, calls


def message(odd: bool) -> tuple[list[torch.Tensor], Callable[[], object]]:
    """The odd rank sends five elements, rank 0 receives four; the others do nothing."""
    tensor = ones(5 if odd else 4)

    def call() -> object:
        if odd:
            try:
                dist.send(tensor, 0)
            except dist.DistBackendError:
                return False  # a short send must not raise: only its receiver notices
            return True
        if dist.get_rank() == 0:
            dist.recv(tensor, 1)
            return False
        return True

    return [tensor], call


#: The call of each rank, and expressions that every message matches in addition to the ranks.
MISMATCHES: dict[str, tuple[Make, tuple[str, ...]]] = {
    "smaller on one rank": (lambda odd: all_reduce(ones(3 if odd else 4)), ("16 bytes", "12 bytes")),
    "larger on one rank": (lambda odd: all_reduce(ones(5 if odd else 4)), ("16 bytes", "20 bytes")),
    "another way for one": (lambda odd: all_reduce(ones(1_000_004 if odd else 4)), ("16 bytes", "4000016 bytes")),
    "20 MB among 16 MB": (lambda odd: all_reduce(ones((4 + odd) << 20)), ("16777216 bytes", "20971520 bytes")),
    "asynchronous": (lambda odd: asynchronous(5 if odd else 4), ("16 bytes", "20 bytes")),
    "same count in another shape": (lambda odd: all_reduce(ones(6).view(2, 3) if odd else ones(6)), ()),
    "dtype of another width": (
        lambda odd: all_reduce(ones(4, torch.float64 if odd else torch.float32)),
        ("4 . float32", "4 . float64"),
    ),
    "dtype of the same width": (
        lambda odd: all_reduce(ones(4, torch.int32 if odd else torch.float32)),
        ("float32", "int32"),
    ),
    "dtype of as many bytes": (
        lambda odd: all_reduce(ones(2, torch.int64) if odd else ones(4, torch.int32)),
        ("2 . int64", "4 . int32"),
    ),
    "reduce op": (lambda odd: all_reduce(ones(4), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM), ("SUM", "MAX")),
    "reduce op of reduce_scatter": (
        lambda odd: reduce_scatter(4, dist.ReduceOp.AVG if odd else dist.ReduceOp.SUM),
        ("SUM", "AVG"),
    ),
    "broadcast size": (lambda odd: broadcast(ones(3 if odd else 4), 0), ("16 bytes", "12 bytes")),
    "broadcast root": (lambda odd: broadcast(ones(4), 2 if odd else 0), ("root 0", "root 2")),
    "reduce root": (lambda odd: reduced_to(int(odd)), ("root 0", "root 1")),
    "gather root": (lambda odd: rooted(dist.gather, odd), ("root 0", "root 1")),
    "scatter root": (lambda odd: rooted(dist.scatter, odd), ("root 0", "root 1")),
    "all_gather size": (lambda odd: all_gather(3 if odd else 4), ("64 bytes", "48 bytes")),
    "all_gather lists": (lists, (r"\[4, 12, 8, 4\]", r"\[8, 12, 4, 4\]")),
    "reduce_scatter size": (lambda odd: reduce_scatter(3 if odd else 4), ("64 bytes", "48 bytes")),
    "all_to_all splits": (splits, ("8 bytes", "expects 4", "all_to_all")),
    "broadcast among all_reduce": (
        lambda odd: broadcast(ones(4), 0) if odd else all_reduce(ones(4)),
        (r"all_reduce\(4 . float32, 16 bytes, SUM\)", r"broadcast\(4 . float32, 16 bytes, root 0\)"),
    ),
    "barrier among all_reduce": (
        lambda odd: ([], dist.barrier) if odd else all_reduce(ones(4)),
        (r"all_reduce\(", "barrier"),
    ),
    "one call left out": (lambda odd: in_a_row(odd, (4, 9), (9,)), ("16 bytes", "36 bytes")),
    "other order": (lambda odd: in_a_row(odd, (4, 9), (9, 4)), ("16 bytes", "36 bytes")),
    "message of another size": (message, ("sent 20 bytes", "20 bytes.*16|16 bytes.*20")),
}

#: Expected results of cases in which no call is wrong, or not every rank takes part.
_SEES = {"same count in another shape": (RIGHT,), "message of another size": ("SymmMismatchError", RIGHT)}


def disagree(
    stage: Stage, rank: int, make: Make, odd: Callable[[int], bool], right: bool, fails: bool = True, turns: int = 1
) -> Saw:
    """All ranks call, the odd ranks last; the time counts from then.

    ``right``: the call may succeed. ``fails``: the group fails, on all ranks.
    """
    tensors, call = make(odd(rank))
    before = [tensor.clone() for tensor in tensors]
    symm, name = stage.side == "symm", f"turn-{turns}"
    dist.barrier()
    # The ranks meet again without the group: the failure could otherwise reach another node before its barrier ends.
    stage.meet(f"begun {name}", rank, range(stage.world))
    if symm and "SUCCESS" not in str(stage.backend.get_error()):
        return Saw(WRONG, "there is an error before there is one")
    if odd(rank):
        time.sleep(0.1)
        stage.now_it_happens()

    def checked() -> bool:
        answer = call()
        # An answer of None counts as right only if the call may succeed.
        return answer is True or (answer is None and right)

    saw = stage.observe(checked)
    if saw.raised:
        saw.figures["tensors_written"] = sum(
            not torch.equal(now, then) for now, then in zip(tensors, before, strict=True)
        )
    stage.meet(f"seen {name}", rank, range(stage.world), stage.timeout + 1)
    if symm:
        again, error = stage.observe(dist.barrier), str(stage.backend.get_error())
        if again.raised != fails or ("COMM_ERROR" in error) != fails or (saw.raised and again.text != saw.text):
            saw.kind, saw.text = WRONG, f"then {again.kind}: {again.text} and {error}, after {saw.kind}: {saw.text}"
        dist.destroy_process_group()
        stage.join(rank, name=name)
        dist.all_reduce(tensor := torch.ones(3))
        if not bool((tensor == stage.world).all()):
            saw.kind, saw.text = WRONG, "a new group is wrong"
        if turns > 1:
            return disagree(stage, rank, make, odd, right, fails, turns - 1)
    return saw


for _name, (_make, _says) in MISMATCHES.items():
    _sees = _SEES.get(_name, ("SymmMismatchError",))
    _all = _sees == ("SymmMismatchError",)
    scene(
        f"mismatch: {_name}",
        ROW,
        TARGET,
        Promise(
            sees=_sees,
            names=(0, 1) if _sees != (RIGHT,) else (),
            says=(*_says, r"#\d+", "of group") if _all else _says,
            same=_all,
            within=0.05,
            at_most={} if _sees == (RIGHT,) else {"tensors_written": 0},
            quiet=True,
        ),
        f"group timeout {TIMEOUT_S:g} s",
        where="both",
        timeout=TIMEOUT_S,
        limit=3 * TIMEOUT_S + 4,
    )(
        partial(
            disagree,
            make=_make,
            odd=lambda rank: rank == 1,
            right=_name in _SEES,
            fails=_sees != (RIGHT,),
            turns=3 if _name == "reduce op" else 1,
        )
    )

NODES_ROW = "mismatches between ranks of several nodes"
NODES_TARGET = "an error on all in < 100 ms, both calls named with their nodes, no tensor written"
for _layout in ((2, 2), (1, 2), (1, 1)):
    scene(
        f"mismatch: 400 KB on rank 0 of {_layout}",
        NODES_ROW,
        NODES_TARGET,
        Promise(
            sees=("SymmMismatchError",),
            says=(r'rank 0 \(node "a", pid', "100000 × float32", r"\(4 × float32, 16 bytes, SUM\)"),
            within=0.1,
            at_most={"tensors_written": 0},
        ),
        sides=("symm",),
        layout=_layout,
    )(
        partial(
            disagree,
            make=lambda odd: all_reduce(ones(100_000 if odd else 4)),
            odd=lambda rank: rank == 0,
            right=False,
        )
    )
scene(
    "mismatch: nodes call other collectives",
    NODES_ROW,
    NODES_TARGET,
    Promise(
        sees=("SymmMismatchError",),
        # Each rail compares the calls of its ranks; which rail is first may differ between runs.
        says=(
            r'rank [01] \(node "a", pid \d+\) called broadcast\(50000 ',
            r'rank [23] \(node "b", pid \d+\) called all_gather\(200000 ',
        ),
        within=0.1,
        at_most={"tensors_written": 0},
    ),
    sides=("symm",),
    layout=(2, 2),
)(
    partial(
        disagree,
        make=lambda odd: all_gather(50_000) if odd else broadcast(ones(50_000), 0),
        odd=lambda rank: rank >= 2,
        right=False,
    )
)

"""Ranks that disagree: rank 1 asks for something else than the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from .case import RIGHT, Case, Promise, Saw, add
from .stage import WORLD, Stage, play

ROW = "18 mismatches between ranks (collective, shape, dtype, op, root, splits, order)"
TARGET = (
    "an error on all in < 50 ms, both calls named, no tensor written; swapped equal calls under SYMM_DEBUG=site only"
)
TIMEOUT_S = 2.0

#: Given whether this rank is the odd one: the tensors that the call may write, and the call.
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


def reduce_scatter(count: int) -> tuple[list[torch.Tensor], Callable[[], object]]:
    output = ones(count)
    return [output], lambda: dist.reduce_scatter_tensor(output, ones(WORLD * count))


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


def swapped(odd: bool) -> tuple[list[torch.Tensor], Callable[[], object]]:
    """Two calls with equal descriptors, the other way round: only where they stand tells them apart."""
    first, second = torch.full((4,), 1.0), torch.full((4,), 2.0)

    def calls() -> bool:
        if odd:
            dist.all_reduce(second)
            dist.all_reduce(first)
        else:
            dist.all_reduce(first)
            dist.all_reduce(second)
        return first.tolist() == [WORLD] * 4 and second.tolist() == [2 * WORLD] * 4

    return [first, second], calls


def message(odd: bool) -> tuple[list[torch.Tensor], Callable[[], object]]:
    """The odd rank sends five elements, rank 0 receives four; the others do nothing."""
    tensor = ones(5 if odd else 4)

    def call() -> object:
        if odd:
            return dist.send(tensor, 0)
        if dist.get_rank() == 0:
            dist.recv(tensor, 1)
            return False
        return True

    return [tensor], call


MISMATCHES: dict[str, Make] = {
    "smaller on one rank": lambda odd: all_reduce(ones(3 if odd else 4)),
    "larger on one rank": lambda odd: all_reduce(ones(5 if odd else 4)),
    "20 MB among 16 MB": lambda odd: all_reduce(ones(5 << 20 if odd else 4 << 20)),
    "same count in another shape": lambda odd: all_reduce(ones(6).view(2, 3) if odd else ones(6)),
    "dtype of another width": lambda odd: all_reduce(ones(4, torch.float64 if odd else torch.float32)),
    "dtype of the same width": lambda odd: all_reduce(ones(4, torch.int32 if odd else torch.float32)),
    "reduce op": lambda odd: all_reduce(ones(4), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM),
    "broadcast size": lambda odd: broadcast(ones(3 if odd else 4), 0),
    "broadcast root": lambda odd: broadcast(ones(4), 2 if odd else 0),
    "all_gather size": lambda odd: all_gather(3 if odd else 4),
    "reduce_scatter size": lambda odd: reduce_scatter(3 if odd else 4),
    "all_to_all splits": splits,
    "broadcast among all_reduce": lambda odd: broadcast(ones(4), 0) if odd else all_reduce(ones(4)),
    "barrier among all_reduce": lambda odd: ([], dist.barrier) if odd else all_reduce(ones(4)),
    "one call left out": lambda odd: in_a_row(odd, (4, 9), (9,)),
    "other order": lambda odd: in_a_row(odd, (4, 9), (9, 4)),
    "swapped equal calls": swapped,
    "message of another size": message,
}

#: What differs although nothing is wrong, and where not every rank takes part.
_SEES = {"same count in another shape": (RIGHT,), "message of another size": ("SymmMismatch", RIGHT)}


def disagree(stage: Stage, rank: int, name: str) -> Saw:
    """All call; the odd rank comes last, and the time counts from then."""
    tensors, call = MISMATCHES[name](rank == 1)
    before = [tensor.clone() for tensor in tensors]
    dist.barrier()
    if rank == 1:
        time.sleep(0.1)
        stage.now_it_happens()

    def checked() -> bool:
        answer = call()
        # Where somebody must raise, only a call that says so itself was right.
        return answer is True or (answer is None and name in _SEES)

    saw = stage.observe(checked)
    if saw.raised:
        saw.figures["tensors_written"] = sum(
            not torch.equal(now, then) for now, then in zip(tensors, before, strict=True)
        )
    stage.meet("seen", rank, range(stage.world), stage.timeout + 1)
    return saw


for _name in MISMATCHES:
    add(
        Case(
            f"mismatch: {_name}",
            ROW,
            partial(
                play,
                partial(disagree, name=_name),
                timeout=TIMEOUT_S,
                limit=3 * TIMEOUT_S + 4,
                env={"SYMM_DEBUG": "site"},
            ),
            Promise(
                sees=_SEES.get(_name, ("SymmMismatch",)),
                names=(0, 1) if _name not in _SEES or _name.startswith("message") else (),
                within=0.05,
                at_most={} if _SEES.get(_name) == (RIGHT,) else {"tensors_written": 0},
            ),
            TARGET,
            f"group timeout {TIMEOUT_S:g} s",
        )
    )

"""The host's time in eager calls of one size: who takes it in an all-reduce, and how other calls compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .driver import empty_launch
from .inputs import Call, Setting

if TYPE_CHECKING:
    from .sides import Side

SIZE = 64 << 10
OPS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")


def entrances(at: Setting, op: str, whole: Call, side: Side) -> dict[str, Call]:
    """The synchronous call ``whole``, which is ``op`` on ``side``, and an all-reduce by where else it is entered.

    * ``host``: ``whole``: ``dist.all_reduce`` or what else users call;
    * ``group``: the method of ``ProcessGroup``: without the Python code of torch.distributed, through the dispatcher;
    * ``backend``: the method of the backend itself, with the translation of its arguments from Python;
    * ``launch``: on GPUs, the driver's launch of a kernel, which ends each of them;
    * ``operator``: on groups of symm, ``torch.ops.symm.all_reduce``, into a new tensor.
    """
    calls = {"host": whole}
    if op != "all_reduce" or not side.calls_dist:
        return calls
    tensors = [at.given(at.inputs.count)]
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
    options.asyncOp = False

    def entered(allreduce: Callable[..., dist.Work | None]) -> Call:
        def run() -> None:
            work = allreduce(tensors, options)
            if work is not None:
                work.wait()

        return Call(whole.reset, run, whole.check)

    # Its stub lacks the collectives.
    backend: Any = at.group._get_backend(at.inputs.device)
    calls |= {"group": entered(at.group.allreduce), "backend": entered(backend.allreduce)}
    if at.inputs.device.type == "cuda":
        calls["launch"] = Call(lambda: None, empty_launch(), lambda _calls: None)
    if dist.get_backend(at.group) == "symm":
        calls["operator"] = _operator(at, tensors[0], whole)
    return calls


def _operator(at: Setting, tensor: torch.Tensor, whole: Call) -> Call:
    results: list[torch.Tensor] = []

    def run() -> None:
        results[:] = [torch.ops.symm.all_reduce(tensor, "sum", at.group.group_name)]

    return Call(whole.reset, run, lambda _calls: at.inputs.compare_sum(results[0]))

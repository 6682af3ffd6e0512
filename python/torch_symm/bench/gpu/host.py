"""One all-reduce entered at three levels, and the launch at its end, so that the host's time can be told apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from .calls import OPS, Call, Setting
from .driver import empty_launch


def entrances(at: Setting) -> dict[str, Call]:
    """The synchronous all-reduce of a cell, by where it is entered:

    * ``host``: ``dist.all_reduce``, as users call it;
    * ``group``: the method of ``ProcessGroup``: without the Python code of torch.distributed, through the dispatcher;
    * ``backend``: the method of the backend itself, with the translation of its arguments from Python;
    * ``launch``: on GPUs, the driver's launch of a kernel, which ends each of them.
    """
    tensors = [at.given(at.inputs.count)]
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
    options.asyncOp = False
    whole = OPS["all_reduce"].build(at)

    def entered(allreduce: Callable[..., dist.Work | None]) -> Call:
        def run() -> None:
            work = allreduce(tensors, options)
            if work is not None:
                work.wait()

        return Call(whole.reset, run, whole.check)

    # Its stub lacks the collectives.
    backend: Any = at.group._get_backend(at.inputs.device)
    calls = {"host": whole, "group": entered(at.group.allreduce), "backend": entered(backend.allreduce)}
    if at.inputs.device.type == "cuda":
        calls["launch"] = Call(lambda: None, empty_launch(), lambda _calls: None)
    return calls

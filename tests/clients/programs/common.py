"""A model and data for the programs in this directory, the same on every backend, and the report of their results."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
import torch_symm


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def batches(rank: int, count: int = 5) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Different data on every rank, so that parameters stay equal only if gradients are averaged."""
    generator = torch.Generator().manual_seed(1 + rank)
    for _ in range(count):
        inputs = torch.randn(16, 8, generator=generator)
        yield inputs, inputs.sum(1, keepdim=True)


def tell(model: torch.nn.Module, numbers: Iterable[torch.Tensor] = ()) -> None:
    """Prints, on every rank, a line of JSON: a digest of parameters and numbers, and the backend of the group."""
    digest = hashlib.sha256()
    for tensor in model.parameters():
        digest.update(tensor.detach().numpy().tobytes())
    group = dist.group.WORLD
    served = isinstance(group._get_backend(torch.device("cpu")), torch_symm.ProcessGroupSymm)
    told = {
        "rank": dist.get_rank(),
        "parameters": digest.hexdigest(),
        "numbers": [number.item() for number in numbers],
        "backend": str(dist.get_backend()),
        "symm": served,
        "calls": len(torch_symm.trace()["calls"]) if served else 0,
    }
    print("told " + json.dumps(told), flush=True)
    if not served:
        # If a thread of Gloo still holds the last call's tensors while the interpreter exits, the process aborts
        # (https://github.com/pytorch/pytorch/pull/179291). A program on Gloo therefore exits without the interpreter's
        # cleanup.
        atexit.register(os._exit, 0)

"""Tensors in symmetric memory, and checks that calls used it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch_symm
from pool import device, settle

MB = 1 << 20
#: Maximum seconds until every peer has mapped a new segment.
ACCEPTED_S = 20.0


def new_pool() -> torch.cuda.MemPool:
    """A pool whose tensors peers can access."""
    return torch.cuda.MemPool(torch_symm.mem_allocator())


def direct() -> int:
    """Number of zero-copy calls of this process, replays included."""
    settle()
    return int(torch_symm.stats().get("zero_copy", 0))


def engines() -> dict[str, int]:
    """Numbers of calls that copy engines moved here: staged, direct, and those direct calls that were repaired."""
    found = {"staged": 0, "direct": 0, "repaired": 0}
    for algorithms in torch_symm.stats().values():
        for way in found:
            found[way] += algorithms.get(f"copy_engine_{way}", 0) if isinstance(algorithms, dict) else 0
    return found


def unstaged() -> int:
    """Number of calls of this process that moved no bytes through the workspace, in kernels or by copy engines."""
    return direct() + engines()["direct"]


def rises(call: Callable[..., object], *args: object) -> list[int]:
    """By how much ``call``, which all ranks make, increases the number of zero-copy calls on each rank."""
    before = direct()
    call(*args)
    own = torch.tensor([direct() - before])
    everyone = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    return [int(each) for each in everyone]


def warm(call: Callable[..., object], *args: object) -> None:
    """Repeats a call, equally often on every rank, until it is zero-copy: peers map a new segment a little later."""
    start = time.monotonic()
    while not any(rises(call, *args)):
        late = torch.tensor([time.monotonic() - start > ACCEPTED_S])
        dist.all_reduce(late)
        assert not bool(late), f"no call went direct within {ACCEPTED_S} s: {torch_symm.stats()}"
        time.sleep(0.01)


def same_bytes(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Returns true if the tensors are equal bit by bit; compares on the device."""
    return torch.equal(got.flatten().view(torch.uint8), wanted.flatten().view(torch.uint8))


def numbers(count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Different values for each rank, in ordinary memory."""
    generator = torch.Generator(device()).manual_seed(100 * seed + dist.get_rank())
    if dtype.is_floating_point:
        return torch.empty(count, device=device()).uniform_(-4, 4, generator=generator).to(dtype)
    return torch.randint(0, 100, (count,), device=device(), dtype=dtype, generator=generator)

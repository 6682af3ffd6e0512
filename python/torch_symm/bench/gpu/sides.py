"""The compared sides: which group, which memory, which operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from .calls import OPS, Call, Place, Setting, one_shot, two_shot

GROUP_TIMEOUT = timedelta(seconds=60)
# One-shot reads n times S on every rank: far behind from here on, and slow to measure.
ONE_SHOT_LIMIT = 4 << 20
#: A group that failed this often is not made again.
MAX_FAILURES = 3


class NotThere(RuntimeError):
    """This build or machine lacks what the side measures; the text says what."""


@dataclass
class Side:
    """One side. ``special``: its own builders instead of `calls.OPS`; ``limit``: the largest size in bytes."""

    name: str
    group: dist.ProcessGroup
    place: Place
    remake: Callable[[], dist.ProcessGroup] | None = None
    special: dict[str, Callable[[Setting], Call]] | None = None
    limit: int | None = None
    failures: int = 0
    keep: list[object] = field(default_factory=list)
    """What must live as long as the side."""

    @property
    def ours(self) -> bool:
        """Whether this is symm."""
        return self.name.startswith("symm")

    def builder(self, op: str, size: int) -> Callable[[Setting], Call] | None:
        """How ``op`` is done here; None where it is not."""
        if self.failures >= MAX_FAILURES or (self.limit is not None and size > self.limit):
            return None
        return OPS[op].build if self.special is None else self.special.get(op)

    def failed(self) -> None:
        """Makes a new group after a failure that may have ended the old one. Called by all ranks."""
        self.failures += 1
        if self.remake is not None and self.failures < MAX_FAILURES:
            dist.destroy_process_group(self.group)
            self.group = self.remake()


Maker = Callable[[torch.device, int], Side]


def _room(device: torch.device, size: int) -> Place:
    return Place(*(torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)))


def _new(backend: str) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(backend=backend, timeout=GROUP_TIMEOUT)
    return group


def _first_call(group: dist.ProcessGroup, device: torch.device) -> None:
    """NCCL makes its communicator at the first call."""
    dist.all_reduce(torch.ones(1, device=device), group=group)
    if device.type == "cuda":
        torch.cuda.synchronize()


def _ordinary(backend: str) -> Maker:
    def make(device: torch.device, size: int) -> Side:
        return Side(backend, _new(backend), _room(device, size), remake=lambda: _new(backend))

    return make


def _symm_pool(device: torch.device, size: int) -> Side:
    group = _new("symm")
    backend = group._get_backend(device)
    if not backend.supports_tensor_alloc(device):
        raise NotThere("the group allocates no tensors on this device")
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        place = _room(device, size)
    return Side("symm pool", group, place, keep=[pool])


def _nccl(device: torch.device, size: int) -> Side:
    group = _new("nccl")
    _first_call(group, device)
    return Side("nccl", group, _room(device, size))


def _nccl_window(device: torch.device, size: int) -> Side:
    # A group of its own: should registering fail half way, the other one is not harmed.
    group = _new("nccl")
    _first_call(group, device)
    backend = group._get_backend(device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        place = _room(device, size)
    backend.register_mem_pool(pool, symm=True)  # type: ignore[attr-defined]
    return Side("nccl window", group, place, keep=[pool])


def _torch(name: str, build: Callable[[Setting], Call], limit: int | None) -> Maker:
    def make(device: torch.device, size: int) -> Side:
        import torch.distributed._symmetric_memory as symmetric

        # Only its name and store are used, so NCCL never makes a communicator for it.
        group = _new("nccl")
        room = symmetric.empty(size if limit is None else min(size, limit), dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(room, group)
        return Side(name, group, Place(room, room), special={"all_reduce": build}, limit=limit, keep=[handle])

    return make


GPU_SIDES: dict[str, Maker] = {
    "symm": _ordinary("symm"),
    "symm pool": _symm_pool,
    "nccl": _nccl,
    "nccl window": _nccl_window,
    "torch one-shot": _torch("torch one-shot", one_shot, ONE_SHOT_LIMIT),
    "torch two-shot": _torch("torch two-shot", two_shot, None),
}
CPU_SIDES: dict[str, Maker] = {"symm": _ordinary("symm"), "gloo": _ordinary("gloo")}

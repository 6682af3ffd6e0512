"""The compared sides: their groups, memory and operations."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from torch_symm._torch_compat import backend_of, new_group

from . import copies, torch_calls
from .calls import OPS, nccl_barrier
from .inputs import GpuCall, Place, Setting

# A call of the largest size takes milliseconds; NCCL's set-up takes seconds.
GROUP_TIMEOUT = timedelta(seconds=20)
# One-shot is not measured with larger tensors: every rank reads all n tensors, so it is slow and takes long to measure.
ONE_SHOT_LIMIT = 4 << 20
#: A group that failed this often is not made again.
MAX_FAILURES = 3

Builder: TypeAlias = Callable[[Setting], GpuCall]
Builders: TypeAlias = Mapping[str, Builder]

ORDINARY: Builders = {op: row.build for op, row in OPS.items()}
NCCL: Builders = {**ORDINARY, "barrier": nccl_barrier}


def is_timeout(error: str) -> bool:
    """Returns true if the text of an error says that something timed out."""
    return re.search(r"time(d )?_?out", error, re.IGNORECASE) is not None


class UnavailableError(RuntimeError):
    """This build or machine lacks something that the side needs; the text says what."""


class GroupFailed(RuntimeError):
    """A group reports a failure, although no call raised; the text says which."""


@dataclass
class GpuSide:
    """One side. ``builders``: its operations; ``limit``: the largest size in bytes."""

    name: str
    group: dist.ProcessGroup
    place: Place
    remake: Callable[[], dist.ProcessGroup] | None = None
    builders: Builders = field(default_factory=lambda: ORDINARY)
    limit: int | None = None
    failures: int = 0
    keep: list[object] = field(default_factory=list)
    """Objects that must live as long as the side."""
    capturing: Callable[[], AbstractContextManager[object]] = nullcontext
    """The context in which its calls are captured in a graph."""

    @property
    def calls_dist(self) -> bool:
        """True if the side calls torch.distributed."""
        return "send_recv" in self.builders

    @property
    def is_plain(self) -> bool:
        """True if the side is still available and calls torch.distributed on ordinary memory."""
        return self.calls_dist and not self.keep and self.failures < MAX_FAILURES

    def builder(self, op: str, size: int) -> Builder | None:
        """Returns the builder of ``op`` for this side; None if the side lacks it."""
        if self.failures >= MAX_FAILURES or (self.limit is not None and size > self.limit):
            return None
        return self.builders.get(op)

    def sound(self, device: torch.device) -> None:
        """Checks that the group has not failed: kernels that timed out leave a wrong result and raise nothing.

        Raises:
            GroupFailed: the group has failed.
        """
        ask = getattr(backend_of(self.group, device), "get_error", None)
        found = str(ask()) if ask is not None else "SUCCESS"
        if not found.endswith("SUCCESS"):
            raise GroupFailed(found)

    def failed(self) -> None:
        """Makes a new group after a failure that may have ended the old one. Called by all ranks."""
        self.failures += 1
        if self.remake is not None and self.failures < MAX_FAILURES:
            dist.destroy_process_group(self.group)
            self.group = self.remake()


Maker: TypeAlias = Callable[[torch.device, int], GpuSide]
#: Returns the makers of the sides by name; a function of a module, so that rank processes can find it.
Makers: TypeAlias = Callable[[], Mapping[str, Maker]]


def _room(device: torch.device, size: int) -> Place:
    return Place(*(torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)))


def _new(backend: str, device: torch.device) -> dist.ProcessGroup:
    """Returns a group in which all ranks have made a call, because a first message would connect only two ranks."""
    group = new_group(backend=backend, timeout=GROUP_TIMEOUT)
    dist.all_reduce(torch.ones(1, device=device), group=group)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return group


def _ordinary(backend: str) -> Maker:
    def make(device: torch.device, size: int) -> GpuSide:
        return GpuSide(backend, _new(backend, device), _room(device, size), remake=lambda: _new(backend, device))

    return make


def _symm_pool(device: torch.device, size: int) -> GpuSide:
    group = _new("symm", device)
    backend = backend_of(group, device)
    if not backend.supports_tensor_alloc(device):
        raise UnavailableError("the group allocates no tensors on this device")
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        place = _room(device, size)
    return GpuSide("symm pool", group, place, keep=[pool])


def _nccl(device: torch.device, size: int) -> GpuSide:
    group = _new("nccl", device)
    return GpuSide("nccl", group, _room(device, size), builders=NCCL)


def _nccl_window(device: torch.device, size: int) -> GpuSide:
    # A separate group, so that a registration that fails does not affect the side "nccl".
    group = _new("nccl", device)
    backend = backend_of(group, device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        place = _room(device, size)
    backend.register_mem_pool(pool, symm=True)
    return GpuSide("nccl window", group, place, builders=NCCL, keep=[pool])


def _torch(name: str, builders: Callable[[Any], Builders], limit: int | None = None) -> Maker:
    """Makes a side for torch's symmetric memory; ``builders`` receive the handle of its rendezvous."""

    def make(device: torch.device, size: int) -> GpuSide:
        import torch.distributed._symmetric_memory as symmetric

        # torch uses only the name and the store of this group, so NCCL never makes a communicator for it.
        group = new_group(backend="nccl", timeout=GROUP_TIMEOUT)
        room = symmetric.empty(size if limit is None else min(size, limit), dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(room, group)
        place = Place(room, room)
        return GpuSide(name, group, place, builders=builders(handle), limit=limit, keep=[handle])

    return make


def _copies(device: torch.device, size: int) -> GpuSide:
    import torch_symm.symm_mem as symm_mem

    group = _new("symm", device)
    source = symm_mem.empty(size, dtype=torch.uint8, device=device)
    handle = symm_mem.rendezvous(source, group)
    peers = [rank for rank in range(group.size()) if rank != group.rank()]
    sources = [handle.get_buffer(peer, (size,), torch.uint8) for peer in peers]
    place = Place(source, torch.empty(size, dtype=torch.uint8, device=device))
    return GpuSide(
        "copies", group, place, builders=copies.builders(dict(zip(peers, sources, strict=True))), keep=[handle]
    )


def _low_contention(_handle: object) -> Builders:
    found = {
        "all_gather": torch_calls.low_contention_all_gather,
        "reduce_scatter": torch_calls.low_contention_reduce_scatter,
    }
    missing = [op for op in found if not hasattr(torch.ops.symm_mem, f"_low_contention_{op}")]
    if missing:
        raise UnavailableError(f"torch {torch.__version__} has no _low_contention_{missing[0]}")
    return found


def gpu_sides() -> dict[str, Maker]:
    """Returns the sides on GPUs, in the order of measurement."""
    return {
        "symm": _ordinary("symm"),
        "symm pool": _symm_pool,
        "nccl": _nccl,
        "nccl window": _nccl_window,
        "torch one-shot": _torch("torch one-shot", lambda _: {"all_reduce": torch_calls.one_shot}, ONE_SHOT_LIMIT),
        "torch two-shot": _torch("torch two-shot", lambda _: {"all_reduce": torch_calls.two_shot}),
        "torch low contention": _torch("torch low contention", _low_contention),
        "torch barrier": _torch("torch barrier", lambda it: {"barrier": torch_calls.signal_pad_barrier(it)}, 16),
    }


def sides_with_products() -> dict[str, Maker]:
    """Returns the sides that run while products run: the sides on GPUs, and plain copies as the bound."""
    return {**gpu_sides(), "copies": _copies}


def cpu_sides() -> dict[str, Maker]:
    """Returns the sides on CPU tensors."""
    return {"symm": _ordinary("symm"), "gloo": _ordinary("gloo")}

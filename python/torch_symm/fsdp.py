"""Communication of FSDP2 through buffers in symmetric memory.

    fully_shard(model)
    torch_symm.fsdp.use(model)

FSDP2 copies the parameters of a module into one buffer, gathers it, and copies the result into the parameters; it
copies gradients into another buffer, and reduces and scatters it. :func:`use` keeps these buffers in the symmetric
memory of the GPU, where other ranks' kernels load and store them directly. The results have the same bits. On devices
without such memory the buffers are in ordinary memory.

**Addresses.** Each size has a memory pool of its own, so that the same addresses come back in every step. The pools end
with the model; buffers outlive them.

**Streams.** FSDP2 drops a buffer only after the stream that was current in ``allocate`` waits for the last use, and
torch's allocator hands a block out again only on that stream. The pools keep this order, because they are torch's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from threading import RLock
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_api as torch_api
from torch.distributed.tensor import DTensor

from torch_symm._memory import mem_allocator
from torch_symm._native import load
from torch_symm._torch_compat import backend_of

__all__ = ["AllGather", "Buffers", "ReduceScatter", "use"]

#: No group uses symmetric memory for shorter tensors.
MIN_BYTES = 1 << 20
#: Maximum number of sizes with their own pool; a model has few sizes, unless parameters take part only in some steps.
MAX_SIZES = 32


class Buffers:
    """Tensors in symmetric memory by size, for the communication of one model."""

    def __init__(self) -> None:
        """Allocates nothing yet."""
        #: The pools. The key is the device index and the size of the tensors in bytes. All sizes after the first
        #: ``MAX_SIZES`` share the pool of size 0.
        self._pools: dict[tuple[int, int], Any] = {}
        #: By device index, whether the device supports symmetric memory.
        self._symmetric: dict[int, bool] = {}
        # torch rejects a pool that two threads use. Backward passes have threads of their own.
        self._lock = RLock()

    def allocate(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns an uninitialised tensor.

        It is in ordinary memory if it is shorter than ``MIN_BYTES`` or the device has no symmetric memory.

        Raises:
            torch.OutOfMemoryError: not enough memory is available.
        """
        bytes_ = math.prod(int(length) for length in size) * dtype.itemsize
        if device.type != "cuda" or bytes_ < MIN_BYTES:
            return torch.empty(*size, dtype=dtype, device=device)
        index = torch.cuda.current_device() if device.index is None else device.index
        if index not in self._symmetric:
            self._symmetric[index] = bool(load()._supports_symm_mem(index))
        if not self._symmetric[index]:
            return torch.empty(*size, dtype=dtype, device=device)
        with self._lock, torch.cuda.use_mem_pool(self._pool(index, bytes_), index):
            return torch.empty(*size, dtype=dtype, device=device)

    def _pool(self, index: int, bytes_: int) -> Any:
        key = (index, bytes_)
        if key not in self._pools and len(self._pools) >= MAX_SIZES:
            key = (index, 0)
        if key not in self._pools:
            with torch.cuda.device(index):  # a pool belongs to the current device
                self._pools[key] = torch.cuda.MemPool(mem_allocator())
        return self._pools[key]


class _Allocating:
    def __init__(self, buffers: Buffers | None = None) -> None:
        """``buffers``: the buffers of other modules, to share memory; default: new ones."""
        self._buffers = buffers or Buffers()

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns an uninitialised buffer; see :meth:`Buffers.allocate`."""
        return self._buffers.allocate(size, dtype, device)


class AllGather(_Allocating, torch_api.AllGather):
    """All-gathers of parameters, for ``FSDPModule.set_custom_all_gather``."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gathers ``input_tensor``, which FSDP2 has written into this rank's part of ``output_tensor``."""
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class ReduceScatter(_Allocating, torch_api.ReduceScatter):
    """Reduce-scatters of gradients, for ``FSDPModule.set_custom_reduce_scatter``."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduces ``input_tensor`` over the ranks, and keeps this rank's part in ``output_tensor``."""
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def use(model: torch.nn.Module) -> None:
    """Sets :class:`AllGather` and :class:`ReduceScatter` on every FSDP2 module of ``model``, with shared buffers.

    Call it after ``fully_shard`` and before the first step. It replaces custom communication, and cannot be combined
    with ``set_allocate_memory_from_process_group_for_comm`` or ``set_symm_mem_for_comm``.

    Raises:
        ValueError: ``model`` has no FSDP2 module, none of its parameters is sharded over a group of backend symm, or a
            module has parameters on several meshes, for which torch accepts no custom communication.
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ValueError("torch_symm.fsdp.use: no module was passed to fully_shard yet")
    # The key is the identity, because torch's meshes with the same ranks and names are equal even if their groups
    # differ.
    found = [parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)]
    meshes = {id(mesh): mesh for mesh in found}.values()
    groups = [(group, mesh.device_type) for mesh in meshes for group in mesh.get_all_groups()]
    if not any(isinstance(backend_of(group, kind), load().ProcessGroupSymm) for group, kind in groups):
        names = ", ".join(sorted({dist.get_backend(group) for group, _ in groups}))
        raise ValueError(f"torch_symm.fsdp.use: the parameters are sharded over groups of {names or 'no backend'}")
    buffers = Buffers()
    gather, scatter = AllGather(buffers), ReduceScatter(buffers)
    for module in modules:
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(scatter)

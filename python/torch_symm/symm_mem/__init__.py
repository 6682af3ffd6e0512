"""Symmetric memory: tensors that the ranks of a group load and store in one another's memory, on CUDA and on CPU.

The names and semantics are those of ``torch.distributed._symmetric_memory``, so that programs run with either; the
handle that :func:`rendezvous` returns is torch's ``_SymmetricMemory``. ``docs/guide/symmetric-memory.md`` lists the
differences. The fused operators are also ``torch.ops.symm.*``; :func:`enable_fused_ops` lets torch's own
``torch.ops.symm_mem.fused_*`` and Inductor's async tensor parallelism use them for symm groups.
"""

from __future__ import annotations

from torch_symm._native import load
from torch_symm.symm_mem import _all_gather_matmul, _matmul_reduce_scatter
from torch_symm.symm_mem._groups import _test_mode, enable_symm_mem_for_group, is_symm_mem_enabled_for_group
from torch_symm.symm_mem._install import disable_fused_ops, enable_fused_ops
from torch_symm.symm_mem._layout import (
    make_contiguous_for_perm,
    outermost,
    restride_A_for_fused_matmul_reduce_scatter,
    restride_A_shard_for_fused_all_gather_matmul,
)
from torch_symm.symm_mem._memory import (
    empty,
    get_backend,
    get_mem_pool,
    get_mempool_allocator,
    get_signal_pad_size,
    is_nvshmem_available,
    put_signal,
    rendezvous,
    set_backend,
    set_signal_pad_size,
    wait_signal,
)
from torch_symm.symm_mem._operators import (
    fused_all_gather_matmul,
    fused_all_gather_scaled_matmul,
    fused_matmul_reduce_scatter,
    fused_scaled_matmul_reduce_scatter,
)
from torch_symm.symm_mem._pipeline import (
    _pipelined_all_gather_and_consume,
    _pipelined_multi_all_gather_and_consume,
    _pipelined_produce_and_all2all,
)
from torch_symm.symm_mem._workspace import get_symm_mem_workspace

# torch's module has these names, too.
_fused_all_gather_matmul_fallback = _all_gather_matmul.fallback
_fused_all_gather_scaled_matmul_fallback = _all_gather_matmul.fallback_scaled
_fused_matmul_reduce_scatter_fallback = _matmul_reduce_scatter.fallback
_fused_scaled_matmul_reduce_scatter_fallback = _matmul_reduce_scatter.fallback_scaled

load()  # registers the allocators with torch

__all__ = [
    "_pipelined_all_gather_and_consume",
    "_pipelined_multi_all_gather_and_consume",
    "_pipelined_produce_and_all2all",
    "_test_mode",
    "disable_fused_ops",
    "empty",
    "enable_fused_ops",
    "enable_symm_mem_for_group",
    "fused_all_gather_matmul",
    "fused_all_gather_scaled_matmul",
    "fused_matmul_reduce_scatter",
    "fused_scaled_matmul_reduce_scatter",
    "get_backend",
    "get_mem_pool",
    "get_mempool_allocator",
    "get_signal_pad_size",
    "get_symm_mem_workspace",
    "is_nvshmem_available",
    "is_symm_mem_enabled_for_group",
    "make_contiguous_for_perm",
    "outermost",
    "put_signal",
    "rendezvous",
    "restride_A_for_fused_matmul_reduce_scatter",
    "restride_A_shard_for_fused_all_gather_matmul",
    "set_backend",
    "set_signal_pad_size",
    "wait_signal",
]

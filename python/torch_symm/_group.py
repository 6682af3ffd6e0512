"""Makes a group from torch's options."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta
from multiprocessing import parent_process, util
from typing import Any

import torch
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed import distributed_c10d

from torch_symm import _coalescing, _dtensor, _logging, _torch_compat
from torch_symm._live import publisher
from torch_symm._native import leave_all, load


def create_group(options: Any, group_options: Any) -> Any:
    """Joins the group described by torch's ``_DistributedBackendOptions``.

    ``group_options`` may be a :class:`torch_symm.Options`. Its timeout takes precedence over torch's, unless it is the
    default of 30 minutes.

    Raises:
        TypeError: ``group_options`` is of another type.
        SymmConfigError, SymmTimeoutError: the group cannot be formed; the message names the ranks.
    """
    native = load()
    if group_options is not None and not isinstance(group_options, native.Options):
        raise TypeError(f"pg_options must be a torch_symm.Options, not {type(group_options).__name__}")
    _torch_compat.record_without_torch()
    _choose_symmetric_memory()
    own = prepared(native, options, group_options)
    try:
        return native.ProcessGroupSymm(options.store, int(options.group_rank), int(options.group_size), own)
    except BaseException:
        forget_failed_start()
        raise


def prepared(native: Any, options: Any, group_options: Any) -> Any:
    """Prepares this process for the group to be made, and returns its :class:`torch_symm.Options`."""
    timeout = options.timeout
    # Options that state other values have the default timeout, which must not replace the argument of torch's function.
    if group_options is not None and group_options._timeout != native.Options()._timeout:
        timeout = group_options._timeout
    if not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=float(timeout))
    _dtensor.announce()
    _coalescing.end_blocks_at_exceptions()
    own = native.Options(timeout, str(options.group_id), [int(rank) for rank in options.global_ranks_in_group])
    if getattr(options, "enable_reconfigure", False) or getattr(group_options, "enable_reconfigure", False):
        own.enable_reconfigure = True  # which the native part refuses
    if group_options is not None:
        for name in ("inter_node_backend", "reduce_dtype", "order", "cta_policy", "max_ctas"):
            setattr(own, name, getattr(group_options, name))
    _leave_with_multiprocessing(native)
    publisher.start(native)
    return own


#: The process whose exit is handled.
_leaving: int | None = None


def _leave_with_multiprocessing(native: Any) -> None:
    """Lets a process of ``multiprocessing``, which ends without ``atexit``, still leave its groups in order."""
    global _leaving
    if parent_process() is not None and _leaving != os.getpid():
        _leaving = os.getpid()
        # With a negative priority this runs after multiprocessing has joined this process's own children, which may use
        # the groups' memory.
        util.Finalize(None, leave_all, (native,), exitpriority=-1)
        util.Finalize(None, _logging.end, exitpriority=-2)


def forget_failed_start() -> None:
    """Resets torch's count of groups after the default group could not be made, so that a retry can succeed.

    torch names groups by this count and prefixes all keys of the store with the name. A default group that failed stays
    counted until a default group is destroyed. In a retry, it would not meet new processes, whose count is lower.
    """
    world = distributed_c10d._world
    if not world.pg_map:
        world.group_count = 0


def _choose_symmetric_memory() -> None:
    """Makes ``SYMM`` torch's symmetric memory for CUDA if the program has neither chosen nor used another.

    torch's own backend is the default, so this function cannot see whether the program chose it. The environment
    variable ``TORCH_SYMMMEM=CUDA``, which torch also reads, keeps torch's backend.
    """
    if "TORCH_SYMMMEM" in os.environ or _SymmetricMemory.get_backend(torch.device("cuda")) != "CUDA":
        return
    with suppress(RuntimeError):  # torch's own is already in use
        _SymmetricMemory.set_backend("SYMM")

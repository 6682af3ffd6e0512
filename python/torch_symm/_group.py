"""From torch's options to a group."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta
from multiprocessing import parent_process, util
from typing import Any

import torch
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed import distributed_c10d

from torch_symm import _coalescing, _dtensor, _logging, _torch
from torch_symm._live import live
from torch_symm._native import leave_all, load


def create_group(options: Any, group_options: Any) -> Any:
    """Joins the group described by torch's ``_DistributedBackendOptions``.

    ``group_options`` may be a :class:`torch_symm.Options`; its timeout then wins over torch's.

    Raises:
        TypeError: ``group_options`` is of another type.
        SymmConfigError, SymmTimeout: the group cannot be formed; the message names the ranks.
    """
    native = load()
    if group_options is not None and not isinstance(group_options, native.Options):
        raise TypeError(f"pg_options must be a torch_symm.Options, not {type(group_options).__name__}")
    _torch.record_without_torch()
    _choose_symmetric_memory()
    own = prepared(native, options, group_options)
    live.start(native)
    try:
        return native.ProcessGroupSymm(options.store, int(options.group_rank), int(options.group_size), own)
    except BaseException:
        forget_failed_start()
        raise


def prepared(native: Any, options: Any, group_options: Any) -> Any:
    """The :class:`torch_symm.Options` of the group that is to be made; this process is ready for it."""
    timeout = options.timeout if group_options is None else group_options._timeout
    if not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=float(timeout))
    _dtensor.announce()
    _coalescing.end_blocks_at_exceptions()
    own = native.Options(timeout, str(options.group_id), [int(rank) for rank in options.global_ranks_in_group])
    if getattr(options, "enable_reconfigure", False) or getattr(group_options, "enable_reconfigure", False):
        own.enable_reconfigure = True  # which the native part refuses
    if group_options is not None:
        own.between_hosts, own.partials = group_options.between_hosts, group_options.partials
    _leave_with_multiprocessing(native)
    return own


#: Of the process whose end was arranged for.
_leaving: int | None = None


def _leave_with_multiprocessing(native: Any) -> None:
    """Lets a process of ``multiprocessing``, which ends without ``atexit``, leave its groups in order all the same."""
    global _leaving
    if parent_process() is not None and _leaving != os.getpid():
        _leaving = os.getpid()
        # Negative: once its own children have been waited for, which may use the groups' memory.
        util.Finalize(None, leave_all, (native,), exitpriority=-1)
        util.Finalize(None, _logging.end, exitpriority=-2)


def forget_failed_start() -> None:
    """Lets a process whose default group could not be made meet others, new ones among them, in another try.

    torch names groups by a counter, puts the name before all keys of the store, and counts a default group that came
    to nothing until one is destroyed: in the next try ranks that count differently would wait for each other.
    """
    world = distributed_c10d._world
    if not world.pg_map:
        world.group_count = 0


def _choose_symmetric_memory() -> None:
    """Makes ``SYMM`` torch's symmetric memory of CUDA where a program has neither chosen nor used another.

    torch's own cannot be chosen, only left as it is: by the environment variable ``TORCH_SYMMMEM=CUDA``, which torch
    reads, too.
    """
    if "TORCH_SYMMMEM" in os.environ or _SymmetricMemory.get_backend(torch.device("cuda")) != "CUDA":
        return
    with suppress(RuntimeError):  # it is in use
        _SymmetricMemory.set_backend("SYMM")

"""torch's ``MultiProcessTestCase`` on forked ranks."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

# torch's harness queries the GPUs when it is imported. Let it use NVML, because a query through CUDA would initialise
# CUDA, which forked children could then not use.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

from torch.testing._internal import common_distributed as common

from torch_symm._warnings import SymmFallbackWarning

from ._rank import dies_with, used_cuda

if TYPE_CHECKING:
    import unittest

    class _Upstream(unittest.TestCase):
        """The parts of torch's class, which has no types, that are used here."""

        processes: list[multiprocessing.Process]
        pid_to_pipe: dict[int, multiprocessing.connection.Connection]
        TEST_ERROR_EXIT_CODE: int
        Event: Any

        def _spawn_processes(self) -> None: ...
        def _start_processes(self, proc: Callable[..., Any]) -> None: ...
        def _check_return_codes(self, fn: Callable[..., Any], elapsed_time: float) -> None: ...
else:
    _Upstream = common.MultiProcessTestCase

skip_if_lt_x_gpu = common.skip_if_lt_x_gpu

#: How many seconds the other ranks have to end after the first has failed.
GRACE_S = 3.0
#: How many seconds the ranks have to send their stacks.
STACK_S = 5.0


class _Forked(multiprocessing.get_context("fork").Process):  # type: ignore[misc] # made by the platform
    """A rank that starts as a copy of the test's process."""

    def run(self) -> None:
        """Calls the target with one thread, as under torchrun, because the thread pool does not survive the fork."""
        import torch

        # The child must not destroy what the parent has left to the collector: the destructor of a store or of a
        # backend would wait for a thread that exists in the parent only.
        gc.freeze()
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)
        # A rank must not survive the test's process, which may be killed before it can end its ranks.
        dies_with(self._parent_pid)
        super().run()


class WarmMultiProcessTestCase(_Upstream):
    """torch's ``MultiProcessTestCase``, whose ranks are forked from the test's process instead of started anew.

    Use it as the base in place of torch's class, or list it before a class that derives from torch's. Everything else
    is torch's: ``rank``, ``world_size``, ``file_name``, ``setUp`` with ``_spawn_processes()``, skips by exit code. A
    case costs milliseconds instead of the imports of every rank. The differences:

    - A rank starts with the state of the test's process: its imports, its environment, its random state.
    - Ranks have one thread of torch each, unless ``OMP_NUM_THREADS`` is set.
    - The error at the time limit names the ranks that hang and shows their stacks.
    - If the test's process has already used CUDA, a forked rank could not use it. Ranks then start as new processes, as
      torch's ranks do.
    """

    def _spawn_processes(self) -> None:
        if used_cuda():
            text = "this process has used CUDA, so ranks start anew: slow, as torch's"
            warnings.warn(text, SymmFallbackWarning, stacklevel=2)
            super()._spawn_processes()
            return
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        with warnings.catch_warnings():
            # Python 3.12 warns if there are threads; a rank uses none of their locks.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._start_processes(_Forked)

    def _join_processes(self, fn: Callable[..., Any]) -> None:
        limit = float(common.get_timeout(self.id()))
        start = time.monotonic()
        deadline = start + limit
        running = dict(enumerate(self.processes))
        try:
            while running and (left := deadline - time.monotonic()) > 0:
                # Polls from time to time, because children of a dead rank may hold its sentinel open.
                multiprocessing.connection.wait([process.sentinel for process in running.values()], min(left, 0.2))
                for rank, process in list(running.items()):
                    if process.exitcode is None:
                        continue
                    del running[rank]
                    # The other ranks get ``GRACE_S`` to report their errors.
                    if process.exitcode == self.TEST_ERROR_EXIT_CODE and time.monotonic() + GRACE_S < deadline:
                        deadline = time.monotonic() + GRACE_S
            late = time.monotonic() - start >= limit
            stacks = self._stacks_of(running) if late else []
            for process in running.values():
                process.kill()
                process.join()
            if running and late:
                raise RuntimeError(f"ranks {sorted(running)} did not end within {limit:.0f} s\n" + "\n".join(stacks))
            self._check_return_codes(fn, time.monotonic() - start)
        finally:
            for pipe in self.pid_to_pipe.values():
                pipe.close()

    def _stacks_of(self, running: Mapping[int, Any]) -> list[str]:
        """Returns the Python stacks of the running ranks, sent by one thread of each; without an answer, no stack."""
        for process in running.values():
            with suppress(OSError):
                os.kill(process.pid, signal.SIGCONT)
                self.pid_to_pipe[process.pid].send(self.Event.GET_TRACEBACK)
        # All ranks have been asked, so they answer at the same time.
        deadline = time.monotonic() + STACK_S
        stacks = []
        for rank, process in running.items():
            pipe, stack = self.pid_to_pipe[process.pid], ""
            with suppress(OSError, EOFError):
                stack = str(pipe.recv()) if pipe.poll(max(0.0, deadline - time.monotonic())) else ""
            stacks.append(f"rank {rank}:\n{stack}")
        return stacks

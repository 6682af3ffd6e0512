"""Starts the symm group of one tensor-parallel group of vLLM, and makes the first call of each kernel."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from torch_symm.engines import _common

#: Bytes of one rank's tensor. A collective has one size for each algorithm that groups of up to 8 ranks use.
REDUCED = (2 << 20, 8 << 20)
GATHERED = (4 << 10, 1 << 20)
#: Elements of the first sum, which uses the algorithm for the shortest sums.
SHORT = 2048


def start(cpu_group: Any, device_group: Any, ranks: Sequence[int], device: torch.device, dtype: torch.dtype) -> Any:
    """Returns a symm group of ``ranks`` that has completed its set-up and a first sum. Called by ``ranks`` only.

    Args:
        cpu_group: vLLM's Gloo group of ``ranks``, whose store they use to agree.
        device_group: vLLM's group for tensors on ``device``, whose timeout the new group gets.
        ranks: the ranks of the default group that are members.
        device: the device of the collectives.
        dtype: the type of the model's activations.

    Raises:
        Declined: the group cannot be made; all ranks that called this raise it.
    """
    return _common.start(
        "vLLM", cpu_group, device_group, ranks, one_node=True, warm=lambda group: try_out(group, device, dtype)
    )


def try_out(group: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Makes the group's first call, a short sum.

    Raises:
        RuntimeError: the sum is wrong.
    """
    with torch.inference_mode():
        total = torch.ops.symm.all_reduce(torch.ones(SHORT, dtype=dtype, device=device), "sum", group.group_name)
        if not bool((total == group.size()).all()):
            raise RuntimeError(f"a sum of ones among {group.size()} ranks is not {group.size()}")


class Warming:
    """Makes the first calls of the other kernels, on a thread and a stream of its own, so that vLLM can load the model.

    On a new machine, compiling the kernels takes seconds. No other call of the group may be made before :meth:`wait`
    has returned, so that no graph capture loads a kernel, and no rank loads a kernel while another rank waits for it.
    """

    def __init__(self, group: Any, device: torch.device, dtype: torch.dtype, hidden: int) -> None:
        """``hidden``: the length of rows whose norm is fused; 0 if no norm is fused."""
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, args=(group, device, dtype, hidden), name="symm-warming", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Returns once all calls have been made.

        Raises:
            RuntimeError: a call failed.
        """
        self._thread.join()
        if self._error is not None:
            raise RuntimeError(f"symm cannot serve vLLM, unset SYMM_VLLM: {self._error}") from self._error

    def _run(self, group: Any, device: torch.device, dtype: torch.dtype, hidden: int) -> None:
        try:
            if device.type != "cuda":
                warm(group, device, dtype, hidden)
                return
            stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            with torch.cuda.device(device), torch.cuda.stream(stream):
                warm(group, device, dtype, hidden)
                stream.synchronize()
        except BaseException as error:
            self._error = error


def warm(group: Any, device: torch.device, dtype: torch.dtype, hidden: int) -> None:
    """Makes a call of each kernel that serves a dense model; omits reduce-scatters, which few models use."""
    operators: Any = torch.ops.symm
    name, ranks = group.group_name, group.size()

    def ones(bytes_: int) -> torch.Tensor:
        return torch.ones(bytes_ // dtype.itemsize, dtype=dtype, device=device)

    with torch.inference_mode():
        for size in REDUCED:
            operators.all_reduce(ones(size), "sum", name)
        for size in GATHERED:
            own = ones(size)
            dist.all_gather_into_tensor(own.new_empty(own.numel() * ranks), own, group=group)
        if dtype in (torch.bfloat16, torch.float16, torch.float32) and not hidden % 8 and 0 < hidden <= 16384:
            weight = ones(hidden * dtype.itemsize)
            for rows in (1, (2 << 20) // (hidden * dtype.itemsize) + 1):
                given = ones(rows * hidden * dtype.itemsize).view(rows, hidden)
                operators.all_reduce_add_rms_norm(given, given, weight, 1e-5, name)

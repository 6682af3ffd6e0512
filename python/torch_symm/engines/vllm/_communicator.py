"""vLLM's communicator for CUDA tensors, whose tensor-parallel collectives run on symm."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
import torch.distributed as dist
from vllm.config import get_current_vllm_config_or_none  # type: ignore[import-not-found]
from vllm.distributed.device_communicators.cuda_communicator import (  # type: ignore[import-not-found]
    CudaCommunicator,
)

from torch_symm._version import __version__
from torch_symm.engines._common import Declined, leave, native_problem
from torch_symm.engines.vllm._group import Warming, start
from torch_symm.engines.vllm._operators import GROUPS, WARMING

log = logging.getLogger("vllm.plugins.symm")

#: Element types whose sums symm computes as NCCL does.
SUMMED = {
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64),
}


class SymmCommunicator(CudaCommunicator):  # type: ignore[misc]
    """vLLM's communicator, which uses symm for each call of a tensor-parallel group that symm serves."""

    #: The symm group; ``None``: vLLM's own collectives serve this group.
    symm: Any = None
    #: Seconds that the start of the symm group took, and that the first call then waited for the kernels.
    symm_start_s = symm_wait_s = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._said: set[tuple[str, str]] = set()
        if self.unique_name.split(":")[0] != "tp" or self.world_size == 1:
            return
        begun = time.perf_counter()
        dtype, hidden = _model()
        try:
            group = start(self.cpu_group, self.device_group, self.ranks, self.device, dtype)
        except Declined as reason:
            log.warning("symm does not serve group %s, and vLLM uses its own collectives: %s", self.unique_name, reason)
            return
        self.symm, self._name, self.symm_start_s = group, group.group_name, time.perf_counter() - begun
        self._warming: Warming | None = Warming(group, self.device, dtype, hidden)
        GROUPS[self.unique_name], WARMING[self.unique_name] = self._name, self._wait
        if not _is_only_group(self.world_size):
            self._wait()
        if self.rank_in_group == 0:
            log.info(
                "symm %s serves group %s, ranks %s; started in %.2f s",
                *(__version__, self.unique_name, self.ranks, self.symm_start_s),
            )

    def _wait(self) -> None:
        """Waits for the first calls of the kernels, which may still be compiled."""
        if self._warming is not None:
            begun = time.perf_counter()
            self._warming.wait()
            self._warming, self.symm_wait_s = None, time.perf_counter() - begun
            log.debug("symm: the first call in group %s waited %.2f s", self.unique_name, self.symm_wait_s)

    def _rejects(self, call: str, tensor: torch.Tensor) -> bool:
        """Returns true if vLLM's own path has to serve this call; logs each reason once."""
        if self.symm is None:
            return True
        if self._warming is not None:
            self._wait()
        if tensor.device != self.device:
            reason = f"a tensor on {tensor.device}"
        elif call == "all_reduce" and not tensor.is_contiguous():
            reason = "a tensor that is not contiguous"  # vLLM promises a result with the input's strides
        elif tensor.dtype not in SUMMED and "gather" not in call:
            reason = f"a tensor of {tensor.dtype}"
        else:
            return False
        return self._says(call, reason)

    def _says(self, call: str, reason: str) -> bool:
        if (call, reason) not in self._said:
            self._said.add((call, reason))
            log.info("symm does not serve %s of %s in group %s; vLLM does", call, reason, self.unique_name)
        return True

    def all_reduce(self, input_: torch.Tensor) -> Any:
        """Returns the sum over the ranks; does not change ``input_``."""
        if self._rejects("all_reduce", input_):
            return super().all_reduce(input_)
        return torch.ops.symm.all_reduce(input_, "sum", self._name)

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> Any:
        """Returns the tensors of all ranks, concatenated in dimension ``dim``."""
        if self._rejects("all_gather", input_):
            return super().all_gather(input_, dim)
        rows = self._gathered(input_)
        dim %= input_.dim()
        if dim == 0:
            return rows
        shape = list(input_.shape)
        shape[dim] *= self.world_size
        return rows.view(self.world_size, *input_.shape).movedim(0, dim).reshape(shape)

    def all_gatherv(self, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        """Returns the rows of all ranks; rank i has ``sizes[i]`` rows. For a list, returns a list of such tensors."""
        given = [input_] if isinstance(input_, torch.Tensor) else input_
        if dim != 0 or any(self._rejects("all_gatherv", each) for each in given):
            return super().all_gatherv(input_, dim, sizes)
        gathered = [self._gathered(each, sizes) for each in given]
        return gathered[0] if isinstance(input_, torch.Tensor) else gathered

    def _gathered(self, tensor: torch.Tensor, sizes: list[int] | None = None) -> torch.Tensor:
        if sizes is None or len(set(sizes)) == 1:
            all_ = tensor.new_empty(tensor.shape[0] * self.world_size, *tensor.shape[1:])
            dist.all_gather_into_tensor(all_, tensor, group=self.symm)
        else:
            all_ = tensor.new_empty(sum(sizes), *tensor.shape[1:])
            dist.all_gather(list(torch.split(all_, sizes)), tensor, group=self.symm)
        return all_

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> Any:
        """Returns this rank's part in dimension ``dim`` of the sum over the ranks."""
        parts = input_.shape[dim]
        if self._rejects("reduce_scatter", input_) or parts % self.world_size:
            return super().reduce_scatter(input_, dim)
        return self._scattered(input_, dim, [parts // self.world_size] * self.world_size)

    def reduce_scatterv(self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> Any:
        """Returns this rank's part in dimension ``dim`` of the sum; the part of rank i has length ``sizes[i]``."""
        if sizes is None:
            return self.reduce_scatter(input_, dim)
        if self._rejects("reduce_scatterv", input_):
            return super().reduce_scatterv(input_, dim, sizes)
        return self._scattered(input_, dim, sizes)

    def _scattered(self, tensor: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
        rows = tensor.movedim(dim, 0).contiguous()
        own = rows.new_empty(sizes[self.rank_in_group], *rows.shape[1:])
        if len(set(sizes)) == 1:
            dist.reduce_scatter_tensor(own, rows, group=self.symm)
        else:
            dist.reduce_scatter(own, list(torch.split(rows, sizes)), group=self.symm)
        return own.movedim(0, dim).contiguous()

    def destroy(self) -> None:
        """Leaves the symm group, then does as vLLM's communicator, also if the first calls have failed."""
        try:
            if self.symm is not None:
                self._leave()
        finally:
            super().destroy()

    def _leave(self) -> None:
        try:
            self._wait()
        except RuntimeError as error:
            log.warning("symm: leaves group %s after a failure: %s", self.unique_name, error)
        for known in (GROUPS, WARMING):
            known.pop(self.unique_name, None)
        group, self.symm, self._warming = self.symm, None, None
        leave(group)


def _is_only_group(ranks: int) -> bool:
    """Returns true if vLLM makes no further group of several ranks.

    If another group's NCCL starts on one rank while a kernel is being loaded on another rank, the two ranks could wait
    for each other.
    """
    config = get_current_vllm_config_or_none()
    model, parallel = getattr(config, "model_config", None), getattr(config, "parallel_config", None)
    sizes = [getattr(parallel, f"{kind}_context_parallel_size", 1) for kind in ("decode", "prefill")]
    return dist.get_world_size() == ranks and sizes == [1, 1] and getattr(model, "is_moe", True) is False


def _model() -> tuple[torch.dtype, int]:
    """The type of the model's rows, and their length if their norms are fused, otherwise 0."""
    config = get_current_vllm_config_or_none()
    model = getattr(config, "model_config", None)
    if model is None:
        return torch.bfloat16, 0
    if native_problem():
        return model.dtype, 0
    # Not imported above, because it cannot be imported without the native part.
    from torch_symm.engines.vllm._fusion import SymmFusionPass

    passes = config.compilation_config.inductor_compile_config.values()
    return model.dtype, int(model.get_hidden_size()) if any(isinstance(each, SymmFusionPass) for each in passes) else 0

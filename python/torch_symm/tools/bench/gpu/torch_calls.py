"""The calls of torch's symmetric memory for the measured operations, on tensors in that memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..pattern import pieces
from .calls import first_finding, in_stream_or_host
from .inputs import POISON, GpuCall, Setting


def one_shot(at: Setting) -> GpuCall:
    """torch's one-shot all-reduce: input in symmetric memory, output a new tensor."""
    tensor, name = at.given(at.inputs.count), at.group.group_name
    results: list[torch.Tensor] = []

    def run() -> None:
        results[:] = [torch.ops.symm_mem.one_shot_all_reduce(tensor, "sum", name)]

    return GpuCall(lambda: tensor.copy_(at.pristine), run, lambda _calls: at.inputs.compare_sum(results[0]))


def two_shot(at: Setting) -> GpuCall:
    """torch's two-shot all-reduce, in place in symmetric memory."""
    tensor, name = at.given(at.inputs.count), at.group.group_name
    return GpuCall(
        lambda: tensor.copy_(at.pristine),
        lambda: torch.ops.symm_mem.two_shot_all_reduce_(tensor, "sum", name),
        lambda calls: at.inputs.compare_sum(tensor, calls=calls),
    )


def low_contention_all_gather(at: Setting) -> GpuCall:
    """torch's all-gather by copy engines: input in symmetric memory, output a new tensor, on its own stream."""
    source, name = at.given(at.share), at.group.group_name
    results: list[torch.Tensor] = []

    def reset() -> None:
        source.copy_(at.pristine[: at.share])
        _poison(results)

    def run() -> None:
        results[:] = [_awaited(torch.ops.symm_mem._low_contention_all_gather(source, name))]

    def check(_calls: int) -> str | None:
        parts = enumerate(pieces(results[0], at.share))
        return first_finding(at.inputs.compare_copy(part, rank) for rank, part in parts)

    return GpuCall(reset, run, check)


def low_contention_reduce_scatter(at: Setting) -> GpuCall:
    """torch's reduce-scatter by copy engines and a sum: input in symmetric memory, output a new tensor."""
    source, name = at.given(at.share * at.world), at.group.group_name
    results: list[torch.Tensor] = []

    def reset() -> None:
        source.copy_(at.pristine)
        _poison(results)

    def run() -> None:
        results[:] = [_awaited(torch.ops.symm_mem._low_contention_reduce_scatter(source, "sum", name))]

    return GpuCall(reset, run, lambda _calls: at.inputs.compare_sum(results[0], start=at.rank * at.share))


def signal_pad_barrier(handle: Any) -> Callable[[Setting], GpuCall]:
    """The barrier kernel of a rendezvous ``handle``. In eager calls the host waits for it, as in dist.barrier."""

    def build(_at: Setting) -> GpuCall:
        def run() -> None:
            handle.barrier(channel=0)
            in_stream_or_host()

        return GpuCall(lambda: None, run, lambda _calls: None)

    return build


def _awaited(result: torch.Tensor) -> torch.Tensor:
    waited: torch.Tensor = torch.ops._c10d_functional.wait_tensor(result)
    return waited


def _poison(results: list[torch.Tensor]) -> None:
    """Fills the results, so that a replay that does not write them is noticed."""
    for result in results:
        result.fill_(POISON)

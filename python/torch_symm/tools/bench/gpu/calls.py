"""A table of the measured operations, each with its call, tensors and check."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..pattern import pieces
from .inputs import POISON, GpuCall, Setting
from .norm import add_rms_norm


@dataclass(frozen=True)
class GpuOp:
    """One row. ``divided``: the size of a cell is divided among the ranks."""

    build: Callable[[Setting], GpuCall]
    divided: bool = False


def _all_reduce(at: Setting) -> GpuCall:
    tensor = at.given(at.inputs.count)
    return GpuCall(
        lambda: tensor.copy_(at.pristine),
        lambda: dist.all_reduce(tensor, group=at.group),
        lambda calls: at.inputs.compare_sum(tensor, calls=calls),
    )


def _all_gather(at: Setting) -> GpuCall:
    output = at.taken(at.share * at.world)
    source = list(pieces(output, at.share))[at.rank] if at.in_place else at.given(at.share)

    def reset() -> None:
        output.fill_(POISON)
        source.copy_(at.pristine[: at.share])

    def check(_calls: int) -> str | None:
        return first_finding(at.inputs.compare_copy(part, rank) for rank, part in enumerate(pieces(output, at.share)))

    return GpuCall(reset, lambda: dist.all_gather_into_tensor(output, source, group=at.group), check)


def _reduce_scatter(at: Setting) -> GpuCall:
    source, output = at.given(at.share * at.world), at.taken(at.share)

    def reset() -> None:
        source.copy_(at.pristine)
        output.fill_(POISON)

    return GpuCall(
        reset,
        lambda: dist.reduce_scatter_tensor(output, source, group=at.group),
        lambda _calls: at.inputs.compare_sum(output, start=at.rank * at.share),
    )


def _all_to_all(at: Setting) -> GpuCall:
    source, output = at.given(at.share * at.world), at.taken(at.share * at.world)

    def reset() -> None:
        source.copy_(at.pristine)
        output.fill_(POISON)

    def check(_calls: int) -> str | None:
        parts = enumerate(pieces(output, at.share))
        return first_finding(at.inputs.compare_copy(part, rank, at.rank * at.share) for rank, part in parts)

    return GpuCall(reset, lambda: dist.all_to_all_single(output, source, group=at.group), check)


def _broadcast(at: Setting) -> GpuCall:
    tensor = at.given(at.inputs.count)
    return GpuCall(
        lambda: tensor.copy_(at.pristine) if at.rank == 0 else tensor.fill_(POISON),
        lambda: dist.broadcast(tensor, 0, group=at.group),
        lambda _calls: at.inputs.compare_copy(tensor, 0),
    )


def _send_recv(at: Setting) -> GpuCall:
    if at.rank > 1:
        return GpuCall(lambda: None, lambda: None, lambda _calls: None)
    peer = 1 - at.rank
    source, output = at.given(at.inputs.count), at.taken(at.inputs.count)

    def reset() -> None:
        source.copy_(at.pristine)
        output.fill_(POISON)

    def run() -> None:
        if at.rank == 0:
            dist.send(source, peer, group=at.group)
            dist.recv(output, peer, group=at.group)
        else:
            dist.recv(output, peer, group=at.group)
            dist.send(source, peer, group=at.group)

    return GpuCall(reset, run, lambda _calls: at.inputs.compare_copy(output, peer))


def _barrier(at: Setting) -> GpuCall:
    # Name the device, because the ranks of a group that also serves CPU tensors would otherwise meet on the host.
    device = at.inputs.device
    ids = [device.index] if device.type == "cuda" else None
    return GpuCall(lambda: None, lambda: dist.barrier(group=at.group, device_ids=ids), lambda _calls: None)


def nccl_barrier(at: Setting) -> GpuCall:
    """``dist.barrier``; in a graph only the stream waits: NCCL's wait would block the host and end the capture."""
    ids = [at.inputs.device.index]

    def run() -> None:
        if torch.cuda.is_current_stream_capturing():
            work = dist.barrier(group=at.group, device_ids=ids, async_op=True)
            assert work is not None
            work.synchronize()
        else:
            dist.barrier(group=at.group, device_ids=ids)

    return GpuCall(lambda: None, run, lambda _calls: None)


def in_stream_or_host() -> None:
    """Makes the host wait for the current stream, unless a graph records it."""
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream().synchronize()


def first_finding(findings: Iterable[str | None]) -> str | None:
    """Returns the first finding that is not None."""
    return next((finding for finding in findings if finding is not None), None)


OPS: dict[str, GpuOp] = {
    "all_reduce": GpuOp(_all_reduce),
    "all_gather": GpuOp(_all_gather, divided=True),
    "reduce_scatter": GpuOp(_reduce_scatter, divided=True),
    "all_to_all": GpuOp(_all_to_all, divided=True),
    "broadcast": GpuOp(_broadcast),
    "send_recv": GpuOp(_send_recv),
    "barrier": GpuOp(_barrier),
    "all_reduce_add_rms_norm": GpuOp(add_rms_norm),
}

#: The operations that are measured by default.
USUAL = tuple(op for op in OPS if op != "all_reduce_add_rms_norm")

"""All-gathers whose parts are consumed as they arrive, and all-to-alls whose parts are sent as they are made.

Each use of a workspace ends with a barrier on channel 0, which a rank enters after it has read everything. The next use
cannot run that barrier instead, because the group, and with it the memory, may end before the next use. Channel 1
signals that a part has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch
from torch._C._distributed_c10d import _SymmetricMemory

from torch_symm.symm_mem._agreement import compare, described, rejecting
from torch_symm.symm_mem._groups import resolve
from torch_symm.symm_mem._workspace import used

_READ, _READY = 0, 1

#: Alignment of each tensor in a workspace, which cuBLAS prefers and which suffices for any dtype.
_ALIGNMENT = 256


def _pipelined_multi_all_gather_and_consume(
    shard: list[torch.Tensor],
    shard_consumer: Callable[[list[torch.Tensor], int], None],
    ag_out: list[torch.Tensor],
    group_name: str,
    ag_out_needed: bool = True,
) -> None:
    """Calls ``shard_consumer(shards of rank, rank)`` for every rank, starting with this one, as the shards arrive.

    The shards passed are contiguous, and complete in the order of the current stream. If ``ag_out_needed``,
    ``ag_out[i]`` holds ``shard[i]`` of all ranks at the end; otherwise its contents are undefined.

    Args:
        shard, ag_out: contiguous; the first dimension of ``ag_out[i]`` is the first dimension of ``shard[i]`` times the
            number of ranks.
        shard_consumer: called with the shards of a rank and the rank.
        group_name: the group of the ranks.
        ag_out_needed: whether ``ag_out`` is to be filled.

    Raises:
        ValueError: the shapes or layouts differ from this description.
        SymmMismatchError: on CPU tensors, the ranks' shards have different shapes or dtypes.
    """
    device = shard[0].device
    with rejecting(group_name, device):
        _check_gathered(shard, ag_out, resolve(group_name).size())
    shards = ", ".join(described(part.shape, part.dtype) for part in shard)
    compare(group_name, device, f"_pipelined_multi_all_gather_and_consume({shards})")
    gather_and_consume(shard, shard_consumer, ag_out, group_name, ag_out_needed)


def gather_and_consume(
    shard: list[torch.Tensor],
    shard_consumer: Callable[[list[torch.Tensor], int], None],
    ag_out: list[torch.Tensor],
    group_name: str,
    ag_out_needed: bool = True,
) -> None:
    """Implements :func:`_pipelined_multi_all_gather_and_consume` for calls that are the same on all ranks."""
    ranks = resolve(group_name).size()
    device = shard[0].device
    starts, size = _places(shard)
    on_cpu = device.type == "cpu"
    with used(group_name, size, device) as window:
        rank = window.rank

        def parts_of(peer: int) -> list[torch.Tensor]:
            return [_part(window, peer, start, x) for start, x in zip(starts, shard, strict=True)]

        _copy(parts_of(rank), shard)
        if on_cpu:
            for step in range(1, ranks):
                window.put_signal((rank - step) % ranks, channel=_READY)
        else:
            # A barrier is one kernel; signals would take two kernels per peer.
            window.barrier(channel=_READY)
        gathered = [[whole.chunk(ranks)[peer] for whole in ag_out] for peer in range(ranks)]
        with _lanes(device) as lanes:
            shard_consumer(shard, rank)
            for step in range(1, ranks):
                peer = (rank + step) % ranks
                if on_cpu:
                    window.wait_signal(peer, channel=_READY)
                parts = parts_of(peer)
                with lanes(step):
                    # On CPU, this rank reads a peer's memory as fast as its own, so the parts need not be copied.
                    if not on_cpu or ag_out_needed:
                        _copy(gathered[peer], parts)
                        parts = gathered[peer]
                    shard_consumer(parts, peer)
            if ag_out_needed:
                with lanes(ranks):
                    _copy(gathered[rank], shard)
        window.barrier(channel=_READ)


def _pipelined_all_gather_and_consume(
    shard: torch.Tensor,
    shard_consumer: Callable[[torch.Tensor, int], None],
    ag_out: torch.Tensor,
    group_name: str,
    ag_out_needed: bool = True,
) -> None:
    """Like :func:`_pipelined_multi_all_gather_and_consume` for one tensor.

    The arguments have the same meaning, with one tensor in place of each list.
    """

    def consume(parts: list[torch.Tensor], peer: int) -> None:
        shard_consumer(parts[0], peer)

    _pipelined_multi_all_gather_and_consume([shard], consume, [ag_out], group_name, ag_out_needed)


def _pipelined_produce_and_all2all(
    chunk_producer: Callable[[int, torch.Tensor], object],
    output: torch.Tensor,
    group_name: str,
    out_chunk_dim: int = 0,
) -> None:
    """Calls ``chunk_producer(rank, out)`` for every rank, this one last, and sends finished chunks meanwhile.

    Each slice of ``output`` along ``out_chunk_dim`` then holds the chunk that a rank made for this one. ``out`` has the
    shape of such a slice; it is contiguous except for this rank's chunk. ``group_name`` names the group of the ranks.

    Raises:
        ValueError: the ranks do not divide ``out_chunk_dim``.
        SymmMismatchError: on CPU tensors, the ranks' outputs have different shapes or dtypes.
    """
    ranks = resolve(group_name).size()
    with rejecting(group_name, output.device):
        if output.shape[out_chunk_dim] % ranks:
            raise ValueError(f"{ranks} ranks do not divide dimension {out_chunk_dim} of {tuple(output.shape)}")
    whole = described(output.shape, output.dtype)
    compare(group_name, output.device, f"_pipelined_produce_and_all2all({whole}, dimension {out_chunk_dim})")
    produce_and_exchange(chunk_producer, output, group_name, out_chunk_dim)


def produce_and_exchange(
    chunk_producer: Callable[[int, torch.Tensor], object],
    output: torch.Tensor,
    group_name: str,
    out_chunk_dim: int = 0,
) -> None:
    """Implements :func:`_pipelined_produce_and_all2all` for calls that are the same on all ranks."""
    ranks = resolve(group_name).size()
    chunks = output.chunk(ranks, dim=out_chunk_dim)
    stride = _aligned(chunks[0].numel() * chunks[0].element_size())
    on_cpu = output.device.type == "cpu"
    # Each destination has a slot, so that no rank waits until another one has fetched its chunk.
    with used(group_name, stride * ranks, output.device) as window:
        rank = window.rank

        def fetch(source: int) -> None:
            window.wait_signal(source, channel=_READY)
            chunks[source].copy_(_part(window, source, stride * rank, chunks[source]))

        with _lanes(output.device) as lanes:
            for step in range(1, ranks):
                target = (rank + step) % ranks
                chunk_producer(target, _part(window, rank, stride * target, chunks[target]))
                window.put_signal(target, channel=_READY)
                if not on_cpu:
                    # Every rank signals before it fetches in the same step, so no two ranks wait for each other, even
                    # if all streams of a device share one queue.
                    with lanes(1):
                        fetch((rank - step) % ranks)
            chunk_producer(rank, chunks[rank])
            if on_cpu:
                for step in range(1, ranks):
                    fetch((rank - step) % ranks)
        window.barrier(channel=_READ)


def _check_gathered(shard: list[torch.Tensor], ag_out: list[torch.Tensor], ranks: int) -> None:
    for part, whole in zip(shard, ag_out, strict=True):
        if not part.is_contiguous() or not whole.is_contiguous():
            raise ValueError("all tensors in shard and ag_out must be contiguous")
        if list(whole.shape) != [part.shape[0] * ranks, *part.shape[1:]]:
            raise ValueError(f"{ranks} shards of shape {tuple(part.shape)} do not make {tuple(whole.shape)}")


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _places(tensors: list[torch.Tensor]) -> tuple[list[int], int]:
    """Returns the offset of each tensor, and the total size."""
    starts, size = [], 0
    for tensor in tensors:
        starts.append(size)
        size += _aligned(tensor.numel() * tensor.element_size())
    return starts, size


def _part(window: _SymmetricMemory, rank: int, start: int, like: torch.Tensor) -> torch.Tensor:
    """Returns ``rank``'s memory from offset ``start``, with the shape and dtype of ``like``; contiguous."""
    return window.get_buffer(rank, like.shape, like.dtype, start // like.element_size())


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


@contextmanager
def _lanes(device: torch.device) -> Iterator[Callable[[int], AbstractContextManager[object]]]:
    """Returns a function from steps to lanes: odd steps run on a side stream, even ones on the current stream.

    Work before and after the context is ordered before and after both lanes.
    """
    if device.type == "cpu":
        yield lambda step: nullcontext()
        return
    main, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(main)
    try:
        yield lambda step: torch.cuda.stream(side) if step % 2 else nullcontext()
    finally:
        main.wait_stream(side)

"""The operator ``torch_symm::shard_dim_alltoall``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.distributed_c10d import GroupName

from torch_symm._torch_compat import group_name

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def shard_dim_alltoall(
    input: torch.Tensor,
    gather_dim: int,
    shard_dim: int,
    mesh: DeviceMesh,
    mesh_dim: int,
    *,
    gather_size: int | None = None,
) -> torch.Tensor:
    """Turns shards of dimension ``gather_dim`` into shards of ``shard_dim``, among the ranks of one mesh dimension.

    The result is contiguous. It is this rank's chunk along ``shard_dim`` (``torch.chunk``) of every rank's ``input``
    concatenated along ``gather_dim``. Each element leaves its rank at most once. If ``shard_dim`` has too few elements,
    the last ranks get none, as with ``Shard``. Differentiable.

    Args:
        input: a tensor on CPU or CUDA, of any dtype and layout in memory, at least one-dimensional.
        gather_dim, shard_dim: dimensions of ``input``; may be negative. If they are equal, nothing moves.
        gather_size: size of ``gather_dim`` over all ranks, if it is cut like ``torch.chunk`` and some ranks hold less
            than others. Without it, all ranks hold the same amount.
        mesh, mesh_dim: the ranks, and the dimension of the mesh along which shards move.

    Returns:
        A new tensor with the shape of ``input``, except for the two dimensions.

    Raises:
        IndexError: a dimension is out of range.
        ValueError: this rank does not hold its part of ``gather_size``.
        SymmMismatchError: the ranks' shapes do not fit together (symm groups).
    """
    name = group_name(mesh, mesh_dim)
    if funcol._are_we_tracing():
        return _trace(input, gather_dim, shard_dim, gather_size, mesh, mesh_dim)
    moved: torch.Tensor = _move(input, gather_dim, shard_dim, gather_size, name)
    return moved


def cut(size: int, ranks: int) -> list[int]:
    """Returns the sizes into which ``Shard`` cuts a dimension of ``size``.

    They are symbolic for a symbolic ``size`` that ``ranks`` divides; any other size is fixed when it is traced.
    """
    if size % ranks == 0:
        return [size // ranks] * ranks
    size = int(size)
    piece = size // ranks + 1
    return [max(0, min(piece, size - rank * piece)) for rank in range(ranks)]


def axis(dim: int, dims: int) -> int:
    """``dim`` counted from the front.

    Raises:
        IndexError: the dimension does not exist; worded as in torch.
    """
    if dims == 0:
        raise IndexError(f"Dimension specified as {dim} but tensor has no dimensions")
    if not -dims <= dim < dims:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-dims}, {dims - 1}], but got {dim})")
    return dim % dims


@torch.library.custom_op(
    "torch_symm::shard_dim_alltoall",
    mutates_args=(),
    device_types=("cpu", "cuda"),
    schema="(Tensor input, int gather_dim, int shard_dim, SymInt? gather_size, str group_name) -> Tensor",
)
def _move(
    input: torch.Tensor, gather_dim: int, shard_dim: int, gather_size: int | None, group_name: str
) -> torch.Tensor:
    group = _resolve_process_group(GroupName(group_name))
    if gather_size is not None:
        held, mine = cut(gather_size, group.size()), input.size(gather_dim)
        if mine != held[group.rank()]:
            _reject(input, mine, held[group.rank()], group)
            raise ValueError(
                f"rank {group.rank()} of {group.size()} holds {mine} elements of dimension {gather_dim}, "
                f"whose {gather_size} elements are cut into {', '.join(map(str, held))}"
            )

    def exchange(packed: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
        output = packed.new_empty(sum(received))
        # Synchronous, unlike the functional collective: runs on the caller's thread (CPU) or stream (CUDA).
        dist.all_to_all_single(output, packed, received, sent, group=group)
        return output

    return _moved(input, gather_dim, shard_dim, gather_size, group.rank(), group.size(), exchange)


def _reject(input: torch.Tensor, mine: int, expected: int, group: dist.ProcessGroup) -> None:
    """Notifies the ranks that wait for this one, by a call with ``mine`` elements that sends the ``expected`` ones."""
    none = [0] * group.size()
    with suppress(ValueError, RuntimeError):
        dist.all_to_all_single(input.new_empty(0), input.new_empty(mine), none, [expected, *none[1:]], group=group)


def _trace(
    input: torch.Tensor, gather_dim: int, shard_dim: int, gather_size: int | None, mesh: DeviceMesh, mesh_dim: int
) -> torch.Tensor:
    """Does the same as ``_move`` with torch's functional collective, which compilers keep and order.

    A compiler would drop any other operator on a rank where the result is empty, and the other ranks would wait for
    that rank.
    """

    def exchange(packed: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
        differentiable = torch.is_grad_enabled() and packed.requires_grad
        operators = torch.ops._c10d_functional_autograd if differentiable else torch.ops._c10d_functional
        output = operators.all_to_all_single(packed, received, sent, group_name(mesh, mesh_dim))
        waited: torch.Tensor = torch.ops._c10d_functional.wait_tensor(output)
        return waited

    rank, ranks = mesh.get_local_rank(mesh_dim), mesh.size(mesh_dim)
    return _moved(input, gather_dim, shard_dim, gather_size, rank, ranks, exchange)


def _moved(
    input: torch.Tensor,
    gather_dim: int,
    shard_dim: int,
    gather_size: int | None,
    rank: int,
    ranks: int,
    exchange: Callable[[torch.Tensor, list[int], list[int]], torch.Tensor],
) -> torch.Tensor:
    """Packs, exchanges, unpacks. Changes no tensor in place, so that it can be traced."""
    gather_dim, shard_dim = axis(gather_dim, input.dim()), axis(shard_dim, input.dim())
    if gather_dim == shard_dim or ranks == 1:
        return input.clone(memory_format=torch.contiguous_format)
    held = [input.size(gather_dim)] * ranks if gather_size is None else cut(gather_size, ranks)
    kept = cut(input.size(shard_dim), ranks)
    rest = _product(size for dim, size in enumerate(input.shape) if dim not in (gather_dim, shard_dim))
    received = exchange(
        _packed(input, shard_dim, kept),
        [rest * kept[rank] * size for size in held],
        [rest * held[rank] * size for size in kept],
    )
    shape = list(input.shape)
    shape[shard_dim] = kept[rank]
    return _unpacked(received, shape, gather_dim, held)


def _product(sizes: Iterable[int]) -> int:
    """Multiplies like ``math.prod``, which Dynamo cannot trace."""
    product = 1
    for size in sizes:
        product *= size
    return product


def _packed(input: torch.Tensor, shard_dim: int, kept: list[int]) -> torch.Tensor:
    """Concatenates the parts for ranks 0, 1 and so on, each contiguous. Copies only if necessary."""
    if input.is_contiguous() and _product(input.shape[:shard_dim]) == 1:
        return input.view(-1)
    if kept[0] == kept[-1]:
        # Copy the parts of all ranks in one pass, which is one kernel on CUDA.
        parted = input.view(*input.shape[:shard_dim], len(kept), kept[0], *input.shape[shard_dim + 1 :])
        return parted.movedim(shard_dim, 0).contiguous().view(-1)
    return torch.cat([part.reshape(-1) for part in input.split_with_sizes(kept, shard_dim)])


def _unpacked(received: torch.Tensor, shape: list[int], gather_dim: int, held: list[int]) -> torch.Tensor:
    """Concatenates the received parts along ``gather_dim``; ``shape`` is the shape of this rank's own part."""
    before, after = shape[:gather_dim], shape[gather_dim + 1 :]
    whole = [*before, sum(held), *after]
    if _product(before) == 1:
        return received.view(whole)
    if held[0] == held[-1]:
        parts_first = received.view(len(held), *before, held[0], *after).movedim(0, gather_dim)
        # Not reshape, which would return a non-contiguous view if each part is one element wide.
        return parts_first.contiguous().view(whole)
    rest = _product(before) * _product(after)
    parts = received.split_with_sizes([rest * size for size in held])
    return torch.cat([part.view(*before, size, *after) for part, size in zip(parts, held, strict=True)], gather_dim)


@_move.register_fake
def _(input: torch.Tensor, gather_dim: int, shard_dim: int, gather_size: int | None, group_name: str) -> torch.Tensor:
    group = _resolve_process_group(GroupName(group_name))
    gather_dim, shard_dim = axis(gather_dim, input.dim()), axis(shard_dim, input.dim())
    shape = list(input.shape)
    if gather_dim != shard_dim:
        shape[gather_dim] = shape[gather_dim] * group.size() if gather_size is None else gather_size
        shape[shard_dim] = cut(shape[shard_dim], group.size())[group.rank()]
    return input.new_empty(shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    input, ctx.gather_dim, ctx.shard_dim, _, ctx.group_name = inputs
    stays = axis(ctx.gather_dim, input.dim()) == axis(ctx.shard_dim, input.dim())
    ctx.shard_size = None if stays else input.size(ctx.shard_dim)


def _move_back(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    back = _move(gradient, ctx.shard_dim, ctx.gather_dim, ctx.shard_size, ctx.group_name)
    return back, None, None, None, None


_move.register_autograd(_move_back, setup_context=_remember)

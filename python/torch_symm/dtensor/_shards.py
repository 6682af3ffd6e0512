"""Shards as tensors: padding, empty shards, metadata."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


def pad_tensor(tensor: torch.Tensor, pad_dim: int, pad_size: int) -> torch.Tensor:
    """Returns ``tensor`` padded with ``pad_size`` zeros at the end of ``pad_dim``; the same tensor if that is 0.

    ``pad_size`` is in elements, ``pad_dim`` counts from the front.
    """
    if pad_size == 0:
        return tensor
    pad = [0, 0] * (tensor.ndim - pad_dim)
    pad[-1] = pad_size
    return torch.nn.functional.pad(tensor, pad)


def unpad_tensor(tensor: torch.Tensor, pad_dim: int, pad_size: int) -> torch.Tensor:
    """Returns a view of ``tensor`` without the last ``pad_size`` elements of ``pad_dim``; ``tensor`` if that is 0."""
    if pad_size == 0:
        return tensor
    return tensor.narrow(pad_dim, 0, tensor.size(pad_dim) - pad_size)


def fill_empty_tensor_to_shards(
    shards: list[torch.Tensor], shard_dim: int, num_empty_tensors: int
) -> list[torch.Tensor]:
    """Appends ``num_empty_tensors`` tensors to ``shards``, like the first shard but of size 0 in ``shard_dim``.

    Returns:
        The same list.

    Raises:
        IndexError: ``shards`` is empty, or has no dimension ``shard_dim``.
    """
    if num_empty_tensors == 0:
        return shards
    shape = list(shards[0].shape)
    shape[shard_dim] = 0
    empty = shards[0].new_zeros(shape)
    shards.extend([empty] * num_empty_tensors)
    return shards


def check_tensor_meta(local_tensor: torch.Tensor, check_shape_stride: bool = False) -> None:
    """Checks that dtype and ``requires_grad``, and optionally shape and stride, are the same on all ranks of the world.

    It is a collective of the default group: every rank must call it, with its ``local_tensor`` of any shape. Shape and
    stride are compared if ``check_shape_stride``.

    Raises:
        ValueError: the values differ; all ranks raise this. The message lists the values that differ from rank 0.
    """
    mine: dict[str, Any] = {"dtype": local_tensor.dtype, "requires_grad": local_tensor.requires_grad}
    if check_shape_stride:
        mine |= {"shape": local_tensor.shape, "stride": local_tensor.stride()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    first, *others = everyone
    differences = [
        f"{name} is {first[name]} on rank 0, {other[name]} on rank {rank}"
        for rank, other in enumerate(others, 1)
        for name in first
        if other.get(name) != first[name]
    ]
    if differences:
        raise ValueError(
            "Inconsistent tensor metadata (including shape and stride) across ranks. " + "; ".join(differences)
        )


def spec_to_bytes(spec: DTensorSpec) -> int:
    """Returns the size in bytes of the whole tensor that ``spec`` describes, over all ranks.

    Raises:
        AssertionError: ``spec`` lacks the tensor's metadata.
    """
    if spec.tensor_meta is None:
        raise AssertionError("spec should have tensor meta defined!")
    return spec.tensor_meta.dtype.itemsize * math.prod(spec.shape)

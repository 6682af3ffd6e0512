"""Products fused with collectives, and the calls to compare them with: shapes, engines, and each engine's sides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
import torch.distributed as dist

#: The two products of a feed-forward layer: an all-gather before the first, a reduce-scatter after the second.
GATHER, SCATTER = "ag+mm", "mm+rs"
#: Maximum difference of a result relative to its norm: products are cut differently, and torch adds bf16 parts in bf16.
TOLERANCE = 1e-2


@dataclass(frozen=True)
class Shape:
    """A product as one rank computes it: ``rows`` of the whole matrix, ``columns``, and the summed ``depth``."""

    op: str
    rows: int
    columns: int
    depth: int

    @property
    def name(self) -> str:
        """Returns a name for human readers."""
        return f"{self.op} M{self.rows} N{self.columns} K{self.depth}"


def shapes(world: int) -> list[Shape]:
    """The shapes of a layer of 8192 features, divided among ``world`` ranks: on 8 ranks, parts of 1024 or 3584."""
    gathers = [Shape(GATHER, rows, wide // world, 8192) for rows, wide in LAYERS]
    return gathers + [Shape(SCATTER, rows, 8192, wide // world) for rows, wide in LAYERS]


#: The rows of each layer, and the width that is divided among ranks.
LAYERS = ((4096, 8192), (16384, 8192), (8192, 28672))
#: Shapes that are so small that a CPU computes them quickly.
SMALL = (Shape(GATHER, 64, 48, 32), Shape(SCATTER, 64, 32, 48))


@dataclass(frozen=True)
class Inputs:
    """One rank's tensors for a shape. ``gathered`` and ``scattered`` are buffers for unfused calls."""

    shape: Shape
    left: torch.Tensor
    right: torch.Tensor
    gathered: torch.Tensor
    scattered: torch.Tensor

    @staticmethod
    def of(shape: Shape, rank: int, world: int, device: torch.device, dtype: torch.dtype) -> Inputs:
        """Returns numbers that differ between ranks but not between the processes of a rank."""
        generator = torch.Generator(device).manual_seed(1 + rank)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator, device=device).to(dtype)

        rows = shape.rows // world if shape.op == GATHER else shape.rows
        left, right = normal(rows, shape.depth), normal(shape.depth, shape.columns)
        gathered = left.new_empty(shape.rows, shape.depth) if shape.op == GATHER else left
        return Inputs(shape, left, right, gathered, left.new_empty(shape.rows // world, shape.columns))


Run: TypeAlias = Callable[[Inputs, dist.ProcessGroup], torch.Tensor]


def unfused(inputs: Inputs, group: dist.ProcessGroup) -> torch.Tensor:
    """The collective and the product, one after the other."""
    if inputs.shape.op == GATHER:
        dist.all_gather_into_tensor(inputs.gathered, inputs.left, group=group)
        return torch.mm(inputs.gathered, inputs.right)
    dist.reduce_scatter_tensor(inputs.scattered, torch.mm(inputs.left, inputs.right), group=group)
    return inputs.scattered


def product(inputs: Inputs, _group: dist.ProcessGroup) -> torch.Tensor:
    """The product alone."""
    return torch.mm(inputs.gathered, inputs.right)


def fused_by_symm(inputs: Inputs, group: dist.ProcessGroup) -> torch.Tensor:
    """symm's operators, which also return the gathered matrix, as torch's operators do."""
    name = group.group_name
    if inputs.shape.op == GATHER:
        _, products = torch.ops.symm._all_gather_matmul(inputs.left, [inputs.right], name, True)
        first: torch.Tensor = products[0]
        return first
    total: torch.Tensor = torch.ops.symm._matmul_reduce_scatter(inputs.left, inputs.right, False, name)
    return total


def fused_by_torch(inputs: Inputs, group: dist.ProcessGroup) -> torch.Tensor:
    """torch's fused operators."""
    name = group.group_name
    if inputs.shape.op == GATHER:
        _, products = torch.ops.symm_mem.fused_all_gather_matmul(inputs.left, [inputs.right], 0, name)
        first: torch.Tensor = products[0]
        return first
    total: torch.Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(inputs.left, inputs.right, "sum", 0, name)
    return total


@dataclass(frozen=True)
class Side:
    """A timed call on a group of ``backend``."""

    name: str
    backend: str
    run: Run
    checked: bool = True


@dataclass(frozen=True)
class Engine:
    """Sides that share processes. torch has one engine of symmetric memory per process, and reads switches once."""

    sides: tuple[Side, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


OURS = "symm"
MM = "mm"


def engines(device: str) -> dict[str, Engine]:
    """The engines of GPUs, or the subset that supports CPU tensors."""
    ours = Side(OURS, "symm", fused_by_symm)
    if device == "cpu":
        gloo = Side("gloo unfused", "gloo", unfused)
        return {
            "symm": Engine((ours, Side("symm unfused", "symm", unfused), Side(MM, "symm", product, checked=False))),
            "gloo": Engine((gloo,)),
        }
    theirs = {"TORCH_SYMMMEM": "CUDA"}
    native = theirs | {"TORCH_SYMM_MEM_ENABLE_NATIVE_ASYNC_TP": "1"}
    return {
        "symm": Engine(
            (
                ours,
                Side("symm unfused", "symm", unfused),
                Side("nccl unfused", "nccl", unfused),
                Side(MM, "symm", product, checked=False),
            )
        ),
        "torch": Engine((Side("torch fused", "nccl", fused_by_torch),), theirs),
        "torch native": Engine((Side("torch native", "nccl", fused_by_torch),), native),
    }

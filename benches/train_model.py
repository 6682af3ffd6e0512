"""The model of benches/train_transformer.py, its text, and the ways to distribute it."""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch_symm
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

BYTES, TEXT_LIMIT = 256, 8 << 20


@dataclass(frozen=True)
class Shape:
    """Sizes of the model and of a rank's batch."""

    width: int
    layers: int
    heads: int
    context: int
    batch: int


SHAPES = {"cuda": Shape(1024, 12, 16, 512, 16), "cpu": Shape(64, 2, 8, 48, 4)}
#: Decoders whose steps are timed in turns: two that are bound by products, one by communication, one by the host; and
#: one for DDP.
MODELS = {
    "4096": Shape(4096, 8, 32, 2048, 2),
    "4096-short": Shape(4096, 8, 32, 1024, 1),
    "2048": Shape(2048, 8, 16, 1024, 1),
    "1024": Shape(1024, 24, 16, 256, 1),
    "2048-ddp": Shape(2048, 8, 16, 1024, 2),
    "tiny": Shape(64, 2, 8, 48, 4),
}


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and with a residual connection."""

    def __init__(self, shape: Shape) -> None:
        """Draws random weights; set the seed first."""
        super().__init__()
        width = shape.width
        self.size = width // shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, context, width) -> the same. With tensor parallelism there are only this rank's heads."""
        normed = self.norm1(tokens)
        query, key, value = (
            part(normed).unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        tokens = tokens + self.out(mixed.transpose(1, 2).flatten(-2))
        return tokens + self.down(nn.functional.gelu(self.up(self.norm2(tokens))))


class Model(nn.Module):
    """A byte-level transformer."""

    def __init__(self, shape: Shape) -> None:
        """Draws random weights; set the seed first."""
        super().__init__()
        self.bytes = nn.Embedding(BYTES, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, BYTES)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """(batch, context) of bytes -> logits of the next byte."""
        tokens = self.bytes(text) + self.places.weight
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(self.norm(tokens))


def load_text() -> torch.Tensor:
    """The modules of the standard library in the order of their names, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:TEXT_LIMIT]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batches(text: torch.Tensor, shape: Shape, seed: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Random pieces of the text, one byte longer than the context."""
    numbers = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - shape.context - 1, (shape.batch,), generator=numbers)
        yield torch.stack([text[start : start + shape.context + 1] for start in starts.tolist()]).to(device)


def mesh_of(group: dist.ProcessGroup, name: str, given: argparse.Namespace) -> DeviceMesh:
    """A mesh of the group's ranks; for hybrid sharding, two replicas of new groups of the same backend."""
    # DTensor remembers plans by mesh, and takes meshes of the same ranks and names for the same, whatever their groups:
    # without the name, a second training in this process would communicate through the first one's group.
    if given.parallel != "hsdp":
        return DeviceMesh.from_group(group, given.device, mesh_dim_names=(name,))
    ranks = torch.arange(group.size()).view(2, -1)
    mine = []
    for rows in (ranks.T.tolist(), ranks.tolist()):
        for row in rows:
            made = dist.new_group(row, backend=dist.get_backend(group))
            if group.rank() in row:
                mine.append(made)
    return DeviceMesh.from_group(mine, given.device, mesh=ranks, mesh_dim_names=(f"{name}_replicas", f"{name}_shards"))


def distributed(
    model: Model, given: argparse.Namespace, group: dist.ProcessGroup, device: torch.device, side: str
) -> nn.Module:
    """Replicates the model, shards it, or splits its blocks over the group; ``+fsdp``: with torch_symm.fsdp."""
    if given.parallel == "ddp":
        devices = [device] if device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, process_group=group, gradient_as_bucket_view=True)
    mesh = mesh_of(group, side.replace("+", "_"), given)
    if given.parallel == "tp":
        ways = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
        for block in model.blocks:
            parallelize_module(block, mesh, {**ways, "out": RowwiseParallel(), "down": RowwiseParallel()})
        return model
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if device.type == "cuda" else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule) and dist.get_backend(group) == "gloo":  # which has no ReduceOp.AVG
            module.set_force_sum_reduction_for_comms(True)
    if side.endswith("+fsdp"):
        torch_symm.fsdp.use(model)
    return model

"""Trains a small language model on Python's own source with FSDP2 or tensor parallelism, on GPUs or on CPUs.

    torchrun --nproc-per-node 4 benches/train_transformer.py --parallel fsdp --compare

The text is the standard library of this interpreter, byte by byte, so nothing is downloaded. With FSDP2 each rank
trains on its own batches and holds a part of every layer, which is gathered before it is used; with tensor parallelism
all ranks see the same batch, and each computes a part of the heads and of the hidden units of every block.
``--compare`` trains with a second backend in the same processes, from the same seeds, and prints both loss curves.
``--symmetric`` lets FSDP2 take its buffers from symm, whose kernels then load and store them on all GPUs directly.

The share of communication comes from torch.profiler over a few steps: on GPUs the time of kernels that communicate (and
of those during which no other kernel ran), on CPUs the time inside the backend's collectives.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import DeviceType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.profiler import ProfilerActivity, profile

SEED, BYTES, WARM_STEPS, PROFILED_STEPS = 7, 256, 3, 3
TEXT_LIMIT = 8 << 20
# Kernels of NCCL and of symm (named in src/kernels/cuda), and copies between GPUs.
COMMUNICATES = re.compile(
    r"nccl|^exchange$|^(all_reduce|reduce|broadcast)_(low_latency|staged|one_shot|two_shot|cube_mesh)$|PtoP",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Shape:
    """Sizes of the model and of a rank's batch."""

    width: int
    layers: int
    heads: int
    context: int
    batch: int


SHAPES = {"cuda": Shape(1024, 12, 16, 512, 16), "cpu": Shape(64, 2, 8, 48, 4)}


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and with a residual connection."""

    def __init__(self, shape: Shape) -> None:
        """Random weights; seed first."""
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
        """Random weights; seed first."""
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


def distributed(model: Model, given: argparse.Namespace, group: dist.ProcessGroup, device: torch.device) -> Model:
    """Shards the model or splits its blocks over the group."""
    # DTensor remembers plans by mesh, and takes meshes of the same ranks and names for the same, whatever their groups:
    # without the name, a second training in this process would communicate through the first one's group.
    mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=(dist.get_backend(group),))
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
        if not isinstance(module, FSDPModule):
            continue
        if dist.get_backend(group) == "gloo":  # which has no ReduceOp.AVG
            module.set_force_sum_reduction_for_comms(True)
        # Where the backend cannot allocate, this asks and leaves all as it was.
        module.set_allocate_memory_from_process_group_for_comm(given.symmetric and dist.get_backend(group) == "symm")
    return model


@dataclass
class Training:
    """The results of one training. ``communication`` and ``exposed``: shares of the time of a step."""

    losses: list[float]
    tokens_per_s: float
    communication: float
    exposed: float | None


def train(text: torch.Tensor, shape: Shape, given: argparse.Namespace, group: dist.ProcessGroup) -> Training:
    """Trains from the seeds, then profiles a few more steps."""
    device = torch.device(given.device, torch.cuda.current_device()) if given.device == "cuda" else torch.device("cpu")
    torch.manual_seed(SEED)
    model = distributed(Model(shape).to(device), given, group, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.rate)
    data = batches(text, shape, SEED + (group.rank() if given.parallel == "fsdp" else 0), device)
    use_bf16 = device.type == "cuda" and given.parallel == "tp"

    def step() -> torch.Tensor:
        piece = next(data)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=use_bf16):
            logits = model(piece[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), piece[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    def settled() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    losses = []
    started = settled()
    for number in range(given.steps):
        if number == min(WARM_STEPS, given.steps - 1):
            started = settled()
        losses.append(step())
    counted = given.steps - min(WARM_STEPS, given.steps - 1)
    seconds = settled() - started
    mean = torch.stack(losses) / group.size()
    dist.all_reduce(mean, group=group)
    communication, exposed = profiled(step, settled, dist.get_backend(group), device)
    pieces = shape.batch * (group.size() if given.parallel == "fsdp" else 1)
    return Training(mean.tolist(), pieces * shape.context * counted / seconds, communication, exposed)


def profiled(step: object, settled: object, backend: str, device: torch.device) -> tuple[float, float | None]:
    """The share of communication in the time of a step, and the share during which no other kernel ran."""
    assert callable(step) and callable(settled)
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=kinds, acc_events=True) as recorded:
        started = settled()
        for _ in range(PROFILED_STEPS):
            step()
        wall = (settled() - started) * 1e6
    if device.type == "cpu":
        return sum(e.cpu_time_total for e in recorded.key_averages() if e.key.startswith(f"{backend}:")) / wall, None
    # FSDP2's own annotations also appear on the GPU, and cover all kernels that run meanwhile.
    on_gpu = [event for event in recorded.events() if event.device_type == DeviceType.CUDA]
    kernels = [event for event in on_gpu if not event.is_user_annotation]
    spans = [(event.time_range.start, event.time_range.end, bool(COMMUNICATES.search(event.name))) for event in kernels]
    talking = covered([(start, end) for start, end, talks in spans if talks])
    computing = covered([(start, end) for start, end, talks in spans if not talks])
    return talking / wall, (covered([(start, end) for start, end, _ in spans]) - computing) / wall


def covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union of the spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def report(found: dict[str, Training], shape: Shape, given: argparse.Namespace) -> None:
    """Prints speed, communication and the loss curves side by side."""
    print(f"{given.parallel} on {dist.get_world_size()} {given.device} ranks, {shape}")
    for name, training in found.items():
        alone = "" if training.exposed is None else f" ({training.exposed:.1%} with nothing beside it)"
        print(f"{name}: {training.tokens_per_s:,.0f} tokens/s, {training.communication:.1%} communication{alone}")
    print("step  " + "  ".join(f"{name:>8}" for name in found))
    shown = sorted({0, given.steps - 1, *range(0, given.steps, max(1, given.steps // 10))})
    for number in shown:
        print(f"{number:4}  " + "  ".join(f"{training.losses[number]:8.4f}" for training in found.values()))


def main() -> None:
    """Trains, compares and prints.

    Raises:
        RuntimeError: the loss does not fall, or the curves part.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default=os.environ.get("BACKEND", "symm"), help="symm, nccl or gloo")
    parser.add_argument("--compare", action="store_true", help="train with NCCL (on CPUs: Gloo), too")
    parser.add_argument("--parallel", choices=("fsdp", "tp"), default="fsdp")
    parser.add_argument("--symmetric", action="store_true", help="with fsdp: buffers in symm's symmetric GPU memory")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda with a GPU per rank")
    for name in ("width", "layers", "heads", "context", "batch"):
        parser.add_argument(f"--{name}", type=int)
    given = parser.parse_args()
    local, ranks_here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if given.device is None:
        given.device = "cuda" if torch.cuda.device_count() >= ranks_here and given.backend != "gloo" else "cpu"
    if given.device == "cuda":
        torch.cuda.set_device(local)
        given.rate *= 0.3
    torch.set_num_threads(1)
    defaults = vars(SHAPES[given.device])
    shape = Shape(**{name: getattr(given, name) or default for name, default in defaults.items()})
    dist.init_process_group(given.backend)
    group = dist.group.WORLD
    assert group is not None
    text = load_text()
    found = {given.backend: train(text, shape, given, group)}
    if given.compare:
        peer = "nccl" if given.device == "cuda" else "gloo"
        name = peer if peer != given.backend else "symm"
        found[name] = train(text, shape, given, dist.new_group(backend=name))
    if dist.get_rank() == 0:
        report(found, shape, given)
    first, last = found[given.backend].losses[0], found[given.backend].losses[-1]
    if given.steps >= 20 and last > 0.8 * first:
        raise RuntimeError(f"the loss went from {first:.3f} to {last:.3f} only")
    apart = max(abs(a - b) for a, b in zip(*(t.losses for t in (*found.values(), *found.values())[:2]), strict=True))
    if apart > 0.1 * first:
        raise RuntimeError(f"the curves part by {apart:.3f}")
    if dist.get_rank() == 0:
        together = f", at most {apart:.1e} from {list(found)[1]}'s curve" if given.compare else ""
        print(f"ok: loss {first:.3f} -> {last:.3f} in {given.steps} steps{together}")
    # FSDP2's modules are reference cycles that hold groups, and Gloo aborts if its group dies at interpreter exit.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

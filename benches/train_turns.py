"""Steps of one training on several sides in turn, and what their time is spent on.

``benches/train_transformer.py --turns 7`` prints, for every side, the median over turns of milliseconds per step, the
first side's time divided by this side's (above 1: faster), and from torch.profiler the milliseconds per step of
products, attention, collectives, kernels that wait for other ranks, FSDP2's copies and all other kernels. Kernels
overlap, so their sum may exceed the step. *Exposed* is the time in which only collectives and waiting kernels run.
"""

from __future__ import annotations

import argparse
import gc
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from train_model import Model, Shape, batches, distributed

SEED, WARM_STEPS, PROFILED_STEPS, TURN_STEPS = 7, 3, 3, 4
# Kernels of NCCL and of symm (named in src/kernels/cuda), and copies between GPUs.
COMMUNICATES = re.compile(
    r"nccl|^(exchange|transfers|tiny|copy_sum|copy_push)$|^\w+_(staged|low_latency|one_shot|two_shot|cube_mesh)$"
    r"|^sum_part\w+$|PtoP",
    re.IGNORECASE,
)
#: Kinds of kernels on GPUs, with patterns of their names; the first kind that matches counts.
KERNELS = {
    "collectives": COMMUNICATES,
    # A warp or a thread of symm waits for other ranks.
    "waits": re.compile(r"^(copy|message)_sync$"),
    "FSDP copies": re.compile(r"split_with_sizes_copy|chunk_cat|multi_tensor_apply.*Copy"),
    "attention": re.compile(r"flash|fmha|attention|sdpa", re.IGNORECASE),
    "products": re.compile(r"gemm|nvjet|cutlass|xmma|cublas", re.IGNORECASE),
    "memcpy": re.compile(r"^Memcpy"),
}
#: Kinds of torch's operators on CPUs.
OPERATORS = {
    "collectives": re.compile(r"^(symm|gloo):"),
    "FSDP copies": re.compile(r"^fsdp::"),
    "attention": re.compile(r"^aten::_scaled_dot_product_\w+$"),
    "products": re.compile(r"^aten::(addmm|mm|bmm)$"),
}


@dataclass
class Spent:
    """Milliseconds of a step by kind; ``wall`` is the step under the profiler."""

    wall: float
    kinds: dict[str, float]
    exposed: float | None = None


@dataclass
class Side:
    """A training, and its milliseconds per step in each turn."""

    name: str
    step: Callable[[], torch.Tensor]
    turns: list[float] = field(default_factory=list)
    loss: float = 0.0
    spent: Spent | None = None


def settled(device: torch.device) -> float:
    """Returns the time once the device has finished everything."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def new_step(
    text: torch.Tensor, shape: Shape, given: argparse.Namespace, group: dist.ProcessGroup, side: str
) -> Callable[[], torch.Tensor]:
    """A function that trains for one step from the seeds, and returns the loss."""
    device = torch.device(given.device, torch.cuda.current_device()) if given.device == "cuda" else torch.device("cpu")
    torch.manual_seed(SEED)
    with device:
        made = Model(shape)
    model = distributed(made, given, group, device, side)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.rate, fused=device.type == "cuda")
    data = batches(text, shape, SEED + (group.rank() if given.parallel != "tp" else 0), device)
    use_bf16 = device.type == "cuda" and given.parallel in ("tp", "ddp")

    def step() -> torch.Tensor:
        piece = next(data)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=use_bf16):
            logits = model(piece[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), piece[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def in_turns(sides: list[Side], turns: int, device: torch.device) -> None:
    """Times the steps of all sides, every second turn in the opposite order, and profiles a few more."""
    for side in sides:
        for _ in range(WARM_STEPS):
            side.step()
    for turn in range(turns):
        for side in sides if turn % 2 == 0 else reversed(sides):
            side.step()
            # Python collects garbage between the turns, not in a step of whichever side comes next.
            gc.collect()
            gc.disable()
            dist.barrier()
            started = settled(device)
            for _ in range(TURN_STEPS):
                loss = side.step()
            side.turns.append((settled(device) - started) * 1e3 / TURN_STEPS)
            gc.enable()
            side.loss = loss.item()
    for side in sides:
        side.spent = profiled(side.step, device)


def kind_of(name: str, kinds: dict[str, re.Pattern[str]]) -> str | None:
    """The first kind whose pattern matches."""
    return next((kind for kind, pattern in kinds.items() if pattern.search(name)), None)


def profiled(step: Callable[[], torch.Tensor], device: torch.device) -> Spent:
    """Returns the milliseconds that a step spends on each kind of work."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities, acc_events=True) as recorded:
        started = settled(device)
        for _ in range(PROFILED_STEPS):
            step()
        wall = (settled(device) - started) * 1e3 / PROFILED_STEPS
    a_step = 1e3 * PROFILED_STEPS
    kinds: dict[str, float] = {}
    if device.type == "cpu":
        for event in recorded.key_averages():
            if kind := kind_of(event.key, OPERATORS):
                kinds[kind] = kinds.get(kind, 0.0) + event.cpu_time_total / a_step
        return Spent(wall, kinds)
    # FSDP2's own annotations also appear on the GPU, and cover all kernels that run meanwhile.
    on_gpu = [event for event in recorded.events() if event.device_type == DeviceType.CUDA]
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in on_gpu:
        if event.is_user_annotation:
            continue
        span, kind = event.time_range, kind_of(event.name, KERNELS) or "other"
        kinds[kind] = kinds.get(kind, 0.0) + (span.end - span.start) / a_step
        spans[kind in ("collectives", "waits")].append((span.start, span.end))
    exposed = covered(spans[True] + spans[False]) - covered(spans[False])
    return Spent(wall, kinds, exposed / a_step)


def covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union of the spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def table(sides: list[Side]) -> list[str]:
    """The lines of the result."""
    kinds = [*KERNELS, "other"]
    kinds = [kind for kind in kinds if any(side.spent and kind in side.spent.kinds for side in sides)]
    lines = [f"{'side':10} {'ms/step':>8} {'ratio':>6} {'loss':>9}  " + "  ".join(f"{kind:>11}" for kind in kinds)]
    lines[0] += "      exposed"
    first = statistics.median(sides[0].turns)
    for side in sides:
        middle = statistics.median(side.turns)
        line = f"{side.name:10} {middle:8.2f} {first / middle:6.3f} {side.loss:9.6f}  "
        if side.spent:
            line += "  ".join(f"{side.spent.kinds.get(kind, 0.0):11.2f}" for kind in kinds)
            line += "            -" if side.spent.exposed is None else f"  {side.spent.exposed:11.2f}"
        lines.append(f"{line}  turns {' '.join(f'{turn:.1f}' for turn in side.turns)}")
    return lines

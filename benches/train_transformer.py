"""Trains a small language model on Python's own source with DDP, FSDP2, hybrid sharding or tensor parallelism.

    torchrun --nproc-per-node 4 benches/train_transformer.py --parallel fsdp --compare
    torchrun --nproc-per-node 2 benches/train_transformer.py --parallel fsdp --model 4096 --turns 7

The text is the standard library of this interpreter, byte by byte, so nothing is downloaded. With FSDP2 each rank
trains on its own batches and holds a part of every layer, which is gathered before it is used; hybrid sharding does so
within two replicas; with tensor parallelism all ranks see the same batch, and each computes a part of the heads and of
the hidden units of every block. It runs on GPUs, or on CPUs if a rank has no GPU.

``--compare`` trains with a second backend in the same processes, from the same seeds, and prints both loss curves.
``--symmetric`` uses ``torch_symm.fsdp``, whose buffers symm's kernels load and store on all GPUs directly.
``--turns`` compares times instead: see ``benches/train_turns.py``.

The share of communication comes from torch.profiler over a few steps: on GPUs the time of kernels that communicate (and
of those during which no other kernel ran), on CPUs the time inside the backend's collectives.
"""

from __future__ import annotations

import argparse
import gc
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch_symm
from train_model import MODELS, SHAPES, Shape, load_text
from train_turns import WARM_STEPS, Side, in_turns, new_step, profiled, settled, table


@dataclass
class Training:
    """The results of one training. ``communication`` and ``exposed``: shares of the time of a step."""

    losses: list[float]
    tokens_per_s: float
    communication: float
    exposed: float | None


def train(text: torch.Tensor, shape: Shape, given: argparse.Namespace, group: dist.ProcessGroup) -> Training:
    """Trains from the seeds, then profiles a few more steps."""
    device = torch.device(given.device)
    name = dist.get_backend(group)
    step = new_step(text, shape, given, group, "symm+fsdp" if given.symmetric and name == "symm" else name)
    losses = []
    started = settled(device)
    for number in range(given.steps):
        if number == min(WARM_STEPS, given.steps - 1):
            started = settled(device)
        losses.append(step())
    counted = given.steps - min(WARM_STEPS, given.steps - 1)
    seconds = settled(device) - started
    mean = torch.stack(losses) / group.size()
    dist.all_reduce(mean, group=group)
    spent = profiled(step, device)
    pieces = shape.batch * (group.size() if given.parallel != "tp" else 1)
    exposed = None if spent.exposed is None else spent.exposed / spent.wall
    speed = pieces * shape.context * counted / seconds
    return Training(mean.tolist(), speed, spent.kinds.get("collectives", 0.0) / spent.wall, exposed)


def compare_in_turns(text: torch.Tensor, shape: Shape, given: argparse.Namespace) -> None:
    """Prints the times of all sides."""
    ours = ["symm", "symm+fsdp", "symm-zero+fsdp"] if given.parallel in ("fsdp", "hsdp") else ["symm", "symm-zero"]
    names = given.sides.split(",") if given.sides else ["nccl" if given.device == "cuda" else "gloo", *ours]
    groups: dict[str, dist.ProcessGroup] = {}
    sides = []
    for name in names:
        backend = name.partition("+")[0]
        if backend not in groups:
            zero = torch_symm.Options(cta_policy="zero") if backend == "symm-zero" else None
            group = dist.new_group(backend=backend.partition("-")[0], pg_options=zero)
            assert isinstance(group, dist.ProcessGroup)
            groups[backend] = group
        sides.append(Side(name, new_step(text, shape, given, groups[backend], name)))
    in_turns(sides, given.turns, torch.device(given.device))
    if dist.get_rank() == 0:
        print(f"{given.parallel} on {dist.get_world_size()} {given.device} ranks, {shape}, {given.turns} turns")
        print("\n".join(table(sides)), flush=True)


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
        RuntimeError: the loss does not fall, or the curves diverge.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default=os.environ.get("BACKEND", "symm"), help="symm, nccl or gloo")
    parser.add_argument("--compare", action="store_true", help="also train with NCCL (on CPUs: Gloo)")
    parser.add_argument("--parallel", choices=("fsdp", "hsdp", "ddp", "tp"), default="fsdp")
    parser.add_argument("--symmetric", action="store_true", help="use torch_symm.fsdp (with fsdp or hsdp)")
    parser.add_argument("--model", choices=MODELS, help="size of the model and of a batch")
    parser.add_argument(
        "--turns", type=int, default=0, metavar="N", help="time the steps of several sides, N times in turn"
    )
    parser.add_argument(
        "--sides",
        help="with --turns, comma-separated: nccl, gloo, symm, symm-zero (cta_policy), symm+fsdp (torch_symm.fsdp), …",
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU per rank")
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
    defaults = vars(MODELS[given.model] if given.model else SHAPES[given.device])
    shape = Shape(**{name: getattr(given, name) or default for name, default in defaults.items()})
    dist.init_process_group(given.backend)
    group = dist.group.WORLD
    assert group is not None
    text = load_text()
    if given.turns:
        compare_in_turns(text, shape, given)
        gc.collect()
        dist.destroy_process_group()
        return
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

"""FSDP2 with buffers in symmetric memory: gathered and reduced data move between GPUs without staging.

    torchrun --standalone --nproc-per-node 4 examples/09_zero_copy_fsdp2.py

The change is one line. The example needs two or more GPUs, one per rank.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch_symm
from torch import nn
from torch.distributed.fsdp import fully_shard

# A layer has 64 MB, because only long calls are direct.
LAYERS, WIDTH, BATCH, STEPS = 4, 4096, 8, 6


def train(*, zero_copy: bool) -> tuple[list[float], list[torch.Tensor]]:
    """Trains on this rank's batches; returns the losses, and this rank's parts of the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, device="cuda") for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    if zero_copy:
        torch_symm.fsdp.use(model)  # the line
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for step in range(STEPS):
        tokens = torch.randn(BATCH, WIDTH, device="cuda")
        optimizer.zero_grad()
        loss = (model(tokens) - tokens).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if dist.get_rank() == 0:
            way = "zero-copy" if zero_copy else "copied"
            print(f"{way}: step {step + 1}/{STEPS}, loss {losses[-1]:.5f}", flush=True)
    return losses, [parameter.to_local().detach() for parameter in model.parameters()]  # type: ignore[attr-defined]


def main() -> None:
    """Trains both ways and compares.

    Raises:
        RuntimeError: no call was direct, or the weights differ.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="symm", choices=("symm",), help="no other one has such memory")
    given = parser.parse_args()
    rank, world = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count()
    if gpus < max(2, world):
        if rank == 0:
            print(f"skipped: needs 2 GPUs or more and one per rank, here are {gpus} for {world}")
        return
    torch.cuda.set_device(rank)
    dist.init_process_group(given.backend, device_id=torch.device("cuda", rank))
    _, copied = train(zero_copy=False)
    before = int(torch_symm.stats().get("zero_copy", 0))
    losses, direct = train(zero_copy=True)
    torch.cuda.synchronize()
    calls = int(torch_symm.stats().get("zero_copy", 0)) - before
    difference = max((one - other).abs().max().item() for one, other in zip(direct, copied, strict=True))
    if calls == 0:
        raise RuntimeError(f"rank {rank}: no call went directly")
    if difference > 1e-6:
        raise RuntimeError(f"rank {rank}: weights differ from those of copied buffers by {difference:.2e}")
    if losses[-1] >= losses[0]:
        raise RuntimeError(f"rank {rank}: the loss went from {losses[0]:.5f} to {losses[-1]:.5f}")
    if rank == 0:
        print(f"ok: {calls} calls without a copy; weights differ from those of copied buffers by {difference:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Puts one stage of a network on each rank and passes microbatches along, by hand and with torch's pipelining.

    torchrun --nproc-per-node 4 examples/04_pipeline.py

By hand: irecv of the next activation while the current one is computed, isend to the next rank; gradients return the
same way. With torch.distributed.pipelining: the GPipe schedule, which sends with batch_isend_irecv.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

WIDTH, MICROBATCHES, ROWS = 48, 8, 16


def stage_of(rank: int) -> nn.Module:
    """The part of the network that lives on ``rank``."""
    torch.manual_seed(100 + rank)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The loss of one microbatch."""
    return nn.functional.mse_loss(output, target)


def by_hand(stage: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> list[float]:
    """Runs all microbatches forward, then backward; returns the losses on the last rank. ``stage`` gets gradients."""
    rank, world = dist.get_rank(), dist.get_world_size()
    first, last = rank == 0, rank == world - 1
    sends: list[dist.Work] = []
    arrived = [part.clone() if first else torch.empty(ROWS, WIDTH) for part in inputs.split(ROWS)]
    receives = [None if first else dist.irecv(buffer, rank - 1, tag=tag) for tag, buffer in enumerate(arrived)]
    outputs = []
    for tag, (buffer, receive) in enumerate(zip(arrived, receives, strict=True)):
        if receive is not None:
            receive.wait()
        buffer.requires_grad_()
        outputs.append(stage(buffer))
        if not last:
            sends.append(dist.isend(outputs[-1].detach(), rank + 1, tag=tag))

    losses = []
    gradients = [torch.empty(ROWS, WIDTH) for _ in outputs]
    receives = [None if last else dist.irecv(buffer, rank + 1, tag=tag) for tag, buffer in enumerate(gradients)]
    for tag, (output, receive) in enumerate(zip(outputs, receives, strict=True)):
        if receive is None:
            loss = mean_square(output, targets.split(ROWS)[tag])
            losses.append(loss.item())
            (loss / MICROBATCHES).backward()
        else:
            receive.wait()
            output.backward(gradients[tag])
        if not first:
            assert arrived[tag].grad is not None
            sends.append(dist.isend(arrived[tag].grad, rank - 1, tag=tag))
    for send in sends:
        send.wait()
    return losses


def by_schedule(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> list[float]:
    """The same with ScheduleGPipe."""
    rank, world = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(module, rank, world, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=MICROBATCHES, loss_fn=mean_square)
    losses: list[torch.Tensor] = []
    if rank == 0:
        schedule.step(inputs)
    elif rank == world - 1:
        schedule.step(target=targets, losses=losses)
    else:
        schedule.step()
    return [loss.item() for loss in losses]


def main() -> None:
    """Compares both pipelines with the whole network in one process.

    Raises:
        RuntimeError: losses or gradients differ.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default=os.environ.get("BACKEND", "symm"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(given.backend)
    rank, world = dist.get_rank(), dist.get_world_size()

    numbers = torch.Generator().manual_seed(0)
    inputs = torch.randn(MICROBATCHES * ROWS, WIDTH, generator=numbers)
    targets = torch.randn(MICROBATCHES * ROWS, WIDTH, generator=numbers)
    whole = nn.Sequential(*(stage_of(place) for place in range(world)))
    wanted = mean_square(whole(inputs), targets)
    wanted.backward()

    for name, run in (("isend/irecv", by_hand), ("ScheduleGPipe", by_schedule)):
        stage = stage_of(rank)
        losses = run(stage, inputs, targets)
        difference = torch.zeros(1)
        for mine, theirs in zip(stage.parameters(), whole[rank].parameters(), strict=True):
            assert mine.grad is not None and theirs.grad is not None
            difference = torch.maximum(difference, (mine.grad - theirs.grad).abs().max())
        if rank == world - 1:
            difference = torch.maximum(difference, (torch.tensor(losses).mean() - wanted.detach()).abs())
        dist.all_reduce(difference, op=dist.ReduceOp.MAX)
        if difference.item() > 1e-6:
            raise RuntimeError(f"{name}: losses or gradients differ from one process by {difference.item():.2e}")
        if rank == 0:
            print(f"{name}: {MICROBATCHES} microbatches, {world} stages, largest difference {difference.item():.1e}")
    if rank == 0:
        print("ok: both pipelines give the gradients of one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Trains the MLP of a transformer block whose tokens and weights are sharded, with communication inside the matmuls.

    torchrun --nproc-per-node 4 examples/11_async_tensor_parallel.py

Each rank holds a part of the tokens and a part of the hidden layer. The tokens are gathered while they are multiplied
by the first matrix, and the products with the second matrix are summed and scattered while others are computed. Each
operator is the gradient of the other. The result is compared with plain collectives before and after plain matmuls.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
import torch_symm.symm_mem as symm_mem
from torch import nn

WIDTH, HIDDEN, TOKENS, STEPS = 64, 256, 32, 5


class Gathered(torch.autograd.Function):
    """All ranks' tokens @ weight."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weight: torch.Tensor, name: str) -> torch.Tensor:
        """(tokens of this rank, in) x (in, out) -> (tokens of all, out)."""
        everyone, (product,) = symm_mem.fused_all_gather_matmul(tokens, [weight], 0, name)
        ctx.save_for_backward(everyone, weight)
        ctx.name = name
        return product

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradient of an all-gather is a reduce-scatter."""
        everyone, weight = ctx.saved_tensors
        mine = symm_mem.fused_matmul_reduce_scatter(gradient, weight.t(), "sum", 0, ctx.name)
        return mine, everyone.t() @ gradient, None


class Scattered(torch.autograd.Function):
    """hidden @ weight, summed over the ranks; each rank keeps its own tokens."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, name: str) -> torch.Tensor:
        """(tokens of all, in) x (in, out) -> (tokens of this rank, out)."""
        ctx.save_for_backward(hidden, weight)
        ctx.name = name
        return symm_mem.fused_matmul_reduce_scatter(hidden, weight, "sum", 0, name)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradient of a reduce-scatter is an all-gather."""
        hidden, weight = ctx.saved_tensors
        everyone, (back,) = symm_mem.fused_all_gather_matmul(gradient, [weight.t()], 0, ctx.name)
        return back, hidden.t() @ everyone, None


def gathered_plainly(tokens: torch.Tensor, weight: torch.Tensor, name: str) -> torch.Tensor:
    """Like ``Gathered``, with a separate collective."""
    return torch.cat(collectives.all_gather(tokens)) @ weight


def scattered_plainly(hidden: torch.Tensor, weight: torch.Tensor, name: str) -> torch.Tensor:
    """Like ``Scattered``, with a separate collective."""
    blocks = [block.contiguous() for block in (hidden @ weight).chunk(dist.get_world_size())]
    return collectives.reduce_scatter(torch.empty_like(blocks[0]), blocks)


def train(gathered: Callable[..., torch.Tensor], scattered: Callable[..., torch.Tensor], device: torch.device) -> Any:
    """Losses, and the weights after the last step."""
    rank, world, name = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    torch.manual_seed(0)
    wholes = [torch.randn(WIDTH, HIDDEN) / 8, torch.randn(HIDDEN, WIDTH) / 16]
    tokens, wanted = torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, WIDTH)
    up = nn.Parameter(wholes[0].chunk(world, 1)[rank].contiguous().to(device))
    down = nn.Parameter(wholes[1].chunk(world, 0)[rank].contiguous().to(device))
    tokens, wanted = (whole.chunk(world)[rank].to(device).requires_grad_() for whole in (tokens, wanted))
    optimizer = torch.optim.SGD([up, down], lr=3e-3)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        hidden = nn.functional.silu(gathered(tokens, up, name))
        output = tokens + scattered(hidden, down, name)
        loss = (output - wanted.detach()).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"step {len(losses)}/{STEPS}, loss {losses[-1]:.2f}", flush=True)
    return losses, [up.detach(), down.detach(), tokens.grad]


def main() -> None:
    """Trains both ways.

    Raises:
        RuntimeError: the losses or the weights differ, or the loss does not fall.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default=os.environ.get("BACKEND", "symm"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(given.backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.device_count() >= world and given.backend != "gloo":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    losses, weights = train(Gathered.apply, Scattered.apply, device)
    plain_losses, plain_weights = train(gathered_plainly, scattered_plainly, device)
    pairs = [*zip(weights, plain_weights, strict=True)]
    difference = max((one - other).abs().max().item() for one, other in pairs)
    if difference > 1e-3 or any(
        abs(one - other) > 1e-3 * other for one, other in zip(losses, plain_losses, strict=True)
    ):
        raise RuntimeError(f"rank {rank}: weights differ by {difference:.2e}, losses are {losses} and {plain_losses}")
    if losses[-1] > 0.95 * losses[0]:
        raise RuntimeError(f"rank {rank}: the loss went from {losses[0]:.2f} to {losses[-1]:.2f} only")
    if rank == 0:
        print(f"{STEPS} steps on {device.type}, loss of rank 0 {losses[0]:.2f} -> {losses[-1]:.2f}")
        print(f"ok: weights and gradients equal those without fusing, largest difference {difference:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Splits the two matrices of a feed-forward block over the ranks with DTensor and compares with the whole block.

    torchrun --nproc-per-node 4 examples/03_tensor_parallel.py

The first matrix is split by columns, the second by rows: each rank computes a part of the hidden layer, and one
all_reduce in the forward pass (and one in the backward pass) combines the parts.
"""

from __future__ import annotations

import argparse
import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, HIDDEN, TOKENS = 64, 256, 32


class FeedForward(nn.Module):
    """up -> SiLU -> down."""

    def __init__(self) -> None:
        """Draws random weights; set the seed first."""
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(TOKENS, WIDTH) -> the same shape."""
        return self.down(nn.functional.silu(self.up(tokens)))


def compare() -> None:
    """Runs the split and the whole block on the same tokens.

    Raises:
        RuntimeError: outputs or gradients differ.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    torch.manual_seed(0)
    whole = FeedForward()
    tokens = torch.randn(TOKENS, WIDTH, requires_grad=True)
    wanted = whole(tokens)
    wanted.square().mean().backward()
    wanted_input = tokens.grad
    tokens.grad = None

    split = FeedForward()
    split.load_state_dict(whole.state_dict())
    parallelize_module(split, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    output = split(tokens)
    output.square().mean().backward()

    differences = {"output": (output - wanted).abs().max().item()}
    differences["input gradient"] = (tokens.grad - wanted_input).abs().max().item()
    for (name, mine), theirs in zip(split.named_parameters(), whole.parameters(), strict=True):
        assert isinstance(mine.grad, DTensor)
        differences[f"gradient of {name}"] = (mine.grad.full_tensor() - theirs.grad).abs().max().item()
    for name, difference in differences.items():
        if difference > 1e-5:
            raise RuntimeError(f"{name} differs from the whole block by {difference:.2e}")
    if dist.get_rank() == 0:
        local = split.up.weight.to_local()
        print(f"each rank holds {tuple(local.shape)} of the {(HIDDEN, WIDTH)} matrix")
        largest = max(differences.values())
        print(f"ok: output and {len(differences) - 1} gradients equal, largest difference {largest:.1e}")


def main() -> None:
    """Joins the group and compares."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default=os.environ.get("BACKEND", "symm"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(given.backend)
    compare()
    if given.backend == "gloo":
        # Modules in reference cycles hold the group, and Gloo aborts the process if its group dies at interpreter exit.
        gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

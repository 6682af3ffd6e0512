"""Compiles a transformer block so that its collectives overlap with its matmuls: async tensor parallelism.

    torchrun --nproc-per-node 4 examples/13_compiled_block.py

The block is written with plain functional collectives: tokens are split over ranks, and so are heads and
hidden units. With symm_mem.enable_fused_ops() and Inductor's switch, torch.compile fuses four collectives and their
matmuls into four operators. It needs a C++ compiler (CPU) or Triton (CUDA), and a torch that was built with NCCL.
"""

from __future__ import annotations

import argparse
import os
import shutil
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch_symm.symm_mem as symm_mem
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.nn.functional import layer_norm, scaled_dot_product_attention, silu

WIDTH, HEADS, HIDDEN, TOKENS = 64, 8, 128, 32
FUSED = ("symm_mem.fused_all_gather_matmul", "symm_mem.fused_matmul_reduce_scatter")
PLAIN = ("all_gather_into_tensor", "reduce_scatter_tensor")

# torch 2.15 warns of the old names all_gather_tensor and reduce_scatter_tensor, and torch 2.11 has no others.
all_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
reduce_scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor


def block(tokens: torch.Tensor, weights: list[torch.Tensor], group: Any, heads: int) -> torch.Tensor:
    """(tokens of this rank, WIDTH) through attention and MLP; ``weights``: this rank's parts, with ``heads`` heads."""
    query, key, value, out, up, down = weights
    everyone = all_gather(layer_norm(tokens, tokens.shape[-1:]), 0, group)
    parts = [(everyone @ weight).unflatten(-1, (heads, -1)).transpose(0, 1) for weight in (query, key, value)]
    attended = scaled_dot_product_attention(parts[0], parts[1], parts[2]).transpose(0, 1).flatten(1)
    tokens = tokens + reduce_scatter(attended @ out, "sum", 0, group)
    everyone = all_gather(layer_norm(tokens, tokens.shape[-1:]), 0, group)
    return tokens + reduce_scatter(silu(everyone @ up) @ down, "sum", 0, group)


def main() -> None:
    """Runs the block as written and compiled.

    Raises:
        RuntimeError: the results differ, or a collective is left in the compiled code.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default=os.environ.get("BACKEND", "symm"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(given.backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    device, dtype, near = torch.device("cpu"), torch.float32, 1e-4
    if torch.cuda.device_count() >= world and given.backend != "gloo":
        device, dtype, near = torch.device("cuda", rank), torch.bfloat16, 0.1
        torch.cuda.set_device(device)
    if HEADS % world or not dist.is_nccl_available() or (device.type == "cpu" and shutil.which("g++") is None):
        if rank == 0:
            print(f"skipped: needs ranks that divide {HEADS} heads, a C++ compiler, a torch with NCCL")
        dist.destroy_process_group()
        return
    torch.manual_seed(0)
    shapes = [(WIDTH, WIDTH)] * 4 + [(WIDTH, HIDDEN), (HIDDEN, WIDTH)]
    wholes = [torch.randn(shape) / shape[0] ** 0.5 for shape in shapes]
    columns = (1, 1, 1, 0, 1, 0)
    weights = [whole.chunk(world, dim)[rank].contiguous() for whole, dim in zip(wholes, columns, strict=True)]
    weights = [weight.to(device, dtype) for weight in weights]
    tokens = torch.randn(TOKENS, WIDTH).chunk(world)[rank].to(device, dtype)
    arguments = (tokens, weights, dist.group.WORLD, HEADS // world)
    wanted = block(*arguments)

    if rank == 0:
        print(f"compiling a block of {HEADS} heads on {world} ranks …", flush=True)
    symm_mem.enable_fused_ops()
    warnings.filterwarnings("ignore", message="erase_node")  # from torch's own pass
    with config.patch(_micro_pipeline_tp=True):
        got, codes = run_and_get_code(torch.compile(block, fullgraph=True), *arguments)
    text = "\n".join(codes)
    difference = (got - wanted).abs().max().item()
    if difference > near:
        raise RuntimeError(f"rank {rank}: the compiled block differs by {difference:.1e}")
    counts = [text.count(f"torch.ops.{name}.default(") for name in FUSED]
    if given.backend == "symm" and (any(name in text for name in PLAIN) or min(counts) < 2):
        raise RuntimeError(f"rank {rank}: the compiled code has {counts} fused operators, and collectives beside them")
    if rank == 0:
        print(f"the compiled code calls {counts[0]} fused gathers and {counts[1]} fused scatters on {device.type}")
        print(f"ok: it differs from the block as written by {difference:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

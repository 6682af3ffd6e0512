"""The smallest program: every rank has a number, and all get the sum.

torchrun --standalone --nproc-per-node 4 examples/00_hello.py
"""

import torch
import torch.distributed as dist

dist.init_process_group("symm")
rank, ranks = dist.get_rank(), dist.get_world_size()
number = torch.tensor([float(rank)])
dist.all_reduce(number)
assert number.item() == sum(range(ranks))
# The newline is part of the text; otherwise torchrun's ranks write it separately, and their lines mix.
print(f"ok: rank {rank} of {ranks} has the sum {number.item():.0f}\n", end="", flush=True)
dist.destroy_process_group()

"""Compiles a function with collectives inside it (torch.compile, functional collectives) and compares with eager.

    torchrun --nproc-per-node 4 examples/05_compile.py

TorchInductor compiles C++ at run time. Without a C++ compiler the graph is still captured, by the backend
"aot_eager", and the example says so.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import time

# With a pool of compiler processes in every rank the ranks compete for the cores, and probing the processor's vector
# instructions starts ten processes per rank. Both together would take half of this example's 22 s, without a benefit.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

# torch 2.15 warns of the old names all_gather_tensor and reduce_scatter_tensor, and torch 2.11 has no others.
all_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
reduce_scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor


def attention_like(tokens: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gathers tokens, multiplies, sums over ranks, keeps this rank's rows, and sums their squares over ranks."""
    everyone = all_gather(tokens, 0, group)
    mixed = torch.relu(everyone @ weight) * 0.5
    mine = reduce_scatter(mixed, "sum", 0, group)
    norm = funcol.all_reduce(mine.square().sum(), "sum", group)
    return mine / (norm + 1e-6).sqrt()


def main() -> None:
    """Runs eager and compiled.

    Raises:
        RuntimeError: the results differ.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default=os.environ.get("BACKEND", "symm"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(given.backend)
    rank = dist.get_rank()
    group = dist.group.WORLD
    compiler = "inductor" if shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++") else "aot_eager"

    torch.manual_seed(rank)
    tokens, weight = torch.randn(32, 64), torch.randn(64, 64)
    wanted = attention_like(tokens, weight, group)
    if rank == 0:
        print(f"compiling with {compiler} …", flush=True)
    started = time.perf_counter()
    compiled = torch.compile(attention_like, backend=compiler, fullgraph=True)
    difference = 0.0
    for _ in range(3):
        difference = max(difference, (compiled(tokens, weight, group) - wanted).abs().max().item())
    if difference > 1e-5:
        raise RuntimeError(f"rank {rank}: compiled and eager differ by {difference:.2e}")
    if rank == 0:
        note = "" if compiler == "inductor" else " (no C++ compiler found, so no inductor)"
        print(f"compiled in {time.perf_counter() - started:.1f} s with {compiler}{note}, without a graph break")
        print(f"ok: compiled equals eager, largest difference {difference:.1e}")
    if given.backend == "gloo":
        # The compiled code holds the group, and Gloo aborts the process if its group dies at interpreter exit.
        del compiled
        torch.compiler.reset()
        gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

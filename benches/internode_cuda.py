"""symm on two nodes with one GPU each compared with NCCL, in one run: ``python benches/internode_cuda.py``.

Two GPUs of this machine act as the nodes (``SYMM_TEST_NODE``, ``NCCL_HOSTID``): NCCL connects them by sockets of this
machine, on all sides. So the program compares the time that symm adds to NCCL's calls, not networks. ``one chunk`` is
symm with calls that move in one chunk. The sides take turns, round by round; results are first compared with the
expected ones. The program prints the median over rounds of the slowest rank's mean time, in µs, and NCCL's time divided
by symm's. ``host``: µs until the call has returned. A size is the size of a rank's largest tensor.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch_symm
from torch_symm._native import load
from torch_symm.tools.bench.units import parse_size

SIZES = ("8", "64K", "1M", "16M", "256M")
OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
WORLD, ROUNDS = 2, 7


def call_of(op: str, size: str, group: Any) -> tuple[Callable[[], None], Callable[[], bool]]:
    """Returns two functions: one makes a call of ``op``, and one returns whether the result is right."""
    count = max(parse_size(size) // 4 // WORLD, 1)
    rank = dist.get_rank()
    whole = torch.full((count * WORLD,), float(rank + 1), device="cuda")
    part = torch.full((count,), float(rank + 1), device="cuda")
    taken = torch.empty_like(whole)
    blocks = torch.arange(1, WORLD + 1, device="cuda").repeat_interleave(count).float()
    if op == "all_reduce":
        sums = torch.zeros_like(whole)
        return lambda: dist.all_reduce(sums.copy_(whole), group=group), lambda: bool((sums == 3).all())
    if op == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group), lambda: bool((part == 3).all())
    if op == "all_gather":
        return lambda: dist.all_gather_into_tensor(taken, part, group=group), lambda: torch.equal(taken, blocks)
    if op == "broadcast":
        return lambda: dist.broadcast(whole, 0, group=group), lambda: bool((whole == 1).all())
    return lambda: dist.all_to_all_single(taken, whole, group=group), lambda: torch.equal(taken, blocks)


def timed(call: Callable[[], None], repeats: int) -> tuple[float, float]:
    """µs of a call, and µs until it has returned."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    returned = time.perf_counter() - start
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats * 1e6, returned / repeats * 1e6


def rank_main(rank: int, port: int, ops: list[str], sizes: list[str]) -> None:
    """Measures; rank 0 prints."""
    os.environ.update(
        SYMM_TEST_NODE="ab"[rank], NCCL_HOSTID=f"host-{rank}", NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo"
    )
    torch.cuda.set_device(rank % torch.cuda.device_count())
    options = torch_symm.Options(timeout=60)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("symm", init_method=address, rank=rank, world_size=WORLD, pg_options=options)
    load()._set_trial_thresholds(64 << 10, 1 << 30, 256 << 10)
    whole = dist.new_group(backend="symm")
    load()._set_trial_thresholds(0, 0, 0)
    sides = {"symm": dist.group.WORLD, "one chunk": whole, "nccl": dist.new_group(backend="nccl")}
    if rank == 0:
        print("| op, size | symm | one chunk | NCCL | NCCL / symm | host: symm | host: NCCL |\n|---|" + "---|" * 6)
    for op in ops:
        for size in sizes:
            calls = {}
            for side, group in sides.items():
                calls[side], right = call_of(op, size, group)
                calls[side]()
                torch.cuda.synchronize()
                assert right(), (op, size, side)
            repeats = max(2, min(50, (64 << 20) // parse_size(size)))
            times: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
            for _ in range(ROUNDS):
                for side, call in calls.items():
                    times[side].append(timed(call, repeats))
            found = torch.tensor([times[side] for side in sides], dtype=torch.float64)
            dist.all_reduce(found, dist.ReduceOp.MAX)
            medians = [[statistics.median(values) for values in zip(*rounds, strict=True)] for rounds in found.tolist()]
            (symm, host), (one, _), (nccl, nccl_host) = medians
            if rank == 0:
                row = f"{symm:.1f} | {one:.1f} | {nccl:.1f} | {nccl / symm:.2f} | {host:.1f} | {nccl_host:.1f}"
                print(f"| {op} {size} | {row} |", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--port", type=int, default=29519)
    arguments = parser.parse_args()
    if torch.cuda.device_count() < 1:
        sys.exit("there is no GPU here")
    given = (arguments.port, arguments.ops.split(","), arguments.sizes.split(","))
    torch.multiprocessing.spawn(rank_main, given, nprocs=WORLD)


if __name__ == "__main__":
    main()

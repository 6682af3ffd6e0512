"""Measures how much slower the matmuls of a rank are while its collective waits for a late rank.

    torchrun --nproc-per-node 2 benches/late_rank.py --backends nccl,symm

Rank 0 starts an asynchronous call and then bf16 matmuls, which end before the other ranks start the call. Each backend
has a group of its own in the same processes, and the backends take turns. With
SYMM_CUDA_TUNING=arrival_bytes=1000000000000, symm's kernels start before all ranks have arrived. With
SYMM_ALLOW_SHARED_GPUS=1, two ranks may share a GPU, which NCCL rejects. ``--chain 200`` instead prints the time of a
call in a chain of 200 asynchronous ones for which all ranks come in time. ``--calls send,recv``: rank 0 of two sends,
or receives.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist

MIB = 1 << 20


def matmuls(given: argparse.Namespace) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Enqueues the matmuls; returns events before and after them."""
    a, b = given.factors
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(given.matmuls):
        a @ b
    end.record()
    return start, end


def enqueue(group: dist.ProcessGroup, call: str, given: argparse.Namespace) -> dist.Work:
    """Starts ``call`` asynchronously."""
    tensor = given.tensors[0]
    if call == "all_reduce":
        work = dist.all_reduce(tensor, group=group, async_op=True)
    elif call in ("send", "recv"):
        # Rank 0 sends to rank 1, or receives from it.
        peer = 1 - dist.get_rank()
        if (call == "send") == (peer == 1):
            work = dist.isend(tensor, group=group, group_dst=peer)
        else:
            work = dist.irecv(tensor, group=group, group_src=peer)
    elif call == "all_gather":
        work = dist.all_gather_into_tensor(given.tensors[1], tensor, group=group, async_op=True)
    else:
        work = dist.reduce_scatter_tensor(tensor, given.tensors[1], group=group, async_op=True)
    assert work is not None
    return work


def chained(group: dist.ProcessGroup, call: str, given: argparse.Namespace) -> float:
    """Returns the milliseconds of a call in a chain, which the host enqueues while the device sleeps."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    dist.barrier(group=given.host)
    torch.cuda._sleep(100_000 * given.chain)
    start.record()
    works = [enqueue(group, call, given) for _ in range(given.chain)]
    works[-1].wait()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / given.chain


def turn(group: dist.ProcessGroup, call: str, given: argparse.Namespace) -> float:
    """Returns the milliseconds of rank 0's matmuls while ``call`` waits for the other ranks."""
    torch.cuda.synchronize()
    dist.barrier(group=given.host)
    if dist.get_rank() > 0:
        time.sleep(given.late_ms / 1e3)
    work = enqueue(group, call, given)
    spent = 0.0
    if dist.get_rank() == 0:
        # The kernels of the call are on the device before the first matmul.
        time.sleep(1e-3)
        begun, (_, end) = time.perf_counter(), matmuls(given)
        end.synchronize()
        spent = (time.perf_counter() - begun) * 1e3
    work.wait()
    torch.cuda.synchronize()
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="nccl,symm")
    parser.add_argument("--calls", default="all_reduce,all_gather,reduce_scatter")
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--matmuls", type=int, default=12)
    parser.add_argument("--late-ms", type=float, default=60)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--chain", type=int, default=0, metavar="N", help="time calls in chains of N instead")
    given = parser.parse_args()
    device = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
    torch.cuda.set_device(device)
    dist.init_process_group("gloo")
    given.host = dist.group.WORLD
    size = dist.get_world_size()
    bf16 = {"dtype": torch.bfloat16, "device": "cuda"}
    given.tensors = [torch.zeros(given.mib * MIB // 2 * parts, **bf16) for parts in (1, size)]
    given.factors = [torch.randn(n, k, **bf16) for n, k in ((8192, 4096), (4096, 8192))]
    groups = {backend: dist.new_group(backend=backend) for backend in given.backends.split(",")}
    alone = []
    for number in range(0 if given.chain else given.turns + 1):
        if dist.get_rank() == 0:
            start, end = matmuls(given)
            end.synchronize()
            alone += [start.elapsed_time(end)] if number else []
        dist.barrier(group=given.host)
    if alone:
        print(f"{given.matmuls} matmuls without a call: {statistics.median(alone):.2f} ms", flush=True)
    for call in given.calls.split(","):
        spent: dict[str, list[float]] = {side: [] for side in groups}
        for number in range(given.turns + 1):
            for side, group in groups.items():
                ms = (chained if given.chain else turn)(group, call, given)
                spent[side] += [ms] if number else []
        if dist.get_rank() == 0:
            cells = ", ".join(f"{side} {statistics.median(all_ms):.4g} ms" for side, all_ms in spent.items())
            about = f"in a chain of {given.chain}" if given.chain else f"ranks {given.late_ms:g} ms late"
            print(f"{call} of {given.mib} MiB, {about}: {cells}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

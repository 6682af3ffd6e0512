"""Hand-written communication: ranks load and store in each other's tensors, on CPU or CUDA.

    torchrun --nproc-per-node 4 examples/10_symmetric_memory.py

First a chain: each rank writes batches into the next rank's tensor and signals, and no rank writes before the tensor is
free. Then an all-reduce in plain tensor operations: each rank sums all ranks' tensors, which it reads directly.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch_symm.symm_mem as symm_mem

BATCHES, SLOTS, SIZE = 20, 2, 1000
#: Channels of signals: a batch has arrived, a slot is free again.
FULL, FREE = 0, 1


def chain(device: torch.device) -> None:
    """Rank 0 produces batches, each later rank adds 1 and passes them on; the last rank checks them.

    Raises:
        RuntimeError: a batch differs from the one that was sent.
    """
    slots = symm_mem.empty(SLOTS, SIZE, device=device)
    window = symm_mem.rendezvous(slots, dist.group.WORLD)
    rank, last = window.rank, window.world_size - 1
    for batch in range(BATCHES):
        slot = batch % SLOTS
        if rank == 0:
            made = torch.full((SIZE,), float(batch), device=device)
        else:
            window.wait_signal(rank - 1, channel=FULL)
            made = slots[slot] + 1
            window.put_signal(rank - 1, channel=FREE)
        if rank == last:
            if not torch.equal(made, torch.full_like(made, batch + last)):
                raise RuntimeError(f"batch {batch} came as {made}")
            continue
        if batch >= SLOTS:
            window.wait_signal(rank + 1, channel=FREE)
        window.get_buffer(rank + 1, (SIZE,), slots.dtype, slot * SIZE).copy_(made)
        window.put_signal(rank + 1, channel=FULL)
    for _ in range(min(SLOTS, BATCHES) if rank < last else 0):
        window.wait_signal(rank + 1, channel=FREE)


def all_reduce(mine: torch.Tensor) -> torch.Tensor:
    """The sum of all ranks' ``mine``, which is symmetric, in rank order: the same bits on all ranks."""
    window = symm_mem.rendezvous(mine, dist.group.WORLD)
    window.barrier(channel=0)
    total = torch.zeros_like(mine)
    for peer in range(window.world_size):
        total += window.get_buffer(peer, mine.shape, mine.dtype)
    window.barrier(channel=1)  # from here on the ranks may change their tensors
    return total


def main() -> None:
    """Runs both, and compares the sum with the sum of the backend.

    Raises:
        RuntimeError: the sums differ.
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
    chain(device)

    mine = symm_mem.empty(SIZE, device=device)
    torch.manual_seed(rank)
    wanted = mine.copy_(torch.randn(SIZE)).clone()
    dist.all_reduce(wanted)
    difference = (all_reduce(mine) - wanted).abs().max().item()
    if difference > 1e-5:
        raise RuntimeError(f"rank {rank}: the sums differ by {difference:.2e}")
    if rank == 0:
        print(f"{BATCHES} batches went from rank 0 to rank {world - 1} on {device.type}")
        print(f"ok: the hand-written all-reduce differs from {given.backend}'s by {difference:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

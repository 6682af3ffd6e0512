"""A one-shot all-reduce written in Triton on symmetric memory: every GPU reads and sums all ranks' tensors.

    torchrun --nproc-per-node 2 examples/12_triton_all_reduce.py

Blocks of the same index synchronise across GPUs before and after: each sets its word in the other ranks' pads and
clears the other ranks' words in its own pad. Every wait ends after a maximum number of tries, and the host raises.
"""

from __future__ import annotations

import argparse
import importlib.util
import os

import torch
import torch.distributed as dist
import torch_symm.symm_mem as symm_mem

BLOCK, TRIES = 1024, 20_000_000

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

    @triton.jit
    def meet(pads, rank: tl.constexpr, world: tl.constexpr, tries: tl.constexpr):  # type: ignore[no-untyped-def]
        """Synchronises the blocks with this index of all ranks; returns the number of peers that did not arrive."""
        late = 0
        word = tl.program_id(0) * world
        own = tl.load(pads + rank).to(tl.pointer_type(tl.uint32)) + word
        tl.debug_barrier()  # orders this block's loads and stores before the signals
        for step in tl.static_range(1, world):
            peer = (rank + step) % world
            theirs = tl.load(pads + peer).to(tl.pointer_type(tl.uint32)) + word + rank
            left = tries
            while (tl.atomic_cas(theirs, 0, 1, sem="release", scope="sys") != 0) & (left > 0):
                left -= 1
        for step in tl.static_range(1, world):
            left = tries
            while (tl.atomic_cas(own + (rank + step) % world, 1, 0, sem="acquire", scope="sys") != 1) & (left > 0):
                left -= 1
            late += (left <= 0).to(tl.int32)
        tl.debug_barrier()
        return late

    @triton.jit
    def one_shot(  # type: ignore[no-untyped-def]
        buffers,
        pads,
        out,
        late,
        count,
        rank: tl.constexpr,
        world: tl.constexpr,
        block: tl.constexpr,
        tries: tl.constexpr,
    ):
        """Sums a block of fp32 elements of all ranks, in rank order."""
        missing = meet(pads, rank, world, tries)
        places = tl.program_id(0) * block + tl.arange(0, block)
        inside = places < count
        total = tl.zeros([block], tl.float32)
        for peer in tl.static_range(world):
            theirs = tl.load(buffers + peer).to(tl.pointer_type(tl.float32))
            total += tl.load(theirs + places, mask=inside, other=0.0)
        tl.store(out + places, total, mask=inside)
        missing += meet(pads, rank, world, tries)
        tl.atomic_add(late, missing)


def all_reduce(mine: torch.Tensor) -> torch.Tensor:
    """The sum of all ranks' ``mine``, a symmetric fp32 tensor.

    Raises:
        RuntimeError: a peer did not arrive.
    """
    window = symm_mem.rendezvous(mine, dist.group.WORLD)
    rank, world = window.rank, window.world_size
    buffers, pads = (
        torch.tensor(pointers, dtype=torch.int64, device=mine.device)
        for pointers in (window.buffer_ptrs, window.signal_pad_ptrs)
    )
    out, late = torch.empty_like(mine), torch.zeros(1, dtype=torch.int32, device=mine.device)
    blocks = triton.cdiv(mine.numel(), BLOCK)
    if blocks * world * 4 > window.signal_pad_size:
        raise RuntimeError(f"{blocks} blocks need more than {window.signal_pad_size} bytes of signals")
    one_shot[(blocks,)](buffers, pads, out, late, mine.numel(), rank, world, BLOCK, TRIES)
    if late.item():
        raise RuntimeError(f"rank {rank}: {late.item()} signals of peers did not come")
    return out


def main() -> None:
    """Compares with the backend's all-reduce.

    Raises:
        RuntimeError: the sums differ.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default=os.environ.get("BACKEND", "symm"))
    given = parser.parse_args()
    local, world = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count()
    if gpus < max(2, world):
        if local == 0:
            print(f"skipped: needs 2 GPUs or more and one per rank, here are {gpus} for {world}")
        return
    torch.cuda.set_device(local)
    dist.init_process_group(given.backend)
    symm_mem.set_backend("SYMM")
    difference = 0.0
    for count in (1, 1000, 50_000):
        mine = symm_mem.empty(count, device="cuda")
        torch.manual_seed(local)
        wanted = mine.copy_(torch.randn(count)).clone()
        dist.all_reduce(wanted)
        for _ in range(10):
            difference = max(difference, (all_reduce(mine) - wanted).abs().max().item())
        if local == 0:
            print(f"{count} elements summed ten times on {world} GPUs", flush=True)
    if difference > 1e-5:
        raise RuntimeError(f"rank {local}: the sums differ by {difference:.2e}")
    if local == 0:
        print(f"ok: the all-reduce in Triton differs from {given.backend}'s by {difference:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

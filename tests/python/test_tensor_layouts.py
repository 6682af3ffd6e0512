"""Unsupported tensors, and a barrier. test_collectives.py has every layout."""

from __future__ import annotations

import mmap
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from ranks import backend_of, run_ranks


# proves P8
def test_splits_whose_sum_wraps_are_refused() -> None:
    """2^63 - 1 twice, and 6: their sum is 4 in 64 bits."""

    def body(rank: int, world: int) -> None:
        wraps = [2**63 - 1, 2**63 - 1, 6]
        for sent, received in ((wraps, wraps), (wraps, None), (None, wraps)):
            given, got = (torch.zeros(4 if splits else 6) for splits in (sent, received))
            with pytest.raises(
                ValueError, match=r"Split sizes .* \[9223372036854775807, 9223372036854775807, 6\], dim 0 is 4"
            ):
                dist.all_to_all_single(got, given, received, sent)
        dist.barrier()

    run_ranks(body, 3)


def mapped(name: str, access: int) -> torch.Tensor:
    """Ones, in a file that is mapped."""
    path = ranks.scratch / name
    path.write_bytes(torch.ones(4096).numpy().tobytes())
    with path.open("r+b") as file, warnings.catch_warnings():
        # Torch warns that writing to it is undefined.
        warnings.simplefilter("ignore")
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, prot=access), dtype=torch.float32)


def read_only_is_for_inputs(rank: int, world: int) -> None:
    fixed, free = mapped(f"fixed-{rank}", mmap.PROT_READ), mapped(f"free-{rank}", mmap.PROT_READ | mmap.PROT_WRITE)
    backend = backend_of()
    outputs: dict[str, Callable[[torch.Tensor], object]] = {
        "all_reduce": dist.all_reduce,
        "columns": lambda out: dist.all_reduce(out.view(64, 64)[:, 1:3]),
        "asynchronous": lambda out: dist.all_reduce(out, async_op=True),
        "coalesced": lambda out: dist.all_reduce_coalesced([torch.ones(3), out]),
        "broadcast": lambda out: dist.broadcast(out, 1 - rank),
        "gather": lambda out: backend.allgather([[torch.ones(4096), out]], [torch.ones(4096)]),
        "pieces": lambda out: dist.all_to_all_single(out, torch.ones(4096)),
        "recv": lambda out: dist.recv(out, 1 - rank),
        "irecv": lambda out: dist.irecv(out, 1 - rank),
        "from any": lambda out: dist.recv(out),
    }
    for name, call in outputs.items():
        with pytest.raises(ValueError, match=r"memory that may not be written, .* clone"):
            call(fixed)
            pytest.fail(name)
    # The group survives because all ranks rejected the call, and each rank may have read-only tensors.
    parts = [torch.zeros(4096) for _ in range(world)]
    dist.all_gather(parts, fixed)
    dist.broadcast(fixed if rank == 0 else parts[0], 0)
    dist.reduce(parts[1] if rank == 0 else fixed, 0)
    works = [dist.isend(fixed, 1 - rank), dist.irecv(free, 1 - rank)]
    for work in works:
        work.wait()
    for _ in range(2):
        dist.all_reduce(free)
    assert bool((free == 4).all()) and bool((fixed == 1).all()) and bool((parts[0] == 1).all())
    # A new storage at the address of a checked one is checked again.
    del free
    for turn in range(20):
        with pytest.raises(ValueError, match="may not be written"):
            dist.all_reduce(mapped(f"fixed-{rank}-{turn}", mmap.PROT_READ))
        dist.all_reduce(mapped(f"free-{rank}-{turn}", mmap.PROT_READ | mmap.PROT_WRITE))


# proves P22
def test_p8_memory_that_is_mapped_read_only_is_refused_as_output() -> None:
    run_ranks(read_only_is_for_inputs, 2)


def test_barrier_holds_everybody() -> None:
    """No rank passes a barrier before the last one has reached it."""

    def body(rank: int, world: int) -> None:
        folder: Path = ranks.scratch
        for turn in range(4):
            if rank == turn % 4:
                time.sleep(0.05)
            (folder / f"came-{turn}-{rank}").touch()
            dist.barrier()
            assert len(list(folder.glob(f"came-{turn}-*"))) == 4

    run_ranks(body, 4)

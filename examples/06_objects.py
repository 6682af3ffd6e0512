"""Exchanges Python objects of different sizes between the ranks.

    torchrun --nproc-per-node 4 examples/06_objects.py

torch pickles the objects and sends the bytes through the backend's collectives. Unpickling runs code that
the sender chose, so use this only among ranks that trust each other.
"""

from __future__ import annotations

import argparse
import os

import torch.distributed as dist


def report_of(rank: int) -> dict[str, object]:
    """An object whose size depends on the rank."""
    return {"rank": rank, "name": f"worker {rank}", "losses": [round(1.0 / (step + 1), 3) for step in range(3 * rank)]}


def expect(found: object, wanted: object, what: str) -> None:
    """Compares an object with the expected object.

    Raises:
        RuntimeError: the two differ.
    """
    if found != wanted:
        raise RuntimeError(f"rank {dist.get_rank()}: {what} gave {found!r}, expected {wanted!r}")


def main() -> None:
    """Gathers, broadcasts and scatters objects."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default=os.environ.get("BACKEND", "symm"))
    given = parser.parse_args()
    dist.init_process_group(given.backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    everyone = [report_of(each) for each in range(world)]

    gathered: list[object] = [None] * world
    dist.all_gather_object(gathered, report_of(rank))
    expect(gathered, everyone, "all_gather_object")

    settings: list[object] = [{"lr": 0.1, "layers": [64, 64, 10]}, "run 17"] if rank == 1 else [None, None]
    dist.broadcast_object_list(settings, src=1)
    expect(settings, [{"lr": 0.1, "layers": [64, 64, 10]}, "run 17"], "broadcast_object_list")

    at_root: list[object] | None = [None] * world if rank == 0 else None
    dist.gather_object(report_of(rank), at_root, dst=0)
    expect(at_root, everyone if rank == 0 else None, "gather_object")

    shares: list[object] = [None]
    files = [f"file {each}" * (each + 1) for each in range(world)]
    dist.scatter_object_list(shares, files if rank == 0 else None, src=0)
    expect(shares, [files[rank]], "scatter_object_list")

    if rank == 0:
        print(f"gathered {[report['name'] for report in everyone]}")
        print("ok: all_gather_object, broadcast_object_list, gather_object, scatter_object_list")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

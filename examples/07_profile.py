"""Profiles a few collectives and finds them by name, with sizes and types, in the trace.

    torchrun --nproc-per-node 4 examples/07_profile.py [--trace trace.json]

Open the trace in https://ui.perfetto.dev: each call is an event named like symm:all_reduce.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

CALLS = 5


def main() -> None:
    """Profiles, then looks for the events.

    Raises:
        RuntimeError: an expected event is missing from the trace.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default=os.environ.get("BACKEND", "symm"))
    parser.add_argument("--trace", type=Path, help="write the trace of rank 0 there")
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(given.backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    gradients, gathered = torch.ones(1 << 16), torch.empty(world << 10)
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as recorded:
        for _ in range(CALLS):
            dist.all_reduce(gradients)
            dist.all_gather_into_tensor(gathered, gradients[: 1 << 10])
            dist.broadcast(gradients, 0)
    counts = {event.key: event.count for event in recorded.key_averages()}
    for collective in ("all_reduce", "broadcast"):
        name = f"{given.backend}:{collective}"
        found = counts.get(name, 0)
        if found < CALLS:
            raise RuntimeError(f"the profile has {found} events {name}, expected {CALLS}: {sorted(counts)}")
    if rank == 0:
        if given.trace is not None:
            recorded.export_chrome_trace(str(given.trace))
        for event in recorded.key_averages():
            if event.key.startswith(f"{given.backend}:"):
                print(f"{event.key}: {event.count} calls, {event.cpu_time:.0f} µs each")
        print("ok: the profile names every collective")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""One rank of ``torch-symm hello``, started as ``python -m torch_symm.tools.hello_rank DEVICE``.

torch's environment variables give its number.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from torch_symm.launch.messages import send, sentence

#: Bytes of the timed tensors, and number of calls of each.
SIZES, CALLS = (8, 1 << 20), 200
SECONDS = 40.0


def main(device: str) -> None:
    """Sends the sum and the times of this rank, or the ``error`` and the step in which it occurred."""
    step, begun = "init_process_group", time.monotonic()
    try:
        rank = int(os.environ["RANK"])
        on = torch.device(device, rank) if device == "cuda" else torch.device(device)
        torch.set_num_threads(1)
        if device == "cuda":
            torch.cuda.set_device(on)
        dist.init_process_group("symm", timeout=timedelta(seconds=SECONDS), device_id=on if device == "cuda" else None)
        joined = time.monotonic() - begun
        step = "all_reduce"
        number = torch.tensor([rank + 1.0], device=on)
        dist.all_reduce(number)
        if number.item() != (expected := sum(range(1, dist.get_world_size() + 1))):
            raise ValueError(f"the sum is {number.item():g}, not {expected}")
        us = {size: _timed(torch.zeros(size // 4, device=on)) for size in SIZES}
        step = "destroy_process_group"
        dist.destroy_process_group()
    except Exception as error:
        send({"error": sentence(error), "step": step})
        # Skip the traceback, and skip the interpreter's exit handlers, which may wait for a peer.
        os._exit(1)
    send({"sum": number.item(), "joined_s": joined, "us": us})


def _timed(tensor: torch.Tensor) -> float:
    """Returns the time of a call in µs: the median on CPU, the mean on a GPU, which is awaited after all calls."""
    for _ in range(10):
        dist.all_reduce(tensor)
    if tensor.is_cuda:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            dist.all_reduce(tensor)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / CALLS * 1e6
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        dist.all_reduce(tensor)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


if __name__ == "__main__":
    main(sys.argv[1])

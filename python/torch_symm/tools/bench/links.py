"""Copies between GPUs: ``python -m torch_symm.tools.bench.links`` sends the rate of each pair."""

from __future__ import annotations

import os

from torch_symm.launch.messages import send
from torch_symm.launch.ranks import Ended, Program, run

#: Bytes of a copy, number of timed copies, and seconds for all.
BYTES, COPIES, SECONDS = 256 << 20, 10, 120.0


def measured() -> Ended:
    """Measures GB/s of a copy from each GPU to each other, and to itself, in a separate process."""
    return run([Program("torch_symm.tools.bench.links", [], dict(os.environ))], SECONDS)[0]


def main() -> None:
    """Sends the rate of each pair."""
    import torch

    count = torch.cuda.device_count()
    for one in range(count):
        source = torch.empty(BYTES, dtype=torch.uint8, device=f"cuda:{one}")
        for to in range(count):
            target = torch.empty(BYTES, dtype=torch.uint8, device=f"cuda:{to}")
            target.copy_(source)
            torch.cuda.synchronize(one)
            torch.cuda.synchronize(to)
            with torch.cuda.device(one):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                start.record()
                for _ in range(COPIES):
                    target.copy_(source, non_blocking=True)
                end.record()
                end.synchronize()
            send({"from": one, "to": to, "gb_per_s": round(BYTES * COPIES / start.elapsed_time(end) / 1e6, 1)})
            del target


if __name__ == "__main__":
    main()

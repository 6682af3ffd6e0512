"""A rank of the trial: ``python -m torch_symm.tools.doctor.rank DEVICE``; torch's variables give its number."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from torch_symm.launch.messages import send, sentence

#: Number of elements of the tensors: of a short call, and of one in several pieces.
LENGTHS = (4, 1 << 20)
#: Timeout of joining and of each call. It is shorter than the limit of the whole trial, so that the error comes from
#: the group.
SECONDS = 40.0


def main(device: str) -> None:
    """Sends ``ok``, or the ``error`` and the step in which it occurred."""
    step, begun = "init_process_group", time.monotonic()
    try:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        on = torch.device(device, rank) if device == "cuda" else torch.device(device)
        if device == "cuda":
            torch.cuda.set_device(on)
        dist.init_process_group("symm", timeout=timedelta(seconds=SECONDS), device_id=on if device == "cuda" else None)
        for length in LENGTHS:
            step = f"all_reduce of {length} float32"
            tensor = torch.arange(length, dtype=torch.float32, device=on) % 1000 * (rank + 1)
            dist.all_reduce(tensor)
            expected = torch.arange(length, dtype=torch.float32) % 1000 * (world * (world + 1) // 2)
            if not torch.equal(tensor.cpu(), expected):
                raise ValueError("the values of the result are wrong")
        step = "destroy_process_group"
        dist.destroy_process_group()
    except Exception as error:
        send({"error": sentence(error), "step": step})
        # Skip the traceback, and skip the interpreter's exit handlers, which may wait for a peer.
        os._exit(1)
    send({"ok": True, "seconds": round(time.monotonic() - begun, 3)})


if __name__ == "__main__":
    main(sys.argv[1])

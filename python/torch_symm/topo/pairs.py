"""Bandwidth between two GPUs, or two ranks on CPU; the program ``python -m torch_symm.topo.pairs`` copies on GPUs."""

from __future__ import annotations

import os
from typing import Any

from torch_symm.doctor.child import Child, run, send
from torch_symm.doctor.report import Section

#: Bytes of a copy, how many are timed, and seconds for all.
BYTES, COPIES, SECONDS = 256 << 20, 10, 120.0
CPU_BYTES = 16 << 20


def gpus() -> Section:
    """GB/s of a copy from each GPU to each, and the same on one: what the driver's copy engines reach."""
    (ended,) = run([Child("torch_symm.topo.pairs", [], dict(os.environ))], SECONDS)
    found = [message for message in ended.messages if "gb_per_s" in message]
    if not found:
        return Section("measured", {"error": ended.last_words()}, [f"not measured: the process {ended.last_words()}"])
    count = 1 + max(int(pair["from"]) for pair in found)
    rates = {(pair["from"], pair["to"]): pair["gb_per_s"] for pair in found}
    lines = ["copies, GB/s     " + "".join(f"{f'to {to}':>9}" for to in range(count))]
    for one in range(count):
        lines.append(f"from cuda:{one:<7}" + "".join(f"{rates.get((one, to), 0.0):>9.1f}" for to in range(count)))
    return Section("measured", {"pairs": found, "bytes": BYTES}, lines)


def ranks() -> Section:
    """GB/s of a message between two ranks of CPU tensors, and how long a short one takes."""
    from torch_symm.bench.perf import launch
    from torch_symm.bench.perf.request import Wanted

    sizes = (8, CPU_BYTES)
    rows = [Wanted("send_recv", "f32", "none", -1, size, 2) for size in sizes]
    short, long = [found.sides["symm"]["out_of_place"] for found in launch.measure(2, ["symm"], rows, 20, 5, 1, False)]
    rate = CPU_BYTES / long.median_us / 1e3
    found: dict[str, Any] = {"us_of_8_bytes": short.median_us, "gb_per_s": rate, "bytes": CPU_BYTES}
    line = f"two ranks: {rate:.2f} GB/s in messages of {CPU_BYTES >> 20} MiB, {short.median_us:.1f} µs for 8 bytes"
    return Section("measured", found, [line])


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

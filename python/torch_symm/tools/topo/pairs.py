"""Bandwidth between two GPUs, or between two ranks on CPU."""

from __future__ import annotations

from typing import Any

from torch_symm.tools.bench import links
from torch_symm.tools.doctor.report import Section

#: Size of a message in bytes.
CPU_BYTES = 16 << 20


def gpus() -> Section:
    """Measures GB/s of a copy from each GPU to each other, and to itself: the rate of the driver's copy engines."""
    ended = links.measured()
    found = [message for message in ended.messages if "gb_per_s" in message]
    if not found:
        return Section("measured", {"error": ended.last_words()}, [f"not measured: the process {ended.last_words()}"])
    count = 1 + max(int(pair["from"]) for pair in found)
    rates = {(pair["from"], pair["to"]): pair["gb_per_s"] for pair in found}
    lines = ["copies, GB/s     " + "".join(f"{f'to {to}':>9}" for to in range(count))]
    for one in range(count):
        lines.append(f"from cuda:{one:<7}" + "".join(f"{rates.get((one, to), 0.0):>9.1f}" for to in range(count)))
    return Section("measured", {"pairs": found, "bytes": links.BYTES}, lines)


def ranks() -> Section:
    """Measures GB/s of a message between two ranks of CPU tensors, and the time of a short one."""
    from torch_symm.tools.bench import launch
    from torch_symm.tools.bench.request import Wanted

    sizes = (8, CPU_BYTES)
    rows = [Wanted("send_recv", "f32", "none", -1, size, 2) for size in sizes]
    short, long = [found.sides["symm"]["out_of_place"] for found in launch.measure(2, ["symm"], rows, 20, 5, 1, False)]
    rate = CPU_BYTES / long.median_us / 1e3
    found: dict[str, Any] = {"us_of_8_bytes": short.median_us, "gb_per_s": rate, "bytes": CPU_BYTES}
    line = f"two ranks: {rate:.2f} GB/s in messages of {CPU_BYTES >> 20} MiB, {short.median_us:.1f} µs for 8 bytes"
    return Section("measured", found, [line])

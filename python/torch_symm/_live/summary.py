"""All calls of a process by collective and size, as ``SYMM_STATS_INTERVAL`` prints them when the process ends."""

from __future__ import annotations

from typing import Any

from torch_symm._repr import counted

from .table import aligned, shown_bytes

HEADINGS = ("collective", "size", "device", "calls", "total", "total ms", "mean µs", "longest µs", "GB/s")


def render(trace: dict[str, Any], rank: int) -> str:
    """Renders the table of the ``totals`` of a trace of rank ``rank``, sorted by total time.

    ``size`` is the upper bound of a class, a power of two. A call that failed or has not ended has no time, and neither
    has a call on a GPU, because the host does not learn when a kernel ends.
    """
    totals = trace["totals"]
    lines = sorted(totals["lines"], key=lambda line: (-line["ns"], -line["calls"], line["op"], line["size"]))
    calls = counted(sum(line["calls"] for line in lines), "call")
    seconds = (trace["written_ns"] - totals["since_ns"]) / 1e9
    head = f"all {calls} of rank {rank} (pid {trace['pid']}) on {trace['host']}, {seconds:.1f} s"
    return "\n".join([head, *aligned([HEADINGS, *map(_fields, lines)])])


def _fields(line: dict[str, Any]) -> tuple[str, ...]:
    calls, timed, ns = line["calls"], line["timed"], line["ns"]
    times = ("-", "-", "-")
    if timed:
        times = (f"{ns / 1e6:.1f}", f"{ns / timed / 1e3:.1f}", f"{line['longest_ns'] / 1e3:.1f}")
    # Sizes differ within a class: estimate the bytes of the timed calls from the mean of all calls.
    rate = f"{line['bytes'] / calls * timed / ns:.2f}" if ns and line["bytes"] else "-"
    amounts = (shown_bytes(line["size"]), line["device"], str(calls), shown_bytes(line["bytes"]))
    return (line["op"], *amounts, *times, rate)

"""Counters and records of this process's calls."""

from __future__ import annotations

import json
from typing import Any

from torch_symm._native import load


class Stats(dict[str, Any]):
    """Counts of calls on CUDA tensors by algorithm. Its text also has a table of this process's last calls."""

    def __str__(self) -> str:
        from torch_symm._live import table
        from torch_symm._trace import trace
        from torch_symm._trace.dump import parse

        text = table.render([parse(trace(), "this process")])
        counted = {name: value for name, value in self.items() if name != "inter_node" and value}
        parts = [text, f"CUDA calls by algorithm: {counted!r}" if counted else ""]
        parts.append(f"Between nodes: {self['inter_node']!r}" if self.get("inter_node") else "")
        return "\n".join(part for part in parts if part)


def stats() -> Stats:
    """Returns how many calls on CUDA tensors of this process each algorithm has run.

    Each operation that has run, such as ``"all_reduce"``, has a dict of its algorithms. It counts enqueued calls: a
    captured call once, not at each replay. Among the calls and replays that the devices have reached, ``"zero_copy"``
    counts those in which this rank loaded or stored symmetric memory of a peer; 0 before the first.

    ``"inter_node"`` is empty until a multi-node group has been joined. For each such group, by its name, it has this
    rank's traffic with other nodes, including CPU tensors, by path: ``"gloo rail 0"`` and ``"nccl rail 0"``
    for its rail, ``"gloo rank 3"`` and ``"nccl rank 3"`` for its messages with that rank of the default group, and
    ``"nccl all ranks"``. Each has ``calls``, ``transfers``, and in bytes ``sent`` and ``received``.

    ``print(torch_symm.stats())`` shows a table of the last 2000 calls of this process: their number, bytes and µs by
    collective and size (as nccl-tests counts it). To see waits for other ranks, which require the calls of all
    ranks, use ``SYMM_STATS_INTERVAL=seconds`` or ``torch-symm top``.

    Raises:
        ImportError: the native part cannot serve this torch.
    """
    counted: dict[str, Any] = json.loads(load()._stats())
    return Stats({"zero_copy": 0, "inter_node": {}} | counted)

"""What has been counted and kept of this process's calls."""

from __future__ import annotations

import json
from typing import Any

from torch_symm._native import load


class Stats(dict[str, Any]):
    """Calls on CUDA tensors by algorithm. Printed, it is a table of this process's last calls on any tensors, too."""

    def __str__(self) -> str:
        from torch_symm._live import table
        from torch_symm._trace import trace
        from torch_symm._trace.dump import parse

        text = table.render([parse(trace(), "this process")])
        counted = {name: value for name, value in self.items() if name != "between_hosts"}
        parts = [text, f"CUDA calls by algorithm: {counted!r}" if counted else ""]
        parts.append(f"Between hosts: {self['between_hosts']!r}" if "between_hosts" in self else "")
        return "\n".join(part for part in parts if part)


def stats() -> Stats:
    """Returns how many calls on CUDA tensors of this process each algorithm has served; empty before the first.

    Counts what was enqueued: a captured call once, not at each replay. ``"direct"`` counts the calls, replays included,
    in which this rank loaded or stored symmetric memory of a peer, as far as the devices have come.

    ``"between_hosts"`` is there once a group on several hosts has been joined: for the name of each such group, what
    this rank has exchanged with other hosts, CPU tensors included, by path: ``"gloo rail 0"`` and ``"nccl rail 0"``,
    its rail, ``"gloo rank 3"`` and ``"nccl rank 3"``, its messages with that rank of the default group, and ``"nccl all
    ranks"``. Each has ``calls``, ``transfers``, and in bytes ``sent`` and ``received``.

    ``print(torch_symm.stats())`` shows a table: of the last 2000 calls of this process by collective and size (as
    nccl-tests counts it) their number, bytes and µs. Waits for other ranks are found from the calls of all:
    ``SYMM_STATS=seconds``, ``torch-symm top``.

    Raises:
        ImportError: the native part cannot serve this torch.
    """
    counted: dict[str, Any] = json.loads(load()._stats())
    return Stats(counted)

"""What the native part has counted."""

from __future__ import annotations

import json
from typing import Any

from torch_symm._native import load


def stats() -> dict[str, Any]:
    """Returns how many calls on CUDA tensors of this process each algorithm has served; empty before the first.

    Counts what was enqueued: a captured call once, not at each replay. ``"direct"`` counts the calls, replays included,
    in which this rank loaded or stored symmetric memory of a peer, as far as the devices have come.

    ``"between_hosts"`` is there once a group on several hosts has been joined: for the name of each such group, what
    this rank has exchanged with other hosts, CPU tensors included, by path: ``"gloo rail 0"`` and ``"nccl rail 0"``,
    its rail, ``"gloo rank 3"`` and ``"nccl rank 3"``, its messages with that rank of the default group, and ``"nccl all
    ranks"``. Each has ``calls``, ``transfers``, and in bytes ``sent`` and ``received``.

    Raises:
        ImportError: the native part cannot serve this torch.
    """
    counted: dict[str, Any] = json.loads(load()._stats())
    return counted

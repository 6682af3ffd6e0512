"""Plain copies of the bytes that a rank receives in a collective, by copy engines, from peers' symmetric memory.

No rank waits for another one and nothing is added, so no collective can overlap better.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from .inputs import GpuCall, Setting


def _copies(peers: Mapping[int, torch.Tensor], trips: int, at: Setting) -> GpuCall:
    """Copies one share from each peer into its place in the output, ``trips`` times."""
    share = at.share * at.inputs.dtype.itemsize
    pairs = []
    start = at.rank * share
    for peer, theirs in peers.items():
        pairs.append((at.place.target[peer * share : (peer + 1) * share], theirs[start : start + share]))

    def run() -> None:
        for _ in range(trips):
            for mine, theirs in pairs:
                mine.copy_(theirs)

    return GpuCall(lambda: None, run, lambda _calls: None)


def builders(peers: Mapping[int, torch.Tensor]) -> dict[str, Callable[[Setting], GpuCall]]:
    """Returns the operations on ``peers``: the bytes of every other rank's ``source``."""
    trips = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}
    return {op: partial(_copies, peers, count) for op, count in trips.items()}

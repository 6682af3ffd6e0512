"""Results of ranks that report one after the other, as the decoder's and the fused products' do."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from torch_symm.launch.messages import reported
from torch_symm.launch.watch import StandsStill


def collect(results: Any, count: int, started: Sequence[Any], still_s: float, what: str) -> Iterator[Any]:
    """``count`` results of the ranks that were ``started``, each when it is there.

    Raises:
        torch.multiprocessing.ProcessRaisedException, ProcessExitedException: a rank failed.
        StandsStill: no result came for ``still_s`` seconds, or no more will come; ``what`` they are.
    """
    left, until = count, time.monotonic() + still_s

    def watched() -> None:
        if left and time.monotonic() > until:
            raise StandsStill(f"{left} {what} are missing")

    for message in reported(started, results, count, watched=watched):
        left, until = left - 1, time.monotonic() + still_s
        yield message

"""The targets: how many times faster than Gloo, 4 ranks on a 4-core machine, median over median in one run."""

from __future__ import annotations

KB, MB = 1 << 10, 1 << 20
RANKS = 4
PEER = "gloo"

# Per operation: up to 64 KB, 1 MB, 16 MB, 64 to 256 MB.
_BANDS = ((0, 64 * KB), (MB, MB), (16 * MB, 16 * MB), (64 * MB, 256 * MB))
_RATIOS: dict[str, tuple[float, ...]] = {
    "all_reduce": (50.0, 10.0, 4.0, 3.5),
    "all_gather": (50.0, 10.0, 4.0, 6.0),
    "reduce_scatter": (50.0, 12.0, 6.0, 7.0),
    "all_to_all": (50.0, 7.0, 2.8, 2.5),
    "broadcast": (12.0, 2.5, 2.5, 2.2),
    "send_recv": (8.0, 4.0, 3.0, 2.3),
    "barrier": (40.0,),
}
# Synchronous call through torch.distributed, one core per rank.
_LATENCY_US: dict[tuple[str, int], float] = {("all_reduce", 8): 15.0}


def ratio_target(op: str, size: int, world: int) -> float | None:
    """The least ratio peer/tested of this cell; None where no target is set."""
    if world != RANKS:
        return None
    for (low, high), ratio in zip(_BANDS, _RATIOS.get(op, ()), strict=False):
        if low <= size <= high:
            return ratio
    return None


def latency_target_us(op: str, size: int, world: int) -> float | None:
    """The longest median of this cell in microseconds; None where no target is set."""
    return _LATENCY_US.get((op, size)) if world == RANKS else None


def is_met(op: str, size: int, world: int, median_us: float, ratio: float | None) -> bool | None:
    """Whether every target of the cell holds; None where there is none or none can be judged without a peer."""
    verdicts = []
    wanted = ratio_target(op, size, world)
    if wanted is not None and ratio is not None:
        verdicts.append(ratio >= wanted)
    longest = latency_target_us(op, size, world)
    if longest is not None:
        verdicts.append(median_us <= longest)
    return all(verdicts) if verdicts else None

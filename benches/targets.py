"""``python benches/targets.py``: whether a run on CPU has reached this project's targets relative to Gloo.

    torch-symm bench all barrier -g 4 --sizes 8,1K,64K,1M,16M,64M,256M --against gloo --seconds 480 --json run.json
    python benches/targets.py run.json

A target is the ratio of Gloo's time to symm's, with 4 ranks on a node of 4 cores, median over median in one run.
"""

from __future__ import annotations

import sys
from pathlib import Path

from torch_symm.tools.bench.record import Found, read
from torch_symm.tools.bench.units import format_size

KB, MB = 1 << 10, 1 << 20
RANKS = 4
PEER = "gloo"

# Ranges of sizes, one for each ratio of an operation: up to 64 KB, 1 MB, 16 MB, 64 to 256 MB.
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
# Maximum median of a synchronous call through torch.distributed, with one core per rank.
_LATENCY_US: dict[tuple[str, int], float] = {("all_reduce", 8): 15.0}


def ratio_target(op: str, size: int, world: int) -> float | None:
    """The minimum ratio peer/tested of this cell; None if no target is set."""
    if world != RANKS:
        return None
    for (low, high), ratio in zip(_BANDS, _RATIOS.get(op, ()), strict=False):
        if low <= size <= high:
            return ratio
    return None


def latency_target_us(op: str, size: int, world: int) -> float | None:
    """The maximum median of this cell in microseconds; None if no target is set."""
    return _LATENCY_US.get((op, size)) if world == RANKS else None


def is_met(op: str, size: int, world: int, median_us: float, ratio: float | None) -> bool | None:
    """Whether every target of the cell holds; None if it has no target, or needs a peer to be judged."""
    verdicts = []
    wanted = ratio_target(op, size, world)
    if wanted is not None and ratio is not None:
        verdicts.append(ratio >= wanted)
    longest = latency_target_us(op, size, world)
    if longest is not None:
        verdicts.append(median_us <= longest)
    return all(verdicts) if verdicts else None


def verdicts(rows: list[Found]) -> list[tuple[str, bool]]:
    """Each cell that has a target, and whether it reached it; a ``?`` says that other processes were busy."""
    found = []
    for row in rows:
        wanted = row.wanted
        for placement in ("in_place", "out_of_place"):
            ours = row.sides.get("symm", {}).get(placement)
            target = ratio_target(wanted.op, wanted.size, wanted.world)
            if ours is None or target is None:
                continue
            ratio = row.ratio(PEER, placement)
            met = is_met(wanted.op, wanted.size, wanted.world, ours.median_us, ratio)
            if met is not None:
                said = f"{ratio:.1f} of {target:g}" if ratio else f"{ours.median_us:.1f} µs"
                place = f"{wanted.op} {wanted.dtype} {format_size(wanted.size)} {placement}"
                found.append((f"{place}: {said}{' ?' if row.disturbed else ''}", met))
            # Judges only the call that users make: in place if the operation has such a call.
            break
    return found


def main(paths: list[str]) -> int:
    """Prints the cells that missed their target; returns 1 if any did."""
    found = [verdict for path in paths for verdict in verdicts(read(Path(path))[0])]
    missed = [said for said, met in found if not met]
    print("\n".join([f"{len(found) - len(missed)} of {len(found)} targets met", *missed]))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

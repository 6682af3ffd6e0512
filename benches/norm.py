"""All-reduce, residual and RMSNorm on CPU tensors: one operator compared with separate steps on the same group.

    python benches/norm.py --ranks 2

The two alternate, round by round. The program prints, for each, the median over rounds of rank 0's mean time in µs,
and the time of the separate steps divided by the operator's time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch_symm.testing
from torch_symm.tools.command import count

HIDDEN, EPS = 4096, 1e-5
BATCHES = (1, 8, 64)
ROUNDS, CALLS = 11, 100

ops: Any = torch.ops.symm


def measure(rank: int, world: int) -> list[str]:
    """One line for each batch."""
    torch.set_num_threads(1)
    name = dist.group.WORLD.group_name
    lines = []
    for batch in BATCHES:
        given = [torch.randn(batch, HIDDEN).bfloat16() for _ in range(2)]
        own, residual = (tensor.clone() for tensor in given)
        weight = torch.ones(HIDDEN).bfloat16()

        def fused(own: torch.Tensor = own, residual: torch.Tensor = residual, weight: torch.Tensor = weight) -> None:
            ops.all_reduce_add_rms_norm_(own, residual, weight, EPS, name)

        def separate(own: torch.Tensor = own, residual: torch.Tensor = residual, weight: torch.Tensor = weight) -> None:
            dist.all_reduce(own)
            residual.add_(own)
            torch.nn.functional.rms_norm(residual, (HIDDEN,), weight, EPS)

        sides: list[Callable[[], None]] = [fused, separate]
        times: dict[str, list[float]] = {side.__name__: [] for side in sides}
        calls = max(1, CALLS // batch)
        with torch.inference_mode():
            for turn in range(ROUNDS):
                for side in sides if turn % 2 else reversed(sides):
                    dist.barrier()
                    begun = time.perf_counter()
                    for _ in range(calls):
                        side()
                    times[side.__name__].append((time.perf_counter() - begun) / calls * 1e6)
                    # Restore the tensors, because sums of sums grow.
                    own.copy_(given[0])
                    residual.copy_(given[1])
        one, other = (statistics.median(times[side.__name__]) for side in sides)
        lines.append(f"batch {batch}: {one:.1f} µs, separate steps {other:.1f} µs, {other / one:.2f} times as long")
    return lines


def main() -> None:
    """Runs the benchmark on ranks of this node."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=count, default=2)
    lines = torch_symm.testing.run_ranks(measure, parser.parse_args().ranks)[0]
    print("\n".join(lines))


if __name__ == "__main__":
    main()

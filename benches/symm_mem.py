"""Collectives on CPU tensors in symmetric memory, compared with ordinary tensors and Gloo.

    python benches/symm_mem.py --ranks 4 --sizes 64K,1M,16M,64M

Sides alternate, round by round. The program prints the median over calls of the slowest rank's time, in µs, with
float32 tensors. The size is that of the tensor of an all_reduce or a broadcast, of the output of an all_gather, or of
the input of a reduce_scatter or an all_to_all. With ``--written`` each rank writes to its tensors before each call, as
a program does, so that its core has them in its cache. Otherwise the call before decides which cache has them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch_symm.testing
from torch_symm.tools.bench.units import format_size, parse_size
from torch_symm.tools.command import count

OPS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]
ROUNDS = 9
#: The time that one side measures in one round, and the maximum number of calls.
ROUND_S = 0.25
MOST_CALLS = 200

Call = Callable[[], object]


def call_of(op: str, whole: torch.Tensor, other: torch.Tensor, group: dist.ProcessGroup) -> Call:
    """A call of ``op`` on tensors of the full size."""
    rank, world = group.rank(), group.size()
    part = other.chunk(world)[rank]
    calls: dict[str, Call] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
    }
    return calls[op]


def alternate(sides: dict[str, tuple[Call, Call]]) -> dict[str, float]:
    """Returns for each side the median over calls of the slowest rank's time in µs, without the first round.

    A side is a function that runs untimed before each call, and the call.
    """
    samples: dict[str, list[float]] = {name: [] for name in sides}
    counts = dict.fromkeys(sides, 3)
    order = list(sides)
    for turn in range(ROUNDS):
        for name in order if turn % 2 else reversed(order):
            before, call = sides[name]
            dist.barrier()
            call()
            own = []
            for _ in range(counts[name]):
                before()
                dist.barrier()
                begun = time.perf_counter()
                call()
                own.append((time.perf_counter() - begun) * 1e6)
            together = torch.tensor(own)
            dist.all_reduce(together, dist.ReduceOp.MAX)
            if turn > 0:
                samples[name] += together.tolist()
            else:
                counts[name] = max(3, min(MOST_CALLS, int(ROUND_S * 1e6 / together.median().item())))
    return {name: statistics.median(own) for name, own in samples.items()}


def measure(rank: int, world: int, sizes: list[int], ops: list[str], dtype: torch.dtype, written: bool) -> list[str]:
    """One line for each collective and size."""
    torch.set_num_threads(1)
    symm = dist.group.WORLD
    assert symm is not None
    gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=120))
    lines = []
    for size in sizes:
        count = size // dtype.itemsize // world * world
        private = [torch.zeros(count, dtype=dtype) for _ in range(2)]
        symmetric = [symm_mem.empty(count, dtype=dtype, device="cpu").zero_() for _ in range(2)]
        for tensor in symmetric:
            symm_mem.rendezvous(tensor, symm)
        for op in ops:

            def side(own: list[torch.Tensor], group: dist.ProcessGroup, op: str = op) -> tuple[Call, Call]:
                write = lambda: [tensor.fill_(1) for tensor in own]  # noqa: E731
                return (write if written else lambda: None), call_of(op, own[0], own[1], group)

            sides = {"symmetric": side(symmetric, symm), "ordinary": side(private, symm), "gloo": side(private, gloo)}
            found = alternate(sides)
            direct, staged, other = found["symmetric"], found["ordinary"], found["gloo"]
            lines.append(
                f"{op} {format_size(size)}: symmetric {direct:.1f}, ordinary {staged:.1f} ({staged / direct:.2f}×), "
                f"gloo {other:.1f} ({other / direct:.1f}×)"
            )
    return lines


def main() -> None:
    """Runs the benchmark on ranks of this machine."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=count, default=4)
    parser.add_argument("--sizes", default="64K,1M,16M,64M", help="comma-separated sizes (default: 64K,1M,16M,64M)")
    parser.add_argument("--ops", default=",".join(OPS), help=f"comma-separated collectives (default: {','.join(OPS)})")
    parser.add_argument("--dtype", default="float32", help="torch's name of the element type (default: float32)")
    parser.add_argument("--written", action="store_true", help="let each rank rewrite its tensors before each call")
    given = parser.parse_args()
    sizes = [parse_size(size) for size in given.sizes.split(",")]
    dtype = getattr(torch, given.dtype)
    found = torch_symm.testing.run_ranks(
        measure, given.ranks, sizes, given.ops.split(","), dtype, given.written, timeout=3600, group_timeout=120
    )
    print(
        f"{given.ranks} ranks, {given.dtype}{', tensors written anew' * given.written}, load {os.getloadavg()[0]:.1f}"
    )
    print("\n".join(found[0]))


if __name__ == "__main__":
    main()

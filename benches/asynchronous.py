"""Asynchronous calls on CPU tensors: their cost compared with a no-op backend, and how much of it computing hides.

    python benches/asynchronous.py --ranks 2,4 --sizes 8,64K,1M

Sides alternate, round by round. The program prints the median over calls of the slowest rank's time, in µs, and in
brackets the 10th percentile, which is more meaningful if other processes use the node.

- functional: `funcol.all_reduce`, waited for at once, as DTensor and torch.compile do, by symm, by a no-op backend
  (torch's fake backend), and by Gloo. Only two of its steps differ between backends: the call and the wait.
- synchronous: `dist.all_reduce` of the same size by symm.
- overlap: an all-reduce of 2 MB during a fixed amount of computing, then the wait for the work, or for its future, as
  DDP waits for a bucket; compared with only the computing and only the synchronous call. Computing by "work"
  needs a core; by "sleep" it needs none.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.testing._internal.distributed.fake_pg
import torch_symm.testing
from torch_symm.tools.bench.units import format_size, parse_size

BUCKET = 2 << 20
COMPUTING_US = 300.0
ROUNDS = 15

Call = Callable[[], object]


def functional(tensor: torch.Tensor, group: dist.ProcessGroup) -> Call:
    """Return an all-reduce into a new tensor, and a wait for it at once."""
    return lambda: funcol.wait_tensor(funcol.all_reduce(tensor, "sum", group))  # type: ignore[no-untyped-call]


def asleep(us: float) -> Call:
    """Return a sleep that takes ``us``, including the system's overhead."""
    added = []
    for _ in range(20):
        begun = time.perf_counter()
        time.sleep(us / 1e6)
        added.append(time.perf_counter() - begun - us / 1e6)
    rest = max(us / 1e6 - statistics.median(added), 0.0)
    return lambda: time.sleep(rest)


class Times(NamedTuple):
    """Times of a side's calls in µs."""

    median: float
    tenth: float

    def __str__(self) -> str:
        return f"{self.median:.1f} ({self.tenth:.1f})"

    def over(self, other: Times) -> str:
        """The ratio to ``other``."""
        return f"{self.median / other.median:.2f} ({self.tenth / other.tenth:.2f})×"


def alternate(sides: dict[str, tuple[Call, int]]) -> dict[str, Times]:
    """Returns the slowest rank's times of each side's call, over rounds with a given number of calls."""
    samples: dict[str, list[float]] = {name: [] for name in sides}
    order = list(sides)
    for turn in range(ROUNDS):
        for name in order if turn % 2 else reversed(order):
            call, calls = sides[name]
            dist.barrier()
            call()
            stamps = [time.perf_counter()]
            for _ in range(calls):
                call()
                stamps.append(time.perf_counter())
            if turn > 0:
                samples[name] += [(b - a) * 1e6 for a, b in pairwise(stamps)]
    found = {}
    for name, own in samples.items():
        together = torch.tensor(own)
        dist.all_reduce(together, dist.ReduceOp.MAX)
        found[name] = Times(statistics.median(together.tolist()), statistics.quantiles(together.tolist(), n=10)[0])
    return found


def work(us: float) -> Call:
    """A fixed amount of computing that takes ``us`` on an idle core, and longer if another thread takes the core."""
    tensor = torch.ones(4096)

    def compute(times: int) -> None:
        for _ in range(times):
            tensor.mul_(1.0)

    compute(1000)
    measured = []
    for _ in range(20):
        begun = time.perf_counter()
        compute(500)
        measured.append((time.perf_counter() - begun) / 500 * 1e6)
    times = max(1, round(us / statistics.median(measured)))
    return lambda: compute(times)


def overlapped(tensor: torch.Tensor, computing: Call, future: bool) -> Call:
    """Returns an all-reduce during ``computing``, and a wait for its work or its ``future``."""

    def call() -> None:
        pending = dist.all_reduce(tensor, async_op=True)
        assert pending is not None
        awaited = pending.get_future() if future else pending
        computing()
        awaited.wait()

    return call


def measure(rank: int, world: int, sizes: list[int], computing_us: float) -> list[str]:
    """One line for each size, and for each kind of computing."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    lines = []
    symm = dist.group.WORLD
    assert symm is not None
    nothing, gloo = (dist.new_group(backend=backend, timeout=timedelta(seconds=60)) for backend in ("fake", "gloo"))
    for size in sizes:
        tensor = torch.zeros(size // 4)
        calls = 200 if size < 1 << 20 else 60
        found = alternate(
            {
                "symm": (functional(tensor, symm), calls),
                "nothing": (functional(tensor, nothing), calls),
                "synchronous": (lambda tensor=tensor: dist.all_reduce(tensor), calls),
                "gloo": (functional(tensor, gloo), calls // 5),
            }
        )
        lines.append(
            f"functional {format_size(size)}: symm {found['symm']}, nothing {found['nothing']}, "
            f"{found['symm'].over(found['nothing'])}, synchronous {found['synchronous']}, "
            f"{found['symm'].over(found['synchronous'])}, gloo {found['gloo']}"
        )
    bucket = torch.zeros(BUCKET // 4)
    kinds: dict[str, Call] = {"work": work(computing_us), "sleep": asleep(computing_us)}
    for kind, computing in kinds.items():
        found = alternate(
            {
                "work": (overlapped(bucket, computing, future=False), 60),
                "future": (overlapped(bucket, computing, future=True), 60),
                "computing": (computing, 60),
                "call": (lambda: dist.all_reduce(bucket), 60),
            }
        )
        lines.append(
            f"overlap, {kind}: by work {found['work']}, by future {found['future']}, "
            f"computing alone {found['computing']}, call alone {found['call']}"
        )
    return lines


def main() -> None:
    """Runs the benchmark on ranks of this node."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", default="2,4", help="comma-separated numbers of ranks (default: 2,4)")
    parser.add_argument("--sizes", default="8,64K,1M", help="comma-separated sizes (default: 8,64K,1M)")
    parser.add_argument(
        "--computing", type=float, default=COMPUTING_US, help="µs of computing while a bucket moves (default: 300)"
    )
    given = parser.parse_args()
    sizes = [parse_size(size) for size in given.sizes.split(",")]
    for ranks in map(int, given.ranks.split(",")):
        lines = torch_symm.testing.run_ranks(measure, ranks, sizes, given.computing)[0]
        print(f"{ranks} ranks, load {os.getloadavg()[0]:.1f}", *lines, sep="\n", flush=True)


if __name__ == "__main__":
    main()

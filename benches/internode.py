"""symm on two nodes compared with flat Gloo, in one run: ``make bench-internode``.

The nodes are namespaces of this machine, two ranks each, with a link between them that ``tc`` limits to ``--rate``
(``tests/internode/netns.py``; needs root, ``ip``, ``tc`` and ``unshare``). The two sides alternate, round by round;
results are compared with the expected ones first. The program prints the median over rounds of the slowest rank's mean
time, in µs, and Gloo's time divided by symm's. A size is the size of a rank's largest tensor.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "internode"))

import netns

OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv")
SIZES = ("8", "64K", "1M", "16M", "64M")
#: Number of ranks on each node.
LAYOUT = (2, 2)
WORLD = sum(LAYOUT)
ROUNDS = 7


def call_of(op: str, count: int, rank: int, group: Any) -> tuple[Callable[[], None], Callable[[], bool]]:
    """One call of ``op`` with ``count`` elements, and whether its result is right. Values repeat after 7 elements."""
    import torch
    import torch.distributed as dist

    pattern = torch.arange(count) % 7
    own = (pattern + rank).float()
    part = max(count // WORLD, 1)
    whole = torch.empty(part * WORLD)
    if op == "all_reduce":
        tensor = own.clone()
        return lambda: dist.all_reduce(tensor, group=group), lambda: bool((tensor == WORLD * pattern + 6).all())
    if op == "broadcast":
        tensor = own.clone()
        return lambda: dist.broadcast(tensor, 0, group=group), lambda: torch.equal(tensor, pattern.float())
    if op == "all_gather":
        mine = torch.full((part,), float(rank))
        right = torch.arange(WORLD).repeat_interleave(part).float()
        return lambda: dist.all_gather_into_tensor(whole, mine, group=group), lambda: torch.equal(whole, right)
    if op == "reduce_scatter":
        mine, parts = torch.empty(part), torch.arange(WORLD).repeat_interleave(part).float()
        return (
            lambda: dist.reduce_scatter_tensor(mine, parts, group=group),
            lambda: bool((mine == WORLD * rank).all()),
        )
    if op == "all_to_all":
        sent = torch.full((part * WORLD,), float(rank))
        right = torch.arange(WORLD).repeat_interleave(part).float()
        return lambda: dist.all_to_all_single(whole, sent, group=group), lambda: torch.equal(whole, right)
    # A ping-pong between the first ranks of both nodes; the other ranks are idle.
    tensor, peers = own.clone(), (0, LAYOUT[0])

    def ping() -> None:
        if rank in peers:
            there, back = (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send)
            there(tensor, peers[rank == 0], group=group)
            back(tensor, peers[rank == 0], group=group)

    return ping, lambda: rank not in peers or torch.equal(tensor, pattern.float())


def measure(rank: int, _layout: Sequence[int], place: Path) -> list[dict[str, Any]]:
    """Results of one rank: for each cell and side its mean time of each round, in µs."""
    import torch
    import torch.distributed as dist
    from torch_symm.tools.bench.units import parse_size

    torch.set_num_threads(1)
    dist.init_process_group(
        "cpu:symm",
        init_method="tcp://10.77.0.1:29518",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=120),
    )
    sides = {"symm": dist.group.WORLD, "gloo": dist.new_group(backend="gloo", timeout=timedelta(seconds=120))}
    cells = []
    for op, size in json.loads((place / "cells").read_text()):
        count = max(parse_size(size) // 4, 1)
        calls = {}
        for side, group in sides.items():
            call, right = call_of(op, count, rank, group)
            call()
            if not right():
                raise AssertionError(f"{op} of {size} on {side} is wrong")
            calls[side] = call
        times: dict[str, list[float]] = {side: [] for side in sides}
        repeats = max(1, min(20, (2 << 20) // parse_size(size)))
        for _ in range(ROUNDS):
            for side, call in calls.items():
                dist.barrier()
                start = time.perf_counter()
                for _ in range(repeats):
                    call()
                times[side].append((time.perf_counter() - start) / repeats * 1e6)
        cells.append({"op": op, "size": size, **times})
        if rank == 0:
            (place / "progress").write_text(f"{op} {size}")
    dist.barrier()
    dist.destroy_process_group()
    return cells


def finished(nodes: netns.Nodes) -> list[Any]:
    """Returns the results of all ranks once they have finished; prints progress meanwhile."""
    said = ""
    while any(init.poll() is None for init in nodes.inits):
        progress = nodes.place / "progress"
        if progress.exists() and (now := progress.read_text()) != said:
            said = now
            print(f"measured {said}", file=sys.stderr, flush=True)
        time.sleep(0.2)
    if any(init.returncode for init in nodes.inits):
        sys.exit(nodes.logs())
    return nodes.results(timeout=1)


def main() -> None:
    """Runs the ranks, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--rate", default="1gbit", help="bandwidth of each node's link, in tc's notation; 0: unlimited")
    parser.add_argument("--json", help="file for all times")
    arguments = parser.parse_args()
    if why_not := netns.lacking():
        sys.exit(f"there can be no nodes here: {why_not}")
    ops, sizes = arguments.ops.split(","), arguments.sizes.split(",")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "cells").write_text(json.dumps([(op, size) for op in ops for size in sizes]))
        nodes = netns.Nodes(place, LAYOUT)
        try:
            nodes.connect()
            if arguments.rate != "0":
                nodes.limit(arguments.rate)
            os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parent)
            nodes.start("internode:measure")
            found = finished(nodes)
        finally:
            nodes.end()
    print(f"| symm / Gloo, µs | {' | '.join(sizes)} |\n|---|{'---|' * len(sizes)}")
    cells = iter(zip(*found, strict=True))
    for op in ops:
        row = []
        for _, ranks in zip(sizes, cells, strict=False):
            symm, gloo = (
                statistics.median(max(times) for times in zip(*(rank[side] for rank in ranks), strict=True))
                for side in ("symm", "gloo")
            )
            row.append(f"{symm:.0f} / {gloo:.0f} ({gloo / symm:.2f}×)")
        print(f"| {op} | {' | '.join(row)} |", flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found))


if __name__ == "__main__":
    main()

"""``python benches/first_call.py``: how long a job takes until its first collectives have finished.

Each start uses new processes that have imported torch and made a context on their GPU. They start together; then each
takes three steps:

1. ``init``: ``dist.init_process_group`` through ``tcp://``;
2. ``first``: an all_reduce of 64 KB, until the device is done: the set-up of the group and of its first kernel;
3. ``second``: an all_gather, until the device is done: a kernel of another kind.

The time of a step is the slowest rank's time; a figure is the median over starts. The kinds of start take turns.
``symm cold`` begins with an empty cache of compiled kernels, ``symm warm`` with one that an earlier start has filled.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch
import torch.distributed as dist
from gpu_shared import FAILURES, begin, ranks, write_json, write_table
from torch_symm.launch import ranks as launched
from torch_symm.launch.messages import POLL_S
from torch_symm.launch.watch import StalledError
from torch_symm.tools.bench.gpu.contenders import GROUP_TIMEOUT
from torch_symm.tools.command import count

STEPS = ("init", "first", "second")
ELEMENTS = 16 << 10
START_LIMIT_S = 150.0
CACHE = "SYMM_CACHE_DIR"
KINDS = {"cuda": ("symm cold", "symm warm", "nccl"), "cpu": ("symm cold", "symm warm", "gloo")}


@dataclass(frozen=True)
class FirstCall:
    """Seconds of one kind of start: the median of each step, and the seconds of each step in every start."""

    kind: str
    init_s: float
    first_s: float
    second_s: float
    starts: list[list[float]]


def enter(
    rank: int, world: int, backend: str, device_type: str, address: str, line: Barrier, spent: torch.Tensor
) -> None:
    """Entry point of a rank process; writes the seconds of its steps into ``spent[rank]``."""
    torch.set_num_threads(1)
    on_gpu = device_type == "cuda"
    device = torch.device(f"cuda:{rank}" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    tensor = torch.ones(ELEMENTS, device=device)
    gathered = torch.zeros(ELEMENTS * world, device=device)

    def settle() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    settle()
    line.wait(START_LIMIT_S)
    stamps = [time.perf_counter()]
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=world, timeout=GROUP_TIMEOUT)
    stamps.append(time.perf_counter())
    dist.all_reduce(tensor)
    settle()
    stamps.append(time.perf_counter())
    dist.all_gather_into_tensor(gathered, tensor)
    settle()
    stamps.append(time.perf_counter())
    if not bool((gathered == world).all()):
        raise AssertionError(f"{backend}: rank {rank} got sums from {gathered.min()} to {gathered.max()}, not {world}")
    spent[rank] = torch.tensor([after - before for before, after in pairwise(stamps)])
    # No rank leaves while others still need the store that rank 0 holds.
    line.wait(START_LIMIT_S)
    with suppress(RuntimeError):
        dist.destroy_process_group()


def start(world: int, backend: str, device_type: str) -> list[float]:
    """Returns the slowest rank's seconds of each step in one start.

    Raises:
        torch.multiprocessing.ProcessRaisedException, ProcessExitedException: a rank failed.
        StalledError: the start took longer than 150 s.
    """
    spent = torch.zeros(world, len(STEPS), dtype=torch.float64).share_memory_()  # type: ignore[no-untyped-call]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    given = (world, backend, device_type, address, launched.barrier(world), spent)
    until = time.monotonic() + START_LIMIT_S
    with launched.started(enter, given, world) as started:
        while not started.join(timeout=POLL_S):
            if time.monotonic() > until:
                raise StalledError(f"a start with {backend} did not end within {START_LIMIT_S:.0f} s")
    slowest: list[float] = spent.max(dim=0).values.tolist()
    return slowest


def measure(world: int, device_type: str, kinds: Sequence[str], starts: int) -> Iterator[tuple[str, list[float] | str]]:
    """Yields the seconds of ``starts`` starts of each kind, in turn; for a kind that fails, the reason once."""
    left = list(kinds)
    with tempfile.TemporaryDirectory(prefix="torch-symm-first-call-") as folder:
        filled = Path(folder) / "filled"
        if "symm warm" in kinds:
            with launched.environment({CACHE: str(filled)}), suppress(*FAILURES):  # later starts report the error
                start(world, "symm", device_type)
        for number in range(starts):
            for kind in list(left):
                with launched.environment(
                    {CACHE: str(filled if kind == "symm warm" else Path(folder) / f"empty-{number}")}
                ):
                    try:
                        yield kind, start(world, kind.split()[0], device_type)
                    except FAILURES as error:
                        left.remove(kind)
                        yield kind, str(error).strip()


def summarize(kind: str, starts: list[list[float]]) -> FirstCall:
    """The medians of a kind of start."""
    init_s, first_s, second_s = (statistics.median(step) for step in zip(*starts, strict=True))
    return FirstCall(kind, init_s, first_s, second_s, starts)


def main(arguments: Sequence[str]) -> int:
    """Measures; returns 0 if every start succeeded, otherwise 1, with the results so far."""
    parser = argparse.ArgumentParser(
        prog="python benches/first_call.py",
        description="Measures the time from the start of a job until its first collectives are complete.",
    )
    parser.add_argument("--ranks", type=count, help="number of GPUs (default: all, at most 8)")
    parser.add_argument("--starts", type=count, default=3, help="number of starts of each kind (default: 3)")
    parser.add_argument("--kinds", help="comma-separated, of: " + ", ".join(KINDS["cuda"]))
    parser.add_argument("--json", type=Path, default=Path("out/bench-first-call.json"), help="file for all figures")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: test the program without GPUs, against Gloo"
    )
    given = parser.parse_args(arguments)
    world = ranks(parser, given.ranks, given.device)
    kinds = given.kinds.split(",") if given.kinds else list(KINDS[given.device])
    unknown = [kind for kind in kinds if kind not in KINDS[given.device]]
    if unknown or given.starts < 1:
        parser.error(
            f"no {unknown[0]!r}; there are {', '.join(KINDS[given.device])}" if unknown else "--starts: 1 at least"
        )
    here, gpus = begin(world, given.device, {})
    found: dict[str, list[list[float]]] = {}
    failures: dict[str, str] = {}
    try:
        for kind, spent in measure(world, given.device, kinds, given.starts):
            if isinstance(spent, str):
                failures[kind] = spent
                continue
            found.setdefault(kind, []).append(spent)
            print(
                f"{kind}: " + ", ".join(f"{step} {s:.3f} s" for step, s in zip(STEPS, spent, strict=True)), flush=True
            )
    except KeyboardInterrupt:
        failures["run"] = "interrupted"
    figures = [summarize(kind, starts) for kind, starts in found.items()]
    lines = [[f.kind, *(f"{s:.3f}" for s in (f.init_s, f.first_s, f.second_s)), str(len(f.starts))] for f in figures]
    write_table(f"seconds until done, {world} ranks", ["", *STEPS, "starts"], lines, sys.stdout)
    written = {"machine": asdict(here), "gpus": asdict(gpus), "arguments": list(arguments), "world": world}
    write_json(given.json, {**written, "figures": [asdict(figure) for figure in figures], "failures": failures})
    print(f"written to {given.json}", flush=True)
    for kind, failure in failures.items():
        print(f"{kind} failed: {failure}", file=sys.stderr, flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

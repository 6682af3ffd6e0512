"""Compares only the core with MPI, in one run: ``make bench-mpi``.

It runs 4 ranks; the make target installs Intel MPI's runtime and mpi4py into ``VENV``. The two sides alternate,
operation by operation, for a number of rounds. The program prints medians over rounds in µs, and MPI's time divided by
the core's time. Both sides measure in the same way (``benches/core.rs``): blocks of back-to-back calls between
barriers, the slowest rank's mean of each block, the median over blocks. MPI works on NumPy buffers of ordinary pages,
like torch's tensors. By default NumPy requests huge pages, which save MPI up to a third of the time from 16 MB on.
mpi4py adds about 0.3 µs per call.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

OPS = ("barrier", "broadcast", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
SIZES = (8, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20)


def rank_main(op: str, sizes: list[int]) -> None:
    """One MPI rank: times ``op`` at each size; rank 0 prints one line like that of the core's benchmark."""
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank, n = world.Get_rank(), world.Get_size()
    row = []
    for size in sizes[:1] if op == "barrier" else sizes:
        size = max(size, 4 * n)
        count = size // 4 // n * n
        given, out = np.ones(count, np.float32), np.zeros(count, np.float32)
        piece = slice(0, count // n)

        def ping_pong(given=given, out=out) -> None:
            if rank == 0:
                world.Send(given, 1)
                world.Recv(out, 1)
            elif rank == 1:
                world.Recv(out, 0)
                world.Send(given, 0)

        calls: dict[str, Callable[[], None]] = {
            "barrier": world.Barrier,
            "broadcast": lambda given=given: world.Bcast(given, 0),
            "all_reduce": lambda given=given, out=out: world.Allreduce(given, out),
            "all_gather": lambda given=given, out=out, piece=piece: world.Allgather(given[piece], out),
            "reduce_scatter": lambda given=given, out=out, piece=piece: world.Reduce_scatter_block(given, out[piece]),
            "all_to_all": lambda given=given, out=out: world.Alltoall(given, out),
            "send_recv": ping_pong,
        }
        once = calls[op]
        once()
        if op == "all_reduce":
            assert (out == n).all()
        repeat = min(max(200_000_000 // (size + 100_000), 1), 500)
        blocks, begin, enough = [], time.perf_counter(), False
        while not enough:
            world.Barrier()
            start = time.perf_counter()
            for _ in range(repeat):
                once()
            took = (time.perf_counter() - start) * 1e6 / repeat / (2 if op == "send_recv" else 1)
            blocks.append(world.allreduce(took, MPI.MAX))
            enough = world.bcast(len(blocks) >= 5 and time.perf_counter() - begin > 0.6)
        row.append(statistics.median(blocks))
    if rank == 0:
        print(op, *(f"{value:.2f}" for value in row), flush=True)


def figures(command: list[str], op: str) -> list[float]:
    """Runs one side; returns the numbers of its line for ``op``."""
    environment = os.environ | {"NUMPY_MADVISE_HUGEPAGE": "0", "I_MPI_FABRICS": "shm"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300, env=environment)
    line = next(line for line in done.stdout.splitlines() if line.split()[:1] == [op])
    return [float(word) for word in line.split()[1:]]


def main() -> None:
    """Alternates the sides and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--rank-main", metavar="OP", help=argparse.SUPPRESS)
    given = parser.parse_args()
    sizes = [int(size) for size in given.sizes.split(",")]
    if given.rank_main:
        return rank_main(given.rank_main, sizes)
    # mpiexec is in the directory of this interpreter.
    mpiexec = str(Path(sys.executable).parent / "mpiexec")
    print(f"{'operation':<16}{'bytes':>12}{'core µs':>12}{'MPI µs':>12}{'MPI / core':>12}", flush=True)
    for op in given.ops.split(","):
        core_runs, mpi_runs = [], []
        for _ in range(given.rounds):
            cargo = ["cargo", "bench", "--quiet", "--bench", "core", "--", str(given.ranks), op, given.sizes]
            core_runs.append(figures(cargo, op))
            script = [sys.executable, __file__, "--rank-main", op, "--sizes", given.sizes]
            mpi_runs.append(figures([mpiexec, "-n", str(given.ranks), *script], op))
        for size, core, mpi in zip(sizes, zip(*core_runs, strict=True), zip(*mpi_runs, strict=True), strict=False):
            ours, theirs = statistics.median(core), statistics.median(mpi)
            print(f"{op:<16}{size:>12}{ours:>12.1f}{theirs:>12.1f}{theirs / ours:>12.2f}", flush=True)


if __name__ == "__main__":
    main()

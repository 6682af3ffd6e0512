"""``python benches/mpi_torch.py``: the rows of ``torch-symm bench`` on CPU tensors, and Intel MPI in the same rows.

It takes the options of ``torch-symm bench``. MPI runs through mpi4py in separate processes, which mpiexec starts.

Each row is measured as on the other sides: ``-w`` untimed calls, a barrier, and ``-n`` timed calls. The time of a call
is the slowest rank's time. Then ``-c`` calls are checked with exact values. The buffers are NumPy's.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException
from torch_symm.launch.watch import StalledError
from torch_symm.tools.bench import columns, command, launch, machine
from torch_symm.tools.bench.ops import DTYPES, OPS, Shape
from torch_symm.tools.bench.pattern import WrongResult, check_parts, pieces
from torch_symm.tools.bench.record import Figure, Found, quantile
from torch_symm.tools.bench.request import REDUCING, Wanted
from torch_symm.tools.bench.units import format_size

#: Packages that must be installed.
NEEDS = "pip install impi-rt mpi4py"
#: MPI's names of types and reductions, by the names of this package.
TYPES = {"f64": "DOUBLE", "f32": "FLOAT", "i32": "INT32_T", "i64": "INT64_T", "i8": "INT8_T", "u8": "UINT8_T"}
REDOPS = {"sum": "SUM", "prod": "PROD", "min": "MIN", "max": "MAX"}
#: The argument with which mpiexec starts a rank.
RANK = "--mpi-rank"
_OUT, _IN = "out_of_place", "in_place"


def missing() -> str | None:
    """Names missing packages and how to install them; ``None`` if nothing is missing."""
    lacking = [] if importlib.util.find_spec("mpi4py") else ["mpi4py"]
    lacking += [] if _mpiexec() else ["mpiexec"]
    return f"needs {' and '.join(lacking)}, which is not installed: {NEEDS}" if lacking else None


def _mpiexec() -> str | None:
    """Returns the path of mpiexec: next to this interpreter, where pip installs it, or in ``PATH``."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def unmeasured(wanted: Wanted) -> str | None:
    """Returns why MPI cannot run this row; ``None`` if it can."""
    if wanted.dtype not in TYPES:
        return f"MPI has no type for {wanted.dtype}"
    if wanted.op in REDUCING and wanted.redop not in REDOPS:
        return f"MPI has no reduction {wanted.redop}"
    return None


def measure(
    world: int, rows: Sequence[Wanted], calls: int, warmup: int, checks: int, limit_s: float
) -> dict[Wanted, dict[str, Figure]]:
    """Returns the figures of ``rows``, by placement.

    Raises:
        StalledError: a row took longer than ``limit_s``; all processes have been ended.
        RuntimeError: MPI's processes failed; the text has their last words.
    """
    task = {"rows": [asdict(wanted) for wanted in rows], "calls": calls, "warmup": warmup, "checks": checks}
    # One node; NumPy's buffers use ordinary pages, like torch's.
    environment = {**os.environ, "I_MPI_FABRICS": "shm", "NUMPY_MADVISE_HUGEPAGE": "0", "OMP_NUM_THREADS": "1"}
    command = [_mpiexec() or "mpiexec", "-n", str(world), sys.executable, __file__, RANK]
    found: dict[Wanted, dict[str, Figure]] = {}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        words: list[str] = []
        watcher = _Deadline(process, limit_s)
        assert process.stdin is not None and process.stdout is not None
        try:
            # The process may have ended already.
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps(task) + "\n")
                process.stdin.close()
            for line in process.stdout:
                watcher.extend()
                if line.startswith("row "):
                    placed = json.loads(line[4:])
                    found[rows[len(found)]] = {place: Figure(**figure) for place, figure in placed.items()}
                else:
                    words.append(line.strip())
        finally:
            late = watcher.end()
    if late:
        wanted = rows[len(found)]
        raise StalledError(
            f"mpi, {wanted.op} {wanted.dtype} {format_size(wanted.size)}: nothing for {limit_s:g} s (--limit)"
        )
    if process.returncode or len(found) < len(rows):
        raise RuntimeError(f"mpi ended with status {process.returncode}: {' '.join(words[-5:])}")
    return found


class _Deadline:
    """Kills a process, and with mpiexec its ranks, if it prints nothing for ``seconds``."""

    def __init__(self, process: subprocess.Popen[str], seconds: float) -> None:
        self._process, self._seconds = process, seconds
        self._until, self._over, self._late = time.monotonic() + seconds + 60.0, threading.Event(), False
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def extend(self) -> None:
        """Notes that the process has printed something."""
        self._until = time.monotonic() + self._seconds

    def end(self) -> bool:
        """Stops watching and kills the process if it still runs. Returns true if the deadline had expired before."""
        self._over.set()
        self._thread.join()
        self._kill()
        return self._late

    def _watch(self) -> None:
        while not self._over.wait(0.2):
            if time.monotonic() > self._until:
                self._late = True
                self._kill()
                return

    def _kill(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(5.0)
            except subprocess.TimeoutExpired:
                self._process.kill()


@dataclass(frozen=True)
class _Calls:
    """A row on this rank: how to reset it, how to call it, and how to check the result."""

    reset: Callable[[], object]
    call: Callable[[], object]
    check: Callable[[], object]


def rank_main() -> None:
    """Entry point of an MPI rank: rank 0 reads the task, and prints a line for each row."""
    from mpi4py import MPI  # type: ignore[import-not-found, unused-ignore]

    torch.set_num_threads(1)
    world = MPI.COMM_WORLD
    task = world.bcast(json.loads(sys.stdin.readline()) if world.rank == 0 else None)
    for row in task["rows"]:
        placed = _placements(MPI, Wanted(**row))
        found = {place: _figure(MPI, Wanted(**row), made, task) for place, made in placed.items()}
        if world.rank == 0:
            print("row " + json.dumps(found), flush=True)


def _figure(mpi: Any, wanted: Wanted, made: _Calls, task: dict[str, Any]) -> dict[str, Any]:
    world, now = mpi.COMM_WORLD, time.perf_counter
    made.reset()
    for _ in range(task["warmup"]):
        made.call()
    mine = []
    world.Barrier()
    for _ in range(task["calls"]):
        start = now()
        made.call()
        mine.append((now() - start) * 1e6 / OPS[wanted.op].messages_per_call)
    wrong = 0
    for _ in range(task["checks"]):
        made.reset()
        world.Barrier()
        made.call()
        try:
            made.check()
        except WrongResult as error:
            wrong += error.count
    wrong = world.allreduce(wrong)
    slowest = sorted(max(each) for each in zip(*world.allgather(mine), strict=True))
    figure = Figure(
        median_us=statistics.median(slowest),
        mean_us=sum(slowest) / len(slowest),
        p99_us=quantile(slowest, 0.99),
        min_us=slowest[0],
        iterations=len(slowest),
        wrong=wrong if task["checks"] else None,
    )
    return asdict(figure)


def _placements(mpi: Any, wanted: Wanted) -> dict[str, _Calls]:
    """Returns the calls of a row: out of place and in place, where MPI has these."""
    world, dtype = mpi.COMM_WORLD, DTYPES[wanted.dtype]
    rank, root = world.rank, max(0, wanted.root)
    count = wanted.size // dtype.itemsize
    share, redop = count // wanted.world, "sum" if wanted.redop == "none" else wanted.redop
    shape = Shape(rank, wanted.world, dtype, count, redop, root)
    everyone = range(wanted.world)
    op, kind = getattr(mpi, REDOPS[redop]), getattr(mpi, TYPES[wanted.dtype])
    given, out = torch.zeros(count, dtype=dtype), torch.zeros(count, dtype=dtype)

    def of(tensor: torch.Tensor) -> list[Any]:
        return [tensor.numpy(), kind]

    whole, part = of(given), of(given[:share])
    result, piece = of(out), of(out[:share])
    total, own = shape.pattern(everyone, 0, count), shape.pattern([rank], 0, count)
    parts = [shape.pattern([other], 0, share) for other in everyone]
    at_root = rank == root

    def refill() -> None:
        own.fill(given)
        out.fill_(-1 if dtype.is_floating_point else 1)

    def checked(patterns: Any, tensor: torch.Tensor) -> Callable[[], object]:
        return lambda: check_parts(patterns, pieces(tensor, share), wanted.op)

    def ping_pong() -> None:
        if rank == 0:
            world.Send(whole, 1)
            world.Recv(result, 1)
        elif rank == 1:
            world.Recv(result, 0)
            world.Send(whole, 0)

    scattered = shape.pattern([root], rank * share, share)
    crossed = [shape.pattern([other], rank * share, share) for other in everyone]
    reduced = shape.pattern(everyone, rank * share, share)
    other = shape.pattern([1 - rank], 0, count) if rank < 2 else None
    calls: dict[str, dict[str, _Calls]] = {
        "all_reduce": {
            _OUT: _Calls(refill, lambda: world.Allreduce(whole, result, op), lambda: total.check(out, "mpi")),
            _IN: _Calls(refill, lambda: world.Allreduce(mpi.IN_PLACE, whole, op), lambda: total.check(given, "mpi")),
        },
        "broadcast": {
            _IN: _Calls(
                refill,
                lambda: world.Bcast(whole, root),
                lambda: shape.pattern([root], 0, count).check(given, "mpi"),
            )
        },
        "reduce": {
            _OUT: _Calls(
                refill,
                lambda: world.Reduce(whole, result if at_root else None, op, root),
                lambda: total.check(out, "mpi") if at_root else None,
            )
        },
        "all_gather": {_OUT: _Calls(refill, lambda: world.Allgather(part, result), checked(parts, out))},
        "gather": {
            _OUT: _Calls(
                refill,
                lambda: world.Gather(part, result if at_root else None, root),
                checked(parts, out) if at_root else lambda: None,
            )
        },
        "scatter": {
            _OUT: _Calls(
                refill,
                lambda: world.Scatter(whole if at_root else None, piece, root),
                lambda: scattered.check(out[:share], "mpi"),
            )
        },
        "reduce_scatter": {
            _OUT: _Calls(
                refill,
                lambda: world.Reduce_scatter_block(whole, piece, op),
                lambda: reduced.check(out[:share], "mpi"),
            )
        },
        "all_to_all": {_OUT: _Calls(refill, lambda: world.Alltoall(whole, result), checked(crossed, out))},
        "send_recv": {_OUT: _Calls(refill, ping_pong, lambda: other.check(out, "mpi") if other else None)},
    }
    return calls[wanted.op]


def main(arguments: Sequence[str]) -> int:
    """Measures and prints row after row; returns 1 if a result was wrong or a rank failed."""
    parser = command.parser()
    given = parser.parse([*arguments, "--device", "cpu"])
    if lacking := missing():
        parser.error(lacking)
    plan = command.plan(parser, given)
    calls = (given.iters, given.warmup_iters, given.check)
    rows: list[Found] = []
    print("\n".join(f"# {line}" for line in command.heading(plan, given, machine.describe())), flush=True)
    try:
        by_mpi = measure(plan.world, [row for row in plan.rows if not unmeasured(row)], *calls, given.limit)
        for found in launch.measure(plan.world, [given.backend], plan.rows, *calls, False, given.limit):
            reason = unmeasured(found.wanted)
            notes = {**found.notes, **({"mpi": reason} if reason else {})}
            row = replace(found, sides={**found.sides, "mpi": by_mpi.get(found.wanted, {})}, notes=notes)
            opening = columns.opening(row.wanted.op, True) if not rows or rows[-1].wanted.op != row.wanted.op else []
            print("\n".join([*opening, *columns.lines(row, True)]), flush=True)
            rows.append(row)
    except (ProcessRaisedException, ProcessExitedException, RuntimeError) as error:
        print(f"failed after {len(rows)} of {len(plan.rows)} rows: {str(error).strip()}", file=sys.stderr)
        return 1
    print("\n".join(columns.closing(rows, given.check > 0)), flush=True)
    return int(any(row.wrong for row in rows))


if __name__ == "__main__":
    if sys.argv[1:] == [RANK]:
        rank_main()
    else:
        sys.exit(main(sys.argv[1:]))

"""Times torch's own distributed tests on ranks that start anew, as torch's harness starts them, and on warm ranks.

    python benches/testing.py [--tests NAME,NAME...] [--repeats N]

Both classes run the same tests of ``distributed_test.py`` on Gloo with 4 CPU ranks, in turns, in one process. Prints a
table in Markdown: seconds a case (median), and both verdicts. Exits with 1 if verdicts differ.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import unittest
from typing import Any

os.environ.update(BACKEND="gloo", WORLD_SIZE="4", INIT_METHOD="file://", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp(prefix="symm-bench-"))

from torch.testing._internal.distributed import distributed_test
from torch_symm.testing import WarmMultiProcessTestCase

#: Collectives, groups, messages, objects, a skip in the ranks, a failure that is expected, a whole program.
TESTS = (
    *("test_all_reduce_sum", "test_all_gather_group", "test_broadcast", "test_barrier_full_group"),
    *("test_send_recv", "test_scatter_object_list", "test_all_reduce_multigpu", "test_DistributedDataParallelCPU"),
    *("test_new_subgroups_world_size_not_divisible_by_group_size", "test_monitored_barrier_allreduce_hang"),
)


class Cold(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):  # type: ignore[misc]
    """The tests as torch runs them: by ``spawn``."""

    def setUp(self) -> None:
        """Starts the ranks."""
        super().setUp()
        self._spawn_processes()


class Warm(WarmMultiProcessTestCase, Cold):
    """The same tests on warm ranks."""


def run(case: type[unittest.TestCase], name: str) -> tuple[str, float]:
    """Runs one test; returns its verdict and seconds."""
    result: Any = unittest.TestResult()
    start = time.perf_counter()
    case(name).run(result)
    seconds = time.perf_counter() - start
    bad = "failed" if result.failures or result.errors else ""
    return bad or ("skipped" if result.skipped else "passed"), seconds


def main() -> int:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", help="comma-separated names of tests (default: ten of all kinds)")
    parser.add_argument("--repeats", type=int, default=1, help="number of runs of each test (default: 1)")
    given = parser.parse_args()
    names = given.tests.split(",") if given.tests else [name for name in TESTS if hasattr(Cold, name)]
    rows, equal = [], True
    total = {Cold: 0.0, Warm: 0.0}
    for name in names:
        verdicts, medians = [], []
        times: dict[Any, list[float]] = {Cold: [], Warm: []}
        for _ in range(given.repeats):
            for case in (Cold, Warm):
                verdict, seconds = run(case, name)
                verdicts.append(verdict)
                times[case].append(seconds)
        for case, taken in times.items():
            medians.append(statistics.median(taken))
            total[case] += medians[-1]
        equal &= len(set(verdicts)) == 1
        rows.append(
            f"| `{name}` | {verdicts[0]} | {verdicts[1]} | {medians[0]:.2f} | {medians[1]:.2f} "
            f"| {medians[0] / medians[1]:.1f} |"
        )
    print("| test | torch's verdict | warm | torch's, s | warm, s | times |\n|---|---|---|---|---|---|")
    print("\n".join(rows))
    print(f"| all | | | {total[Cold]:.1f} | {total[Warm]:.1f} | {total[Cold] / total[Warm]:.1f} |")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())

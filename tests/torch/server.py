"""Runs single tests of torch's harness on request, one after another.

Imports torch and the tests once, then forks the ranks of each test: new processes would take 2 s per rank. Reads names
from stdin, answers with one line of JSON each: outcome (passed, failed, skipped), detail (reason or traceback),
seconds, output. Its argument is the number of ranks: ``4``, or ``2x2`` for two on each of two nodes, which are both
this machine.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import unittest
from typing import Any

import backend_gates


def make_case(module: Any, nodes: list[str]) -> type[unittest.TestCase]:
    """torch's test class on warm ranks; rank ``r`` is on node ``nodes[r]``, if there are several."""
    # Imported here, because torch reads the environment that main() sets.
    from torch_symm.testing import WarmMultiProcessTestCase

    class TestSymm(  # type: ignore[misc]
        WarmMultiProcessTestCase,
        module.TestDistBackend,  # type: ignore[name-defined]
        module.DistributedTest._DistTestBase,  # type: ignore[name-defined]
    ):
        def setUp(self) -> None:
            super().setUp()
            module.INIT_METHOD = os.environ["INIT_METHOD"]
            self._spawn_processes()

        @classmethod
        def _run(cls, rank: int, *args: Any, **kwargs: Any) -> None:
            if len(set(nodes)) > 1:
                os.environ.update(SYMM_INTER_NODE_BACKEND="gloo", SYMM_TEST_NODE=nodes[rank], GLOO_SOCKET_IFNAME="lo")
            super()._run(rank, *args, **kwargs)

    return TestSymm


def run(case: type[unittest.TestCase], name: str) -> dict[str, object]:
    result = unittest.TestResult()
    started = time.monotonic()
    with tempfile.TemporaryFile() as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        case(name).run(result)
        sys.stdout.flush()
        sys.stderr.flush()
        log.seek(0)
        output = log.read().decode(errors="replace")
    answer: dict[str, object] = {"seconds": round(time.monotonic() - started, 3), "output": output[-20000:]}
    bad = result.failures + result.errors
    if bad:
        return {**answer, "outcome": "failed", "detail": "\n".join(text for _, text in bad)}
    if result.skipped:
        return {**answer, "outcome": "skipped", "detail": result.skipped[0][1]}
    return {**answer, "outcome": "passed", "detail": ""}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    nodes, ranks = backend_gates.nodes_and_ranks(sys.argv[1])
    os.environ["OMP_NUM_THREADS"] = "1"
    # On a node with GPUs the tests would request one per rank, and skip.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    case = make_case(backend_gates.load(nodes * ranks), [f"node{rank // ranks}" for rank in range(nodes * ranks)])
    answers.write(json.dumps({"ready": sys.argv[1]}) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(run(case, line.strip())) + "\n")


if __name__ == "__main__":
    main()

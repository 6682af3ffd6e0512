"""Clock and rhythm of the measurement: number of calls and bursts, and the samples of all ranks in one place."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.synchronize import Barrier

import torch
import torch.distributed as dist

from . import limits
from .ops import Work

MAX_SAMPLES = 2000
MAX_ROUNDS = 16
MAX_BURST = 64
FIXED_ROUNDS = 5
BATCH = 8
BATCH_BELOW_US = 10.0
# From here on, the skew with which ranks leave the start line (about 0.1 ms) is below 2 % of a call.
LEAD_BELOW_US = 5000.0
START_TIMEOUT_S = 300.0


def _shared(*shape: int) -> torch.Tensor:
    tensor: torch.Tensor = torch.zeros(shape, dtype=torch.float64).share_memory_()  # type: ignore[no-untyped-call]
    return tensor


class SharedTensors:
    """Memory that all ranks of a run share: samples, estimates, budget; and the start line."""

    def __init__(self, world: int, barrier: Barrier, sides: int = 2, samples: int = MAX_SAMPLES + MAX_ROUNDS) -> None:
        """For ``world`` ranks that meet at ``barrier``, and up to ``samples`` of each of ``sides``."""
        self.samples = _shared(sides, world, samples)
        self.estimates = _shared(sides, world)
        self.failed = _shared(sides, world)
        self.wrong = _shared(sides, world)
        self.cpu_seconds = _shared(world)
        self.copy_rates = _shared(world, limits.TRIALS)
        self.budget_s = _shared(1)
        self._barrier = barrier

    def align(self) -> None:
        """Returns once all ranks have called it.

        Raises:
            BrokenBarrierError: a rank did not call it within 300 s.
        """
        self._barrier.wait(START_TIMEOUT_S)


@dataclass(frozen=True)
class Rhythm:
    """How one side of a cell is measured: in each of ``rounds`` blocks, ``bursts`` of ``samples`` timed intervals.

    ``batch`` calls make one sample; an untimed ``lead`` call opens a burst and absorbs the skew of its start.
    """

    rounds: int
    bursts: int
    samples: int
    batch: int
    lead: bool

    @property
    def iterations(self) -> int:
        """Number of timed calls in all."""
        return self.rounds * self.bursts * self.samples * self.batch


def plan(estimate_us: float, budget_s: float, world: int, least: int, rounds: int) -> Rhythm:
    """Returns the rhythm of a side whose call takes about ``estimate_us``.

    It has as many samples as fit in ``budget_s``, but at least ``least`` and at most :data:`MAX_SAMPLES`. A burst has
    so few calls that ``world ** calls`` is far from the largest float, because each all_reduce sums the result of the
    one before.
    """
    batch = BATCH if estimate_us < BATCH_BELOW_US else 1
    lead = estimate_us < LEAD_BELOW_US
    cost_us = max(estimate_us, 0.1) * batch
    wanted = int(min(MAX_SAMPLES, max(least, budget_s * 1e6 / cost_us)))
    a_round = math.ceil(wanted / rounds)
    longest = _longest_burst(world) - int(lead)
    samples = max(1, min(a_round, longest // batch))
    # Rounded down: rounds × bursts × samples stays within MAX_SAMPLES + rounds, the size of the shared tensors.
    return Rhythm(rounds, a_round // samples, samples, batch, lead)


def fixed(calls: int, estimate_us: float, world: int) -> Rhythm:
    """Returns the rhythm of ``calls`` calls, or the next number that rounds and bursts divide, each timed alone."""
    rounds = min(FIXED_ROUNDS, calls)
    a_round, lead = math.ceil(calls / rounds), estimate_us < LEAD_BELOW_US
    longest = _longest_burst(world) - int(lead)
    bursts = math.ceil(a_round / longest)
    return Rhythm(rounds, bursts, math.ceil(a_round / bursts), 1, lead)


def _longest_burst(world: int) -> int:
    return min(MAX_BURST, int(112 / max(1.0, math.log2(world))))


def burst(work: Work, group: dist.ProcessGroup, rhythm: Rhythm) -> list[float]:
    """Runs one burst of blocking calls on new tensors; returns µs per call of each sample."""
    now, call = time.perf_counter_ns, work.call
    work.reset()
    if rhythm.lead:
        call(group)
    stamps = [now()]
    if rhythm.batch == 1:
        for _ in range(rhythm.samples):
            call(group)
            stamps.append(now())
    else:
        repeats = range(rhythm.batch)
        for _ in range(rhythm.samples):
            for _ in repeats:
                call(group)
            stamps.append(now())
    scale = 1e3 * rhythm.batch
    return [(after - before) / scale for before, after in pairwise(stamps)]


def check_once(work: Work, group: dist.ProcessGroup) -> None:
    """Makes one call on new tensors and checks its result.

    Raises:
        WrongResult: the result is wrong.
    """
    work.reset()
    work.call(group)
    work.check(1)

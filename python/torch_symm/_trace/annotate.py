"""Adds the flight recorder's data on calls to a trace of ``torch.profiler``.

The profiler takes an event's arguments when the event starts, but algorithm, bandwidth and waits are known only when it
ends. An exported trace has times of day, like the flight recorder, so calls and events can be matched.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch_symm._native import load

from .dump import Call, Dump, NotADump, View, parse, read

#: Tolerance between the profiler's and our reading of the clock for the same moment.
SKEW_NS = 20_000
PREFIX = "symm:"
#: For each event that is not named after its operation, the operation.
OPS = {"recvAnySource": "recv"}


def _others(n: int) -> float:
    return (n - 1) / n


def _one(_n: int) -> float:
    return 1.0


#: Bus bandwidth / algorithm bandwidth of n ranks: the factors of ``doc/PERFORMANCE.md`` of NVIDIA's nccl-tests.
BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * _others(n),
    "all_gather": _others,
    "reduce_scatter": _others,
    "all_to_all": _others,
    "broadcast": _one,
    "reduce": _one,
    "gather": _others,
    "scatter": _others,
    "send_recv": _one,
    "barrier": lambda _n: 0.0,
}


class Event:
    """An event ``symm:...`` of a trace."""

    def __init__(self, data: dict[str, Any], base_ns: int) -> None:
        self.data = data
        self.op = OPS.get(name := str(data["name"]).removeprefix(PREFIX), name)
        self.start_ns = base_ns + round(float(data["ts"]) * 1e3)
        self.end_ns = self.start_ns + round(float(data["dur"]) * 1e3)
        self.calls: list[tuple[View, Call]] = []

    def away_ns(self, at: int) -> int:
        """Returns the time between ``at`` and the event; 0 if ``at`` is within the event."""
        return max(self.start_ns - at, at - self.end_ns, 0)


def annotate_profiler_trace(path: str | os.PathLike[str], dumps: Sequence[str | os.PathLike[str]] = ()) -> int:
    """Adds algorithm, bytes, bandwidth and waits to a trace that ``torch.profiler`` has exported.

    A process keeps its last 2000 calls. The event ``symm:...`` of such a call gets the arguments ``call``,
    ``sequence``, ``group``, ``bytes`` and ``algorithm``. For calls on CPU tensors it also gets ``us``,
    ``algbw_gb_per_s``, ``busbw_gb_per_s``, ``waited_us`` and ``waited_for``: how long this rank waited until all ranks
    had started, and for which rank of the group. Bus bandwidth is as in nccl-tests' ``doc/PERFORMANCE.md``.
    The file is replaced.

    Args:
        path: a file that ``export_chrome_trace`` wrote, ``.json`` or ``.json.gz``.
        dumps: dumps of the processes of the trace (:func:`dump_trace`); by default, the calls of this process.

    Returns:
        The number of events that got arguments.

    Raises:
        ValueError: ``path`` is not such a trace, or one of ``dumps`` is not a dump.
        OSError: a file cannot be read or written.
        ImportError: the native part cannot serve this torch.
    """
    file = Path(path)
    opener = gzip.open if file.suffix == ".gz" else open
    with opener(file, "rt") as source:
        try:
            trace = json.load(source)
            events = _events(trace)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{file}: it is no trace of torch.profiler: {type(error).__name__}: {error}") from error
    try:
        kept = [read(Path(dump)) for dump in dumps] or [parse(json.loads(load()._trace()), "this process")]
    except NotADump as error:
        raise ValueError(str(error)) from error
    for dump in kept:
        _match(dump, [event for event in events if event.data.get("pid") == dump.pid])
    known = [event for event in events if event.calls]
    for event in known:
        event.data.setdefault("args", {}).update(_arguments(event))
    part = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with opener(part, "wt") as target:
            json.dump(trace, target)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
    return len(known)


def _events(trace: Any) -> list[Event]:
    base = int(trace.get("baseTimeNanoseconds", 0))
    named = [event for event in trace["traceEvents"] if str(event.get("name", "")).startswith(PREFIX)]
    found = [Event(event, base) for event in named if event.get("ph") == "X"]
    return sorted(found, key=lambda event: event.start_ns)


def _match(dump: Dump, events: Sequence[Event]) -> None:
    """Assigns each call to the event that submitted it; the event of coalesced calls gets several."""
    calls = [(view, call) for view in dump.views for call in view.calls]
    for view, call in sorted(calls, key=lambda one: one[1].number):
        near = [e for e in events if e.op == call.op and e.away_ns(call.created_ns) <= SKEW_NS]
        if near:
            # Asynchronous calls overlap: prefer an event without a call.
            best = min(near, key=lambda e: (e.away_ns(call.created_ns), bool(e.calls), e.start_ns))
            best.calls.append((view, call))


def _arguments(event: Event) -> dict[str, Any]:
    views, calls = zip(*event.calls, strict=True)
    view, first = views[0], calls[0]
    size = sum(call.size(view.world) for call in calls)
    found: dict[str, Any] = {
        "call": first.text if len(calls) == 1 else f"{first.text} and {len(calls) - 1} more",
        "sequence": first.sequence,
        "group": view.name,
        "bytes": size,
        "algorithm": ", ".join(sorted({call.algorithm for call in calls if call.algorithm})) or None,
    }
    ends = [call.ended_ns for call in calls]
    started, ended = first.started_ns, ends[-1]
    if started and ended and all(call.state == "completed" for call in calls):
        ns = max(1, ended - started)
        found["us"] = ns / 1e3
        if size and (factor := BUS_FACTORS.get("send_recv" if first.message else first.op)):
            found["algbw_gb_per_s"] = round(size / ns, 3)
            found["busbw_gb_per_s"] = round(size / ns * factor(view.world), 3)
        waits = [(call.waited_ns, call.waited_for) for call in calls if call.waited_ns is not None]
        if waits:
            found["waited_us"] = sum(ns for ns, _ in waits) / 1e3
            found["waited_for"] = max(waits, key=lambda wait: wait[0])[1]
    return {name: value for name, value in found.items() if value is not None}

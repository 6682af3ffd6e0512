"""Converts dumps to the format of torch's own analyser, ``torchfrtrace``.

The format is one pickle per rank. The analyser takes each entry for a call of its whole group, so sends and receives
are left out. Calls on CUDA have their own numbers and form their own group, ``<name>:cuda``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .dump import Call, Dump, NotADump, View

#: Version of the format, as torch 2.11 writes it.
VERSION = "2.10"

_STATES = {"scheduled": "scheduled", "started": "started", "completed": "completed", "failed": "started"}


def convert(dumps: Sequence[Dump]) -> dict[int, dict[str, Any]]:
    """Returns the object to pickle for each global rank, as ``torch_rank_<rank>``.

    A call that some rank has already overwritten is left out on all ranks.

    Raises:
        NotADump: two processes claim to be the same rank.
    """
    views = [view for dump in dumps for view in dump.views]
    latest: dict[tuple[tuple[str, int], int], View] = {}
    for view in sorted(views, key=lambda view: view.written_ns):
        latest[view.key, view.rank] = view
    names: dict[str, set[tuple[str, int]]] = {}
    for view in views:
        names.setdefault(view.name, set()).add(view.key)
    first = _first_on_all(list(latest.values())) if len(dumps) > 1 else {}
    pids: dict[int, int] = {}
    ranks: dict[int, dict[str, Any]] = {}
    for view in sorted(latest.values(), key=lambda view: view.joined_ns):
        other = pids.setdefault(view.global_rank, view.pid)
        if other != view.pid:
            raise NotADump(
                f"rank {view.global_rank} is process {other} in one dump and {view.pid} in another: those are two runs"
            )
        rank = ranks.setdefault(view.global_rank, {"version": VERSION, "pg_config": {}, "entries": []})
        name = view.name if len(names[view.name]) == 1 else f"{view.name}@{view.key[1]}"
        _add(rank, view, name, first)
    for rank in ranks.values():
        rank["entries"].sort(key=lambda entry: entry["record_id"])
        if len(dumps) > 1:
            for place, entry in enumerate(rank["entries"]):
                entry["record_id"] = place
    return ranks


def _first_on_all(views: list[View]) -> dict[tuple[tuple[str, int], bool], int]:
    """For each group, separately for CPU and CUDA, returns the first number that every rank still has."""
    first: dict[tuple[tuple[str, int], bool], int] = {}
    for view in views:
        for cuda in (False, True):
            calls = (call for call in view.calls if call.cuda == cuda and not call.message)
            kept = [call.sequence for call in calls if call.sequence]
            reached = (view.launched or 0) if cuda else view.begun
            own = 1 if view.complete else min(kept, default=reached + 1)
            first[view.key, cuda] = max(own, first.get((view.key, cuda), 1))
    return first


def _add(rank: dict[str, Any], view: View, name: str, first: dict[tuple[tuple[str, int], bool], int]) -> None:
    members = sorted(view.global_ranks)
    last = {False: 0, True: 0}
    rank["pg_config"][name] = {"name": name, "desc": "undefined", "ranks": str(members)}
    for call in view.calls:
        # A call that was rejected before it started is unknown to the other ranks.
        if call.message or (call.sequence is None and call.state == "failed"):
            continue
        # A queued call gets the next number, because queued calls start in this order.
        number = call.sequence or last[call.cuda] + 1
        last[call.cuda] = number
        if number < first.get((view.key, call.cuda), 1):
            continue
        title = f"{name}:cuda" if call.cuda else name
        rank["pg_config"].setdefault(title, {"name": title, "desc": "undefined", "ranks": str(members)})
        rank["entries"].append(_entry(call, number, title, len(members)))


def _entry(call: Call, number: int, group: str, world: int) -> dict[str, Any]:
    name, inputs, outputs = _sizes(call, world)
    return {
        "record_id": call.number - 1,
        "pg_id": 0,
        "process_group": (group, "undefined"),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"nccl:{name}",
        "time_created_ns": call.created_ns,
        "input_sizes": [[inputs]],
        "input_dtypes": [call.dtype],
        "output_sizes": [[outputs]],
        "output_dtypes": [call.dtype],
        "state": _STATES[call.state],
        "time_discovered_started_ns": call.started_ns,
        "time_discovered_completed_ns": call.ended_ns if call.state == "completed" else None,
        "retired": call.state in ("completed", "failed"),
        "timeout_ms": call.timeout_ms,
        "is_p2p": False,
        "frames": [],
    }


def _sizes(call: Call, world: int) -> tuple[str, int, int]:
    """Returns the name of the call for the analyser, and its element counts, which must be equal on all ranks.

    The analyser expects that one count is the other count multiplied by the number of ranks. A gather with shards of
    different lengths does not satisfy that, so it gets the name of a call without this check.
    """
    n = call.elements
    if call.op == "barrier":
        return "all_reduce_barrier", 1, 1
    if call.op == "all_gather":
        return ("all_gather", n // world, n) if call.even else ("ALLGATHER_coalesced", n, n)
    if call.op == "reduce_scatter":
        return ("reduce_scatter", n, n // world) if call.even else ("REDUCE_SCATTER_coalesced", n, n)
    if call.op == "gather":
        return "gather", n, n * world
    if call.op == "scatter":
        return "scatter", n * world, n
    if call.op == "all_to_all":
        return "all_to_all", call.bytes_in // call.itemsize, call.bytes_out // call.itemsize
    return call.op, n, n

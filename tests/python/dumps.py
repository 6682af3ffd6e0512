"""Dumps of calls as ``torch_symm.trace()`` returns them, for tests of their readers; a folder for the real ones."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from typing import Any


def temporary_folder() -> str:
    """Makes a folder that this process removes at its exit. A forked rank that runs the exit functions keeps it."""
    folder, owner = tempfile.mkdtemp(prefix="symm-dumps-"), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def call(number: int, created_ns: int, **more: Any) -> dict[str, Any]:
    """An all-reduce that has ended after 100 ns, with the fields ``more``."""
    return {
        **dict.fromkeys(("reduce_op", "root", "peer", "tag", "outcome", "phase", "phase_ns")),
        **{"number": number, "group": 1, "op": "all_reduce", "call": "all_reduce(4)", "sequence": number},
        **{"dtype": "float32", "itemsize": 4, "elements": 4, "even": True, "bytes_in": 16, "bytes_out": 16},
        **{"async": True, "device": "cpu", "timeout_ms": 1, "state": "completed", "algorithm": "inline"},
        **{"created_ns": created_ns, "started_ns": created_ns + 100, "ended_ns": created_ns + 200},
        **more,
    }


def dump(*calls: dict[str, Any], rank: int = 0, pid: int = 100) -> dict[str, Any]:
    """The calls of ``rank`` of two ranks; the process of rank 0 is ``pid``."""
    members = [{"rank": one, "global_rank": one, "pid": pid + one} for one in range(2)]
    group = {
        **{"id": 1, "memory": 5, "name": "default", "rank": rank, "members": members, "world": 2},
        **{"global_ranks": [0, 1], "other_nodes": None},
        **{"timeout_ms": 1, "joined_ns": 1, "left_ns": None, "begun": 9, "launched": None, "failure": None},
        "peers": [],
    }
    return {
        **{"format": "torch-symm trace", "version": 1, "host": "here", "boot_id": "b", "pid": pid + rank},
        **{"written_ns": 10**9, "calls_made": 9, "calls_kept": 2000, "groups": [group], "calls": list(calls)},
    }

"""Ending a group: while a call is blocked, a thousand times, and in forked children."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from . import leftovers
from .case import RIGHT, Case, Outcome, Promise, Saw, add
from .stage import WORLD, Stage, placed, play

TIMEOUT_S = 5.0


def released(stage: Stage, rank: int, way: str) -> Saw:
    """Rank 0 blocks in a call that nobody joins; another thread of its own ends the group."""
    dist.barrier()
    if rank != 0:
        stage.meet("released", rank, (0,), 3 * TIMEOUT_S)
        return Saw(RIGHT)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))

    def end() -> None:
        time.sleep(0.3)
        stage.now_it_happens()
        if way == "abort":
            backend.abort()
            backend.abort()
        else:
            dist.destroy_process_group()

    thread = threading.Thread(target=end)
    thread.start()
    saw = stage.observe(lambda: dist.all_reduce(torch.ones(1000)))
    thread.join()
    stage.meet("released", rank, ())
    return saw


for _way in ("abort", "destroy"):
    add(
        Case(
            f"{_way} from a second thread",
            "abort / destroy from a second thread while a call is blocked",
            partial(play, partial(released, way=_way), timeout=TIMEOUT_S, limit=4 * TIMEOUT_S),
            Promise(sees=("SymmAborted", RIGHT), within=0.1),
            "< 0.1 s",
            f"group timeout {TIMEOUT_S:g} s",
        )
    )


def resident_kb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024


def churn(stage: Stage, rank: int, cycles: int) -> Saw:
    """Makes, uses and destroys groups one after the other."""

    def cycle() -> None:
        group = dist.new_group()
        dist.all_reduce(torch.ones(3), group=group)
        dist.destroy_process_group(group)

    for _ in range(20):
        cycle()
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    had, keys, memory = leftovers.own(), store.num_keys(), resident_kb()
    dist.barrier()
    begun = time.monotonic()
    for _ in range(cycles):
        cycle()
    took = time.monotonic() - begun
    grown = resident_kb() - memory
    dist.barrier()
    more = leftovers.beyond(had)
    dist.barrier()
    return Saw(
        RIGHT,
        left=dict(more),
        figures={
            "ms_a_cycle": took / cycles * 1e3,
            "kb_a_cycle": max(0.0, grown) / cycles,
            "keys_a_cycle": (store.num_keys() - keys) / cycles,
            "fds_and_threads": float(more["fds"] + more["threads"]),
        },
    )


def churned(side: str) -> Outcome:
    """Fewer cycles for Gloo, which takes ten times as long."""
    return play(partial(churn, cycles=1000 if side == "symm" else 200), side, timeout=60, limit=80, over_tcp=True)


add(
    Case(
        "1000 cycles",
        "1000 × new_group, use, destroy",
        churned,
        Promise(
            at_most={"ms_a_cycle": 5.0, "kb_a_cycle": 1.0, "keys_a_cycle": 0.01, "fds_and_threads": 0.0},
            stretches=("ms_a_cycle",),
        ),
        "< 5 ms, < 1 KB, no key, descriptor or thread a cycle",
        "200 cycles for Gloo; both over torch's TCPStore",
    )
)

FORKS = """
import json, os, sys, time, torch, torch.distributed as dist
torch.set_num_threads(1)
side, folder, rank, world = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
seen = {}
torch.ones(4) + 1
if rank == 0:
    begun = time.monotonic()
    pid = os.fork()
    if pid == 0:
        sys.exit(0)
    os.waitpid(pid, 0)
    seen["bare"] = time.monotonic() - begun
store = dist.FileStore(folder + "/store", world)
dist.init_process_group(side, store=store, rank=rank, world_size=world)
dist.all_reduce(torch.ones(4))
for ending in ("sys_exit", "destroy", "use"):
    reader, writer = os.pipe()
    begun = time.monotonic()
    pid = os.fork() if rank == 0 else 0
    if rank == 0 and pid == 0:
        if ending == "destroy":
            dist.destroy_process_group()
        elif ending == "use":
            try:
                dist.all_reduce(torch.ones(4))
            except Exception as error:
                os.write(writer, type(error).__name__.encode())
            os._exit(0)
        sys.exit(0)
    os.close(writer)
    if rank == 0:
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > begun + 4:
                os.kill(pid, 9)
                os.waitpid(pid, 0)
                break
            time.sleep(0.002)
        seen[ending] = time.monotonic() - begun
        seen["raised"] = os.read(reader, 100).decode()
    dist.all_reduce(tensor := torch.ones(4))
    seen["right"] = tensor.tolist() == [world] * 4
print(json.dumps(seen), flush=True)
os._exit(0)
"""


def forked(side: str) -> Outcome:
    """A forked child of rank 0 leaves by sys.exit, destroys the group, uses the group."""
    with leftovers.fresh_folder() as place:
        command = [sys.executable, "-c", FORKS, side, str(place)]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(WORLD)],
                env={**os.environ, **placed(rank, WORLD)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(WORLD)
        ]
        outcome = Outcome()
        deadline = time.monotonic() + 60
        for rank, process in enumerate(ranks):
            try:
                out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
            try:
                seen = json.loads(out.splitlines()[-1])
            except (IndexError, ValueError):
                outcome.saw[rank] = Saw("crash", err[-400:])
                continue
            outcome.saw[rank] = Saw(RIGHT if seen["right"] else "wrong")
            if rank == 0:
                outcome.figures = {f"child_{name}_s": seen[name] for name in ("bare", "sys_exit", "destroy", "use")}
                outcome.figures["child_more_than_bare_s"] = max(seen["sys_exit"], seen["destroy"]) - seen["bare"]
                outcome.figures["use_unrefused"] = float(seen["raised"] == "")
        return outcome


add(
    Case(
        "forked child ends or uses",
        "a forked child: sys.exit / destroy / use of the group",
        forked,
        Promise(
            at_most={"child_more_than_bare_s": 0.5, "child_use_s": 0.5, "use_unrefused": 0},
            stretches=("child_more_than_bare_s", "child_use_s"),
        ),
        "the child ends in < 0.5 s more than one without a group (bare), use raises, the parents go on",
        "children are ended after 4 s",
    )
)

"""Ending a group: while a call is blocked, a thousand times, and in forked children."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch_symm.launch.ranks import Forked

from . import resource_leaks
from .case import RIGHT, WRONG, Case, Outcome, Promise, Saw, add
from .deaths import failed, waits
from .processes import Stage, node_of, play, scene

TIMEOUT_S = 5.0


def released(stage: Stage, rank: int, way: str, wait: str = "all_reduce", culprit: int = 0) -> Saw:
    """The culprit blocks in a call that no other rank makes; another of its threads ends the group."""
    dist.barrier()
    if rank != culprit:
        told = way == "abort" and stage.side == "symm"
        saw = stage.observe(waits(stage, culprit)["nothing"]) if told else Saw(RIGHT)
        stage.meet("released", rank, (culprit,), 3 * TIMEOUT_S)
        return _as(saw, "SymmPeerError" if told else RIGHT, stage)
    backend = stage.backend

    def end() -> None:
        if way == "abort":
            backend.abort()
            backend.abort()
        else:
            dist.destroy_process_group()

    thread = stage.later(0.2, end)
    saw = stage.observe(waits(stage, (culprit + 1) % stage.world)[wait])
    thread.join()
    stage.meet("released", rank, ())
    return _as(saw, "SymmAbortedError", stage)


def _as(saw: Saw, kind: str, stage: Stage) -> Saw:
    """Marks the result as wrong unless it is of this kind; only on the side with a promise."""
    if stage.side == "symm" and saw.kind != kind:
        saw.kind = WRONG
    return saw


NOTE = f"group timeout {TIMEOUT_S:g} s"
ABORTED = Promise(sees=("SymmAbortedError", "SymmPeerError"), names=(0,), says=("abort",), within=0.1)
for _name, _way, _wait, _promise in (
    ("abort from a second thread", "abort", "all_reduce", ABORTED),
    ("abort, asynchronous all_reduce blocked", "abort", "asynchronous all_reduce", ABORTED),
    ("abort, recv blocked", "abort", "recv", ABORTED),
    ("destroy from a second thread", "destroy", "all_reduce", Promise(("SymmAbortedError", RIGHT), within=0.1)),
):
    scene(
        _name,
        "abort / destroy from a second thread while a call is blocked",
        "< 0.1 s; the others hear who aborted",
        _promise,
        NOTE,
        where="both" if _wait == "all_reduce" else "one",
        timeout=TIMEOUT_S,
        limit=4 * TIMEOUT_S,
    )(partial(released, way=_way, wait=_wait))
for _layout, _culprit, _wait, _way in (
    ((2, 2), 3, "all_reduce", "abort"),
    ((3, 1), 2, "all_reduce", "abort"),
    ((1, 1, 1), 0, "all_reduce", "abort"),
    ((1, 1), 0, "recv", "abort"),
    ((2, 2), 0, "recv from any", "abort"),
    ((2, 2), 0, "recv from any", "destroy"),
):
    _says = rf'rank {_culprit} \(node "{node_of(_culprit, _layout)}", pid \d+\) aborted group'
    scene(
        f"{_way} on rank {_culprit} of {_layout} in {_wait}",
        "abort / destroy on one of several nodes",
        "< 0.2 s on all, the rank named with its node",
        Promise(sees=("SymmAbortedError", "SymmPeerError"), names=(_culprit,), says=(_says,), within=0.2)
        if _way == "abort"
        else Promise(sees=("SymmAbortedError", RIGHT), within=0.2),
        NOTE,
        sides=("symm",),
        layout=_layout,
        timeout=30,
    )(partial(released, way=_way, wait=_wait, culprit=_culprit))


@scene(
    "abort and a new group",
    "_abort_process_group, then a new group",
    "< 1 s, and the new group is right",
    Promise(within=1.0),
    world=2,
)
def _(stage: Stage, rank: int) -> Saw:
    dist.all_reduce(torch.zeros(3))
    begun = time.monotonic()
    dist.distributed_c10d._abort_process_group()
    took = time.monotonic() - begun
    stage.join(rank, name="second")
    dist.all_reduce(tensor := torch.ones(3))
    return Saw(RIGHT if tensor.tolist() == [2.0] * 3 else WRONG, seconds=took)


@scene(
    "leaves while others send",
    "a rank leaves in order while the others still send to each other",
    "their messages arrive; a receive from the rank that left names it",
    Promise(sees=("SymmPeerError", RIGHT), says=(r"rank 2.*left.*recv",)),
    world=3,
)
def _(stage: Stage, rank: int) -> Saw:
    dist.barrier()
    if rank == 2:
        dist.destroy_process_group()
        stage.meet("gone", rank, ())
        return Saw(RIGHT)
    stage.meet("gone", rank, (2,))
    time.sleep(0.2)
    got = torch.arange(4)
    if rank == 0:
        return stage.observe(lambda: dist.send(got, 1))
    dist.recv(got := torch.zeros_like(got), 0)
    if got.tolist() != [0, 1, 2, 3]:
        return Saw(WRONG, "the message was not delivered")
    return _as(stage.observe(lambda: dist.recv(got, 2)), "SymmPeerError", stage)


@scene(
    "destroy with work outstanding",
    "destroy while a call of this rank can never finish",
    "the timeout at most, then the call raises",
    Promise(sees=("SymmAbortedError", "SymmTimeoutError", RIGHT), within=0.6),
    world=2,
    sides=("symm",),
)
def _(stage: Stage, rank: int) -> Saw:
    dist.barrier()
    stage.shorten(0.5)
    saw = Saw(RIGHT)
    if rank == 0:
        work = dist.all_reduce(torch.ones(10), async_op=True)
        begun = time.monotonic()
        dist.destroy_process_group()
        took = time.monotonic() - begun
        saw = stage.observe(lambda: work.wait() and False)
        saw.seconds = took
    stage.meet("end", rank, range(2))
    return saw


def beside_a_stopped_node(stage: Stage, rank: int, count: int) -> Saw:
    """Rank 0 aborts while its call waits for rank 1, which is stopped, and destroys the group."""
    dist.all_reduce(torch.ones(4))
    stage.meet("before", rank, range(2))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    thread = stage.later(0.2, stage.backend.abort)
    saw = stage.observe(lambda: dist.all_reduce(torch.ones(count)))
    thread.join()
    dist.destroy_process_group()
    saw.figures["destroyed_s"] = stage.since
    return saw


for _count in (4, 1 << 20):
    scene(
        f"abort beside a stopped node, {4 * _count} bytes",
        "abort of a call that waits for a stopped node",
        "< 0.2 s; destroyed within 0.8 s",
        Promise(
            sees=("SymmAbortedError",),
            within=0.2,
            at_most={"destroyed_s": 0.8},
            stretches=("destroyed_s",),
            nothing_left=False,
        ),
        sides=("symm",),
        layout=(1, 1),
        timeout=60,
        victims=(1,),
    )(partial(beside_a_stopped_node, count=_count))


def leaves_early(stage: Stage, rank: int) -> Saw:
    """Ranks 2 and 3 leave in order: no other rank fails until its next call, whose error names one of the two."""
    dist.all_reduce(torch.ones(4))
    stage.meet("before", rank, range(4))
    if rank >= 2:
        dist.destroy_process_group()
        stage.meet("gone", rank, range(4))
        return Saw(RIGHT)
    stage.meet("gone", rank, range(4))
    time.sleep(0.3)
    if failed(stage):
        return Saw(WRONG, "a rank that leaves in order fails no other")
    return _as(stage.observe(lambda: dist.all_reduce(torch.ones(4))), "SymmPeerError", stage)


for _layout in ((2, 2), (2, 1, 1)):
    scene(
        f"ranks 2 and 3 of {_layout} leave",
        "ranks of other nodes leave in order",
        "named by the next call only",
        Promise(
            sees=("SymmPeerError", RIGHT),
            says=(r'rank [23] \(node "[bc]", pid \d+\) of group ".*" left the group',),
        ),
        sides=("symm",),
        layout=_layout,
    )(leaves_early)


def resident_kb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024


def churn(stage: Stage, rank: int, cycles: int) -> Saw:
    """Makes, uses and destroys groups one after another; one in four also for asynchronous calls and messages."""
    peer = rank ^ 1  # of the same node

    def cycle(number: int) -> None:
        group, tensor = dist.new_group(), torch.ones(3)
        dist.all_reduce(tensor, group=group)
        if number % 4 == 0:
            dist.all_reduce(tensor, group=group, async_op=True).wait()
            send = dist.P2POp(dist.isend, tensor, peer, group)
            for work in dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, torch.zeros(3), peer, group)]):
                work.wait()
        dist.destroy_process_group(group)

    for number in range(20):
        cycle(number)
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    had, keys, memory = resource_leaks.own(), store.num_keys(), [resident_kb()]
    dist.barrier()
    begun = time.monotonic()
    for number in range(cycles):
        cycle(number)
        if number + 1 in (cycles // 2, cycles):
            memory.append(resident_kb())
    took = time.monotonic() - begun
    # A table of the interpreter may grow once, by megabytes, in one half of the cycles.
    grown = min(after - before for before, after in pairwise(memory))
    dist.barrier()
    more, keys = resource_leaks.beyond(had), store.num_keys() - keys
    # Rank 0 serves the store.
    dist.barrier()
    return Saw(
        RIGHT,
        left=dict(more),
        figures={
            "ms_per_cycle": took / cycles * 1e3,
            "kb_per_cycle": max(0.0, grown) / (cycles // 2),
            "keys_per_cycle": keys / cycles,
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
            at_most={"ms_per_cycle": 5.0, "kb_per_cycle": 1.0, "keys_per_cycle": 0.01, "fds_and_threads": 0.0},
            stretches=("ms_per_cycle",),
        ),
        "< 5 ms, < 1 KB, no key, descriptor or thread per cycle",
        "200 cycles for Gloo; both over torch's TCPStore",
    )
)


def used() -> None:
    """Exits with 1 if the group can be used."""
    try:
        dist.all_reduce(torch.ones(4))
    except Exception:
        os._exit(0)
    os._exit(1)


def child_of(end: Callable[[], object]) -> tuple[float, int]:
    """Seconds until a forked child of this rank has ended, and its exit code; it is killed after 4 s."""

    def main() -> None:
        end()
        # Ends as the interpreter does after sys.exit: with its garbage, its teardown and the exit functions of C.
        gc.unfreeze()
        ctypes.pythonapi.Py_Exit(0)

    begun, child = time.monotonic(), Forked()
    pid = child.fork(main)
    child.wait(4)
    child.end()
    return time.monotonic() - begun, child.status.get(pid, -1)


def forked(stage: Stage, rank: int) -> Saw:
    """Forked children of rank 0 exit, destroy the group or use it; the group stays usable on all ranks."""
    figures = {"child_bare_s": child_of(lambda: None)[0]} if rank == 0 else {}
    stage.join(rank)
    dist.all_reduce(torch.ones(4))
    right = True
    for name, end in (("sys_exit", lambda: None), ("destroy", dist.destroy_process_group), ("use", used)):
        if rank == 0:
            figures[f"child_{name}_s"], code = child_of(end)
        dist.all_reduce(tensor := torch.ones(4))
        right &= tensor.tolist() == [stage.world] * 4
    if rank == 0:
        slower = max(figures["child_sys_exit_s"], figures["child_destroy_s"])
        figures |= {"child_more_than_bare_s": slower - figures["child_bare_s"], "use_unrefused": float(code != 0)}
    return Saw(RIGHT if right else WRONG, figures=figures)


scene(
    "forked child ends or uses",
    "a forked child: sys.exit / destroy / use of the group",
    "the child ends in < 0.5 s more than one without a group (bare), use raises, the parents go on",
    Promise(
        at_most={"child_more_than_bare_s": 0.5, "child_use_s": 0.5, "use_unrefused": 0},
        stretches=("child_more_than_bare_s", "child_use_s"),
    ),
    "children are ended after 4 s",
    where="both",
    limit=60,
    join=False,
)(forked)

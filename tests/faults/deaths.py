"""A rank's process exits, in every way and in every place: what the others see, and what they can do next."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from .case import RIGHT, WRONG, Case, Promise, Saw, add
from .processes import WORLD, Layout, Stage, node_of, play

#: The group's timeout, after which Gloo's survivors fail; Gloo's default is 30 minutes.
TIMEOUT_S = 6.0
SHORTER = f"the group's timeout is {TIMEOUT_S:g} s"
#: Seconds within which all notice an exit: on one node, with 16 ranks on it, on several nodes.
SOON_S, CROWDED_S, NODES_S = 0.1, 1.0, 0.2
#: The same after an uncaught exception: the others wait until the process has ended, which takes Python 0.1 to 0.3 s.
ENDING_S = 0.5
LONG = 3 << 20


def exchanged(peer: int) -> None:
    receive = dist.P2POp(dist.irecv, torch.zeros(4), peer, tag=3)
    for work in dist.batch_isend_irecv([receive, dist.P2POp(dist.isend, torch.zeros(LONG), peer, tag=4)]):
        work.wait()


def polled(peer: int) -> None:
    """No thread waits in this call, so the progress thread notices the exit."""
    work = dist.irecv(torch.zeros(4), peer)
    while not work.is_completed():
        time.sleep(0.001)
    work.wait()


def failed(stage: Stage) -> bool:
    return "SUCCESS" not in str(stage.backend.get_error())


def waits(stage: Stage, peer: int, count: int = 1000) -> dict[str, Callable[[], object]]:
    """The calls in which survivors wait: collectives of ``count`` elements, messages that ``peer`` does not answer."""
    tensor = torch.ones(count)

    def nothing() -> None:
        deadline = time.monotonic() + 15
        while not failed(stage) and time.monotonic() < deadline:
            time.sleep(0.001)
        dist.all_reduce(torch.ones(4))

    return {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "asynchronous all_reduce": lambda: dist.all_reduce(tensor, async_op=True).wait(),
        "barrier": dist.barrier,
        "recv": lambda: dist.recv(torch.zeros(4), peer),
        "recv from any": lambda: dist.recv(torch.zeros(4), None),
        "long send": lambda: dist.send(torch.zeros(LONG), peer),
        "irecv": lambda: dist.irecv(torch.zeros(4), peer).wait(),
        "isend": lambda: dist.isend(torch.zeros(LONG), peer).wait(),
        "batch": lambda: exchanged(peer),
        "irecv without a wait": lambda: polled(peer),
        "nothing": nothing,
    }


def later_calls(stage: Stage, peer: int) -> dict[str, Callable[[], object]]:
    """Calls of every kind; all must raise the first cause at once."""
    world = stage.world
    return {
        **{name: call for name, call in waits(stage, peer, 1 << 18).items() if name not in ("batch", "nothing")},
        "short send": lambda: dist.send(torch.zeros(4), peer),
        "short isend": lambda: dist.isend(torch.zeros(4), peer).wait(),
        "broadcast": lambda: dist.broadcast(torch.ones(1), 0),
        "all_gather": lambda: dist.all_gather_into_tensor(torch.ones(world), torch.ones(1)),
        "all_gather_object": lambda: dist.all_gather_object([None] * world, "x"),
        "monitored_barrier": lambda: dist.group.WORLD.monitored_barrier(timedelta(seconds=5)),  # type: ignore[attr-defined]
    }


def first_cause_stands(stage: Stage, peers: tuple[int, ...], saw: Saw) -> None:
    """Makes every later call, with each of ``peers``. Records the slowest one, and the calls that lack the cause."""
    slowest = 0.0
    for peer in peers:
        for name, call in later_calls(stage, peer).items():
            begun = time.monotonic()
            try:
                call()
                text = "it succeeded"
            except dist.DistBackendError as error:
                text = str(error)
            slowest = max(slowest, time.monotonic() - begun)
            if saw.text not in text and text not in saw.text:
                saw.kind, saw.text = WRONG, f"{name} later: {text}\nfirst: {saw.text}"
    saw.figures["later_call_s"] = slowest


def _new_group(stage: Stage, rank: int, survivors: list[int], saw: Saw) -> None:
    """Leaves the failed group and makes a new one of the survivors; adds its figures to ``saw``."""
    # A rank that leaves early would notify Gloo's other ranks by closing its connections.
    stage.meet("seen", rank, survivors, stage.timeout + 4)
    begun = time.monotonic()
    dist.destroy_process_group()
    saw.figures["destroy_s"] = time.monotonic() - begun
    stage.meet("left", rank, survivors, 5)
    begun = time.monotonic()
    stage.join(survivors.index(rank), len(survivors), "survivors")
    dist.all_reduce(tensor := torch.ones(1000))
    saw.figures["new_group_s"] = time.monotonic() - begun
    if not bool((tensor == len(survivors)).all()):
        saw.kind = WRONG


def _uncaught() -> None:
    try:
        raise RuntimeError("a bug of the user's")
    except RuntimeError:
        # Exits as the interpreter does: it runs the exit functions of libraries.
        atexit._run_exitfuncs()
        os._exit(1)


def _segfault() -> None:
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


#: The ways in which a process exits, each with the text in messages if Linux reports it.
KILLED = r"signal 9 \(SIGKILL\)"
ENDS: dict[str, tuple[Callable[[], object], str]] = {
    "killed": (die, KILLED),
    "segmentation fault": (_segfault, r"signal 11 \(SIGSEGV\)"),
    "uncaught exception": (_uncaught, "exit(ed)? (with )?(code |status )?1|left"),
    "_exit(0)": (lambda: os._exit(0), "exit(ed)? (with )?(code |status )?0"),
    "_exit(3)": (lambda: os._exit(3), "exit(ed)? (with )?(code |status )?3"),
    "destroy": (dist.destroy_process_group, "left the group"),
}


@dataclass(frozen=True)
class Death:
    """One row: which rank exits, how and where, and what the others do meanwhile."""

    wait: str = "all_reduce"
    end: str = "killed"
    victim: int = 1
    #: True if a thread of the victim ends the process while the victim makes the same calls as the others. Otherwise
    #: the victim makes no call, and exits while the others wait.
    inside: bool = False
    count: int = 1000
    #: The child that outlives the rank: "" for none, a forked "child", or a "program" that it has started.
    child: str = ""
    #: True if the survivors wait for the victim's messages, and not for each other's.
    from_victim: bool = False
    layout: Layout = ()
    world: int = WORLD

    @property
    def compares(self) -> bool:
        """True if later calls of every kind follow, which raise the first cause; not after an orderly departure."""
        return self.end != "destroy" and not self.layout and self.world == WORLD


def ends(stage: Stage, rank: int, row: Death) -> Saw:
    """Runs a row on one rank."""
    end, survivors = ENDS[row.end][0], [r for r in range(stage.world) if r != row.victim]
    peer = (
        row.victim if row.from_victim or rank == row.victim else survivors[(survivors.index(rank) + 1) % len(survivors)]
    )
    call = waits(stage, peer, row.count)[row.wait]
    if row.from_victim and rank == row.victim:
        # On several nodes, this makes the links.
        for survivor in survivors:
            dist.send(torch.ones(1), survivor)
    elif row.from_victim:
        dist.recv(torch.ones(1), row.victim)
    dist.barrier()
    stage.meet("begun", rank, range(stage.world))
    if rank == row.victim:
        if row.child == "child":
            stage.bystander(30)
        elif row.child == "program":
            stage.spare(subprocess.Popen(["sleep", "30"], close_fds=False).pid)
        if not row.inside:
            time.sleep(0.2)
            stage.now_it_happens()
            end()
            return Saw(RIGHT)
        stage.later(0.2, end)

    def calls() -> bool:
        deadline = time.monotonic() + 25
        while row.inside and time.monotonic() < deadline:
            call()
        call()
        return False

    saw = stage.observe(calls)
    if saw.raised:
        if row.compares and stage.side == "symm":
            first_cause_stands(stage, (row.victim, peer), saw)
        _new_group(stage, rank, survivors, saw)
    return saw


def says(row: Death) -> tuple[str, ...]:
    """Expressions that every message must match."""
    how = ENDS[row.end][1]
    if row.layout:
        node = node_of(row.victim, row.layout)
        # Only a rank on the victim's node knows how the victim exited, and reports it.
        beside = row.layout["abcd".index(node)] > 1
        return (rf'rank {row.victim} \(node "{node}", pid', how if beside else "is gone", "group")
    message = row.wait not in ("all_reduce", "asynchronous all_reduce", "barrier", "nothing")
    call = r"had waited \d\.\d s for .* in (send|recv)\(" if message else row.wait.split()[-1]
    if row.wait == "nothing":
        return (rf"{how}|gone", "group")
    return (rf"{how}|gone", call, "group") if message else (rf"{how}|gone", call, r"#\d+", "group")


def row(name: str, title: str, sides: tuple[str, ...] = ("gloo", "symm"), where: str = "both", **what: object) -> None:
    death = Death(**what)  # type: ignore[arg-type]
    soon = ENDING_S if death.end == "uncaught exception" else SOON_S
    within = NODES_S if death.layout else CROWDED_S if death.world > WORLD else soon
    promise = Promise(
        sees=("SymmPeerError",),
        names=(death.victim,),
        says=says(death),
        within=within,
        at_most={"destroy_s": 1.0, "new_group_s": 1.0} | ({"later_call_s": 1.0} if death.compares else {}),
        stretches=("destroy_s", "new_group_s", "later_call_s"),
        quiet=not death.layout,
    )
    run = partial(
        play,
        partial(ends, row=death),
        world=death.world,
        timeout=TIMEOUT_S,
        limit=2.5 * TIMEOUT_S + 10,
        victims=(death.victim,),
        layout=death.layout,
    )
    target = f"< {within:g} s on all, rank and pid named; a new group < 1 s"
    add(Case(name, title, run, promise, target, SHORTER, sides, "nodes" if death.layout else where))


LARGE = "SIGKILL of rank 1 inside a 64 MB all_reduce; survivors keep their groups"
MANY = "SIGKILL of rank 1 of 16 inside a 1 MB all_reduce"
CHILD = "the same, while a forked child of the dead rank holds its descriptors"
OTHER = (
    "SIGKILL inside 4 KB operations, of rank 0, with asynchronous work; exception, _exit, SIGSEGV between collectives"
)
WAITS = "SIGKILL of rank 1 while the others wait in messages, barriers, or in nothing"
NODES = "SIGKILL of a rank of several nodes, while the others call and while they do nothing"

row("killed in 64 MB", LARGE, inside=True, count=16 << 20)
row("killed, child lives", CHILD, inside=True, count=16 << 20, child="child")
row("killed in 4 KB", OTHER, inside=True, count=1 << 10)
row("killed rank 0", OTHER, inside=True, count=16 << 20, victim=0)
row("killed in 160 KB", OTHER, inside=True, count=40_000, victim=2)
row("killed with async work", OTHER, inside=True, count=16 << 20, wait="asynchronous all_reduce")
for _end in tuple(ENDS)[1:-1]:
    row(_end, OTHER, end=_end)
row("destroys the group", OTHER, end="destroy", where="one")
row("killed among 16 ranks", MANY, inside=True, count=1 << 18, world=16)
for _wait in ("barrier", "recv", "recv from any", "long send", "irecv", "isend", "batch", "irecv without a wait"):
    row(f"killed, others in {_wait}", WAITS, wait=_wait, where="one")
row("killed, others do nothing", WAITS, ("symm",), wait="nothing", where="one")
for _wait in ("recv", "long send"):
    row(f"killed, others in {_wait} with it", WAITS, wait=_wait, from_victim=True, where="one")

for _layout, _victims in {
    (2, 2): (0, 1, 2, 3),
    (3, 1): (0, 2, 3),
    (1, 1, 1): (0, 1),
    (1, 1, 1, 1): (2,),
}.items():
    for _victim in _victims:
        for _wait in ("nothing", "all_reduce"):
            row(
                f"killed {_victim} of {_layout}, others in {_wait}",
                NODES,
                ("symm",),
                wait=_wait,
                victim=_victim,
                layout=_layout,
            )
for _layout in ((2, 2), (3, 1)):
    row(f"killed 3 of {_layout} in 12 MB", NODES, ("symm",), inside=True, count=LONG, victim=3, layout=_layout)
for _layout in ((2, 2), (1, 1)):
    for _wait in ("recv", "recv from any"):
        _last = sum(_layout) - 1
        _name = f"killed {_last} of {_layout}, others in {_wait} with it"
        row(_name, NODES, ("symm",), wait=_wait, victim=_last, from_victim=True, layout=_layout)
row("killed 1 of (1, 1, 1), child lives", NODES, ("symm",), wait="nothing", child="child", layout=(1, 1, 1))
for _child in ("child", "program"):
    row(
        f"killed 1 of (1, 1, 1) in 16 MB, {_child} lives",
        NODES,
        ("symm",),
        inside=True,
        count=1 << 22,
        child=_child,
        layout=(1, 1, 1),
    )

"""Making a group when a rank, a port, a file or a file descriptor is missing, taken, old or duplicate."""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from .case import RIGHT, WRONG, Case, Outcome, Promise, Saw, add
from .processes import WORLD, Stage, free_port, node_of, play, scene
from .resources import works

TIMEOUT_S = 10.0
#: Timeout of ranks that wait for an absent rank or a silent server.
LATE_S = 3.0
#: Exceptions of a rank that cannot join; which one depends on the part of symm or torch that noticed.
REFUSED = (
    "SymmTimeoutError",
    "SymmConfigError",
    "SymmPeerError",
    "DistStoreError",
    "DistNetworkError",
    "ValueError",
    "DistBackendError",
)
NOTE = f"timeout {LATE_S:g} s"


def url(side: str, kind: str, target: str) -> str:
    """The rendezvous that users of each side would choose: torch's for Gloo, ours for symm."""
    return {"gloo": {"port": "tcp://", "file": "file://"}, "symm": {"port": "symm://", "file": "symm+file://"}}[side][
        kind
    ] + target


def join_by(stage: Stage, address: str, rank: int, world: int | None = None) -> bool:
    """Joins by a URL and sums once; returns true if the sum is right."""
    world = stage.world if world is None else world
    dist.init_process_group(
        stage.side, init_method=address, rank=rank, world_size=world, timeout=timedelta(seconds=stage.timeout)
    )
    dist.all_reduce(tensor := torch.ones(4))
    return bool((tensor == world).all())


def missing(side: str, kind: str, absent: int) -> Outcome:
    """One rank never arrives."""
    port = free_port()

    def body(stage: Stage, rank: int) -> Saw:
        if rank == absent:
            return Saw(RIGHT)
        stage.meet("forked", rank, (r for r in range(WORLD) if r != absent))
        target = f"127.0.0.1:{port}" if kind == "port" else f"{stage.place}/meeting"
        return stage.observe(lambda: join_by(stage, url(side, kind, target), rank))

    outcome = play(body, side, timeout=LATE_S, limit=40, join=False)
    del outcome.saw[absent]
    return outcome


def missing_in_new_group(side: str) -> Outcome:
    """One rank of a running job does not call new_group."""

    def body(stage: Stage, rank: int) -> Saw:
        dist.barrier()
        saw = Saw(RIGHT)
        if rank != 2:
            saw = stage.observe(lambda: dist.new_group(timeout=timedelta(seconds=LATE_S)) is None)
        stage.meet("seen", rank, range(WORLD), 4 * LATE_S)
        return saw

    outcome = play(body, side, timeout=LATE_S, limit=40)
    del outcome.saw[2]
    return outcome


ROW = "a rank that never joins (by port, by file, in new_group; rank 0 itself)"
for _name, _run, _absent in (
    ("rank missing, by port", partial(missing, kind="port", absent=2), 2),
    ("rank missing, by file", partial(missing, kind="file", absent=2), 2),
    ("rank 0 missing, by port", partial(missing, kind="port", absent=0), 0),
    ("rank missing in new_group", missing_in_new_group, 2),
):
    add(
        Case(
            _name,
            ROW,
            _run,
            Promise(sees=REFUSED, names=(_absent,), pids=False, not_before=0.3 * LATE_S, within=LATE_S + 1),
            "timeout + at most 1 s, the missing rank named on all",
            f"{NOTE}; Gloo tcp:// and file://, symm symm:// and symm+file://",
        )
    )


@scene(
    "file of a killed run",
    "a file:// left by a killed run",
    "works",
    Promise(sees=(RIGHT,), within=1.0),
    NOTE,
    where="both",
    timeout=TIMEOUT_S,
    join=False,
)
def _(stage: Stage, rank: int) -> Saw:
    address = url(stage.side, "file", f"{stage.place}/meeting")
    child = os.fork()
    if child == 0:
        try:
            join_by(stage, address, rank)
            stage.meet("joined", rank, range(WORLD), 10)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    stage.meet("killed", rank, range(WORLD), 10)
    stage.now_it_happens()
    return stage.observe(lambda: join_by(stage, address, rank))


def duplicate(side: str, late: bool) -> Outcome:
    """A fifth process claims to be rank 1, before or after the group has formed."""

    def body(stage: Stage, rank: int) -> Saw:
        def joined() -> bool:
            stage.join(1 if rank == 4 else rank, WORLD)
            dist.all_reduce(tensor := torch.ones(4))
            return bool((tensor == WORLD).all())

        if rank == 4 and late:
            stage.meet("formed", rank, range(WORLD))
        if rank in (0, 1) and not late:
            # Both claimants of rank 1 must arrive while the group still waits.
            time.sleep(0.3 if rank == 1 else 0.6)
        if rank == 4 or not late:
            stage.now_it_happens()
        saw = stage.observe(joined)
        if not late:
            saw.seconds = max(0.0, saw.seconds)
        stage.meet("formed", rank, ())
        stage.meet("seen", rank, range(5), TIMEOUT_S)
        return saw

    return play(body, side, world=5, timeout=TIMEOUT_S, limit=40, join=False)


def one_refused(side: str, late: bool) -> Outcome:
    """Counts the processes that were rejected, and how many fewer than four joined."""
    outcome = duplicate(side, late)
    refused = {rank: saw for rank, saw in outcome.saw.items() if saw.raised}
    outcome.figures["refused"] = len(refused)
    outcome.figures["not_served"] = WORLD - sum(saw.kind == RIGHT for saw in outcome.saw.values())
    outcome.pids[1] = next((outcome.pids[rank] for rank in refused if rank in (1, 4)), outcome.pids[1])
    return outcome


for _late in (False, True):
    add(
        Case(
            f"duplicate rank {'after' if _late else 'while'} forming",
            "a fifth process with a rank that is taken",
            partial(one_refused, late=_late),
            Promise(sees=(RIGHT, "SymmConfigError"), names=(1,), within=1.0, at_most={"refused": 1, "not_served": 0}),
            "refused in < 1 s, both processes named, the job runs",
            NOTE,
        )
    )


def process_on_the_port(side: str) -> Outcome:
    """The port is held by a process that accepts and sends nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        # By default symm uses a Unix socket in place of the port, where the silent process would not interfere.
        beside = "?secret=none" if side == "symm" else ""
        address = url(side, "port", f"127.0.0.1:{listener.getsockname()[1]}{beside}")

        def body(stage: Stage, rank: int) -> Saw:
            return stage.observe(lambda: join_by(stage, address, rank))

        return play(body, side, timeout=LATE_S, limit=15, join=False)


add(
    Case(
        "silent process on the port",
        "the rendezvous port is held by a silent process",
        process_on_the_port,
        Promise(sees=REFUSED, within=LATE_S + 1),
        "timeout + at most 1 s",
        f"{NOTE}; ended after 15 s",
    )
)


@scene(
    "file in a missing folder",
    "file:// in a missing directory",
    "< 1 s, the path named",
    Promise(sees=REFUSED, says=("none",), within=1.0),
    f"{NOTE}; ended after 10 s",
    where="both",
    timeout=TIMEOUT_S,
    limit=10,
    join=False,
)
def _(stage: Stage, rank: int) -> Saw:
    return stage.observe(lambda: join_by(stage, url(stage.side, "file", f"{stage.place}/none/meeting"), rank))


def few_descriptors(stage: Stage, rank: int, more: int) -> Saw:
    """Rank 0 may open ``more`` file descriptors in addition to its current ones; then all join without a limit."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    if rank == 0:
        # Fills the gaps below the highest descriptor, because new descriptors get the lowest free numbers.
        most = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
        held = [
            os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC) for _ in range(most - len(os.listdir("/proc/self/fd")) + 1)
        ]
        most = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (most + more, limits[1]))
    stage.meet("limited", rank, range(stage.world))

    def joined() -> bool:
        stage.join(rank)
        dist.all_reduce(tensor := torch.ones(4))
        return more > 0 and bool((tensor == stage.world).all())

    saw = stage.observe(joined)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for descriptor in held:
        os.close(descriptor)
    if dist.is_initialized():
        dist.destroy_process_group()
    stage.meet("tried", rank, range(stage.world))
    stage.join(rank, name="ample")
    if not works(rank, stage.world):
        saw.kind = WRONG
    return saw


for _more in (40, 5, 4, 2, 0):
    # If a rank has too few even for the rendezvous, its error mentions open files, or its peers wait for it.
    _named = _more >= 5
    scene(
        f"RLIMIT_NOFILE {_more} above what is open",
        "RLIMIT_NOFILE of rank 0: 40, 5, 4, 2 and 0 above what is open",
        "works, or all see RLIMIT_NOFILE (below 5: open files) and rank 0; later groups work",
        Promise(
            sees=(RIGHT, "SymmConfigError") if _named else (RIGHT, "SymmConfigError", "SymmTimeoutError"),
            names=(0,) if _named else (),
            pids=False,
            says=("RLIMIT_NOFILE",) if _named else (r"rank 0\b|open files",),
            within=LATE_S + 1,
        ),
        NOTE,
        world=3,
        timeout=LATE_S,
        limit=30,
        join=False,
    )(partial(few_descriptors, more=_more))


def stays_away(stage: Stage, rank: int, absent: int, early: int) -> Saw:
    """All ranks but ``absent`` make a group, with a shorter timeout on rank ``early`` than on the others."""
    dist.barrier()
    stage.meet("begun", rank, range(stage.world))
    saw = Saw(RIGHT)
    if rank != absent:
        limit = timedelta(seconds=2 if rank == early else 4)
        saw = stage.observe(lambda: dist.new_group(list(range(stage.world)), timeout=limit))
        saw.kind = WRONG if saw.kind == RIGHT else saw.kind
    stage.meet("over", rank, range(stage.world))
    return saw


SEVERAL, OTHER = (f"a rank of {nodes} nodes never makes a group" for nodes in ("several", "other"))
for _layout, _absent, _early, _row in (
    ((2, 2), 3, -1, SEVERAL),
    ((1, 1, 2), 2, 3, SEVERAL),
    ((2, 2), 0, 3, OTHER),
    ((2, 2), 1, 0, OTHER),
    ((1, 3), 3, 0, OTHER),
    ((3, 2), 4, -1, OTHER),
    ((2, 2, 1), 3, 4, OTHER),
):
    _missing = rf'rank {_absent} \(node "{node_of(_absent, _layout)}", pid \d+\)'
    scene(
        f"rank {_absent} of {_layout} missing, rank {_early} early",
        _row,
        "named on all",
        Promise(
            sees=("SymmTimeoutError", RIGHT),
            says=(rf'^rank \d \(node "[abc]", pid \d+\) waited \d\.\d s for {_missing} to join group ".+"$',),
        ),
        sides=("symm",),
        layout=_layout,
        timeout=30,
    )(partial(stays_away, absent=_absent, early=_early))


@scene(
    "join that failed on some",
    "rank 0 fails twice to join alone, then all join",
    "timeout, twice; then right, although torch numbers groups",
    Promise(within=1.0),
    world=2,
    timeout=20,
    join=False,
)
def _(stage: Stage, rank: int) -> Saw:
    for turn in range(2 if rank == 0 else 0):
        begun = time.monotonic()
        saw = stage.observe(lambda turn=turn: stage.join(rank, name=f"alone-{turn}", timeout=0.3) or False)
        if saw.kind != "SymmTimeoutError" or time.monotonic() - begun > 3:
            saw.kind = WRONG
            return saw
    stage.join(rank)
    dist.all_reduce(tensor := torch.ones(3))
    return Saw(RIGHT if tensor.tolist() == [2.0] * 3 else WRONG)


@scene(
    "a little late",
    "a rank that joins 0.5 s after the other",
    "works, and nothing is said",
    Promise(quiet=True),
    world=2,
    join=False,
    over_tcp=True,
)
def _(stage: Stage, rank: int) -> Saw:
    stage.meet("stores", rank, range(2))
    time.sleep(0.5 * rank)
    stage.join(rank)
    dist.barrier()
    return Saw(RIGHT)

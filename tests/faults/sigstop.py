"""A rank's process is stopped for a while, or does not call: a late rank has not exited."""

from __future__ import annotations

import os
import re
import signal
import time
from functools import partial

import torch
import torch.distributed as dist

from .case import RIGHT, WRONG, Case, Promise, Saw, add
from .deaths import first_cause_stands, waits
from .processes import Layout, Stage, play, scene

TIMEOUT_S = 0.5


def _stopped(stage: Stage, rank: int, seconds: float, culprit: int = 1, timeout: float = 30) -> Saw:
    """The culprit is stopped between collectives by its own child, and continues later."""
    dist.barrier()
    stage.shorten(timeout)
    if rank == culprit:
        stage.now_it_happens()
        child = os.fork()
        if child == 0:
            time.sleep(seconds)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        stage.spare(child)
        os.kill(os.getpid(), signal.SIGSTOP)
    dist_sum = torch.full((1 << 18,), float(rank))

    def calls() -> bool:
        dist.all_reduce(dist_sum)
        return bool((dist_sum == sum(range(stage.world))).all())

    saw = stage.observe(calls)
    if rank == culprit:
        os.waitpid(child, 0)
    return saw


for _name, _seconds, _culprit, _layout in (
    ("stopped, long timeout", 2.0, 1, ()),
    # Longer than the timeout of heartbeats between nodes.
    ("leader of a node stopped", 6.5, 2, (2, 2)),
):
    add(
        Case(
            _name,
            f"SIGSTOP of rank {_culprit} for {_seconds:g} s, group timeout 30 s",
            partial(play, partial(_stopped, seconds=_seconds, culprit=_culprit), layout=_layout, timeout=30, limit=40),
            Promise(sees=(RIGHT,), not_before=_seconds - 0.5, within=_seconds + 1),
            "right",
            where="nodes" if _layout else "both",
        )
    )
scene(
    "stopped, short timeout",
    "SIGSTOP of rank 1 for 1.5 s, group timeout 0.5 s",
    'named, "stopped", 0.5 to 0.6 s',
    Promise(
        sees=("SymmTimeoutError",),
        names=(1,),
        says=(
            r"rank 1: pid \d+ alive, stopped \(T\), finished barrier #1 and began nothing since",
            r"all_reduce\(262144 ",
        ),
        not_before=TIMEOUT_S - 0.1,
        within=TIMEOUT_S + 0.1,
    ),
    where="both",
    limit=20,
    victims=(1,),
)(partial(_stopped, seconds=1.5, timeout=TIMEOUT_S))


def never_calls(stage: Stage, rank: int, wait: str) -> Saw:
    """The last rank makes the call only after the others have timed out."""
    late = stage.world - 1
    dist.all_reduce(torch.zeros(3))
    stage.shorten(TIMEOUT_S)
    if rank == 0:
        stage.now_it_happens()
    stage.meet("finished", rank, range(stage.world))
    if rank == late:
        stage.meet("given up", rank, range(late))
        return stage.observe(lambda: dist.all_reduce(torch.zeros(1000)) is not None)
    saw = stage.observe(waits(stage, late)[wait])
    stage.meet("given up", rank, range(stage.world))
    if not stage.layout:
        first_cause_stands(stage, (late,), saw)
    return saw


def _never_calls(wait: str, says: tuple[str, ...], layout: Layout = ()) -> None:
    scene(
        f"never calls {wait}{f', {layout}' if layout else ''}",
        "a rank that calls nothing, group timeout 0.5 s",
        "named on all with what it does, 0.5 to 0.6 s",
        Promise(sees=("SymmTimeoutError",), says=says, not_before=TIMEOUT_S - 0.1, within=TIMEOUT_S + 0.1),
        sides=("symm",),
        world=3,
        layout=layout,
    )(partial(never_calls, wait=wait))


for _wait in ("all_reduce", "asynchronous all_reduce", "barrier"):
    _call = _wait.split()[-1]
    _bytes = ("4000 bytes",) if _call == "all_reduce" else ()
    _says = (_call, "#2", r"rank 2: pid \d+ alive", "finished all_reduce #1 and began nothing since", *_bytes)
    _never_calls(_wait, _says)
_never_calls(
    "all_reduce",
    (
        r'for rank 3 \(rank 3: pid|node "b" \(ranks 2 and 3\)',
        r"in all_reduce\(1000 × float32, 4000 bytes, SUM\) #",
    ),
    (2, 2),
)


@scene(
    "a message that never comes",
    "a rank that calls nothing, group timeout 0.5 s",
    "named on the rank that waits, 0.5 to 0.6 s",
    Promise(sees=("SymmTimeoutError", RIGHT), says=(r"rank 1.*recv|recv.*rank 1",), within=TIMEOUT_S + 0.1),
    world=2,
)
def _(stage: Stage, rank: int) -> Saw:
    stage.shorten(TIMEOUT_S)
    saw = stage.observe(lambda: dist.recv(torch.zeros(3), 1) is None) if rank == 0 else Saw(RIGHT)
    if rank == 0 and not saw.raised:
        saw.kind = WRONG
    stage.meet("given up", rank, range(2))
    return saw


def late_warnings(stage: Stage, rank: int) -> list[str]:
    """The lines in which a rank warned of a late one."""
    return [line for line in stage.log(rank).splitlines() if "has waited" in line]


@scene(
    "late three times",
    "a rank that calls after more than half the timeout, three times, SYMM_LOG=warn",
    "one warning, which names it",
    Promise(at_most={"other_than_one_warning": 0}),
    sides=("symm",),
    world=2,
    env={"SYMM_LOG": "warn"},
)
def _(stage: Stage, rank: int) -> Saw:
    stage.shorten(4)
    for turn in range(3):
        stage.meet(f"late-{turn}", rank, range(2))
        if rank == 1:
            time.sleep(2.3)
        dist.all_reduce(torch.ones(10))
    warnings = late_warnings(stage, rank)
    right = (len(warnings) == 1 and "rank 1: pid" in warnings[0]) if rank == 0 else not warnings
    return Saw(RIGHT, figures={"other_than_one_warning": float(not right)})


#: The warnings of the ranks of two nodes that wait for rank 3: on the rail, for the rank on the rail, and in its node.
WARNINGS = (
    r'in all_reduce\(.*\) #\d+ of group ".*" for node "b"',
    r'in all_reduce\(.*\) #\d+ of group ".*" for rank 0 \(rank 0: pid \d+ alive, \w+, waits for other nodes\)',
    r'in all_reduce\(.*\) #\d+ of group ".*" for rank 3 \(rank 3: pid \d+ alive, \w+, in no collective\)',
)


@scene(
    "late for other nodes",
    "a rank of several nodes that calls after half the timeout, SYMM_LOG=warn",
    "one warning on each other rank, which names the rank, or its node, and blames no other",
    Promise(at_most={"other_than_the_warning": 0}),
    sides=("symm",),
    layout=(2, 2),
    env={"SYMM_LOG": "warn"},
)
def _(stage: Stage, rank: int) -> Saw:
    stage.shorten(8)
    dist.all_reduce(torch.ones(10))
    if rank == 3:
        # Calls as soon as all others have warned, long before they time out.
        until = time.monotonic() + 7
        while not all(late_warnings(stage, other) for other in range(3)) and time.monotonic() < until:
            time.sleep(0.01)
    dist.all_reduce(torch.ones(10))
    logged = late_warnings(stage, rank)
    right = len(logged) == 1 and re.search(WARNINGS[rank], logged[0]) if rank < 3 else not logged
    return Saw(RIGHT, figures={"other_than_the_warning": float(not right)})

"""A rank exits while one of its operations is in progress: a message, a read of its memory, a join."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from .case import CRASH, RIGHT, WRONG, Case, Outcome, Promise, Saw, add
from .deaths import KILLED, SOON_S, die, failed, first_cause_stands, waits
from .processes import WORLD, Stage, play, scene

PEER = ("SymmPeerError",)
BEGUN = "SIGKILL of rank 1 inside an all_reduce that rank 2 begins later"


@scene(
    "killed in a call that others have not begun",
    BEGUN,
    "< 0.1 s on rank 0, which does not wait for rank 2",
    Promise(sees=PEER, names=(1,), says=("all_reduce",), within=SOON_S),
    world=3,
    timeout=5,
    victims=(1,),
)
def _(stage: Stage, rank: int) -> Saw:
    dist.barrier()
    if rank == 1:
        stage.later(0.2, die)
    if rank == 2 and not stage.meet("heard", rank, (0, 2), 20):
        return Saw(WRONG, "rank 0 has heard nothing")
    saw = stage.observe(lambda: dist.all_reduce(torch.ones(1 << 18)))
    if rank == 2:
        saw.seconds = 0.0
    stage.meet("heard", rank, (0, 2))
    return saw


@scene(
    "killed after a message",
    "SIGKILL of rank 1, whose last message to rank 0 was complete",
    "the message is delivered, no later one is; the death is heard of without a call",
    Promise(
        sees=PEER, names=(1,), says=(KILLED,), at_most={"later_call_s": 1.0}, stretches=("later_call_s",), quiet=True
    ),
    sides=("symm",),
    world=3,
    victims=(1,),
)
def _(stage: Stage, rank: int) -> Saw:
    message = torch.arange(1000, dtype=torch.int32)
    if rank == 1:
        dist.send(message, 0, tag=1)
        stage.meet("sent", rank, range(3))
        die()
    stage.meet("sent", rank, range(3))
    until = time.monotonic() + 5
    while not failed(stage):
        if time.monotonic() > until:
            return Saw(WRONG, "the death is not heard of")
        time.sleep(0.001)
    if rank == 0:
        got = torch.zeros_like(message)
        if dist.recv(got, 1, tag=1) != 1 or not torch.equal(got, message):
            return Saw(WRONG, "the message was not delivered")
    stage.meet("received", rank, (0, 2))
    saw = stage.observe(waits(stage, 2 - rank)["recv"])
    first_cause_stands(stage, (2 - rank, 1), saw)
    return saw


def cut_short(stage: Stage, rank: int, how: str) -> Saw:
    """Rank 0 reads a message from the memory of rank 1, which computes meanwhile; ``how`` cuts the read short."""
    tensor = torch.full((256 << 20,), rank, dtype=torch.uint8)
    abort = stage.backend.abort
    begun, cut = stage.place / "begun", [float("inf")]
    dist.barrier()
    if rank == 1:
        work = dist.isend(tensor, 0)
        while not begun.exists():
            time.sleep(0.001)
        ends = {"sender dies": die, "sender aborts": abort, "sender leaves": dist.destroy_process_group}
        ends.get(how, lambda: None)()
        while not work.is_completed():
            time.sleep(0.001)
        tensor.fill_(7)
        return Saw(RIGHT)

    def watched() -> None:
        while tensor[0] == 0:
            pass
        begun.touch()
        cut[0] = time.monotonic()
        if how == "receiver aborts":
            abort()

    watching = stage.later(0, watched)
    saw = stage.observe(lambda: dist.recv(tensor, 1) == 1)
    ended = time.monotonic()
    watching.join()
    # On a busy node the read may finish before it is cut short.
    early = how != "receiver aborts" or ended < cut[0]
    if saw.kind == RIGHT and not (early and bool((tensor == 1).all())):
        saw.kind = WRONG
    return saw


LARGE = r"in recv\(268435456 bytes, tag 0\)"
for _how, _kind, _text in (
    ("sender dies", "SymmPeerError", rf"^rank 1 \(pid \d+\) has ended.*{LARGE}"),
    ("sender aborts", "SymmPeerError", r"^rank 1 \(pid \d+\) aborted"),
    ("sender leaves", "SymmPeerError", rf"^rank 1 \(pid \d+\) left the group.*{LARGE}"),
    ("receiver aborts", "SymmAbortedError", r"^rank 0 \(pid \d+\) aborted"),
):
    scene(
        f"read cut short: {_how}",
        "a message of 256 MB ends while its receiver reads the sender's memory",
        "an error, unless all of it had come",
        Promise(sees=(_kind, RIGHT), says=(_text,), quiet=True),
        sides=("symm",),
        world=2,
        victims=(1,) if _how == "sender dies" else (),
    )(partial(cut_short, how=_how))


def outlived(stage: Stage, rank: int, message: bool) -> Saw:
    """Rank 0 joins a group with each other rank in turn; that rank then exits."""
    if rank:
        stage.join(1, 2, f"turn-{rank}")
        dist.barrier()
        time.sleep(0.02)
        stage.now_it_happens()
        die()
    heard = []
    for turn in range(1, stage.world):
        stage.join(0, 2, f"turn-{turn}")
        dist.barrier()
        saw = stage.observe(waits(stage, 1)["recv" if message else "all_reduce"])
        if not saw.raised:
            return saw
        heard.append(saw.seconds)
        dist.destroy_process_group()
    saw.seconds, saw.figures["median_s"] = 0.0, statistics.median(heard)
    return saw


for _message in (False, True):
    scene(
        f"ten deaths in {'messages' if _message else 'collectives'}",
        "SIGKILL of the other of two ranks, ten times",
        "the median is < 0.1 s",
        Promise(sees=PEER, says=(r"rank 1 \(pid",), at_most={"median_s": SOON_S}),
        world=11,
        victims=range(1, 11),
        join=False,
    )(partial(outlived, message=_message))


@scene(
    "new group with a dead rank",
    "new_group with a rank that is known to be dead",
    "< 1 s",
    Promise(sees=PEER, says=(rf"rank 2 .*has ended \(killed by {KILLED}",), within=1.0),
    sides=("symm",),
    timeout=40,
    victims=(2,),
)
def _(stage: Stage, rank: int) -> Saw:
    stage.meet("all", rank, range(WORLD))
    if rank == 2:
        die()
    for members in (None, [0, 2]):
        if members is None or rank in members:  # in torch, other ranks would wait until the members have returned
            stage.meet(f"before {members}", rank, (0,))
            saw = stage.observe(lambda members=members: dist.new_group(members, timeout=timedelta(seconds=40)) is None)
            if not saw.raised:
                return saw
    return saw


def sockets() -> dict[str, str]:
    """Inodes of the sockets of groups on this node, by name."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines() if "@symm-" in line]
    return {fields[-1]: fields[-2] for fields in lines}


def own_sockets() -> list[str]:
    """Names of the sockets of groups that this process has open."""
    opened = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            opened.add(os.readlink(f"/proc/self/fd/{name}"))
    return [name for name, inode in sockets().items() if f"socket:[{inode}]" in opened]


def all_killed(side: str) -> Outcome:
    """All ranks are killed at once, and nothing of them remains."""

    def body(stage: Stage, rank: int) -> Saw:
        dist.all_reduce(torch.zeros(1 << 20))
        dist.new_group()
        dist.barrier()
        (Path(folder) / str(rank)).write_text("\n".join(own_sockets()))
        stage.meet("all", rank, range(WORLD))
        die()
        return Saw(WRONG)

    with tempfile.TemporaryDirectory() as folder:
        outcome = play(body, side)
        held = {name for path in Path(folder).iterdir() for name in path.read_text().split()}
    deadline = time.monotonic() + 30
    while held & sockets().keys() and time.monotonic() < deadline:
        time.sleep(0.1)
    if held or side != "symm":
        outcome.figures["sockets_left"] = float(len(held & sockets().keys()))
    return outcome


add(
    Case(
        "all ranks killed",
        "SIGKILL of all ranks",
        all_killed,
        Promise(sees=(CRASH,), at_most={"sockets_left": 0}),
        "no file, socket or process is left",
        where="one",
    )
)


def dies_while_connecting(stage: Stage, rank: int, kind: str) -> Saw:
    """Rank 1 is killed when rank 0 already waits for its address."""
    from torch_symm import _backends

    make: Callable[..., object] = _backends.make
    dist.destroy_process_group()

    def dying(engine: str, name: str, *arguments: object) -> object:
        if rank == 1 and f"{kind}/" in name:
            time.sleep(0.2)
            die()
        return make(engine, name, *arguments)

    _backends.make = dying  # type: ignore[assignment]

    def joined() -> bool:
        stage.join(rank, name="again")
        dist.recv(torch.zeros(4), 1) if rank == 0 else dist.send(torch.zeros(4), 0)
        return False

    return stage.observe(joined)


for _kind in ("symm-rail", "symm-pair"):
    scene(
        f"killed while nodes connect: {_kind}",
        "SIGKILL of a rank whose node connects with another",
        "the rank is named, no thread is left",
        Promise(sees=PEER, says=("rank 1 ",)),
        sides=("symm",),
        layout=(1, 1),
        timeout=60,
        victims=(1,),
    )(partial(dies_while_connecting, kind=_kind))

"""A rank's process ends: in every way, in every place, and what the others see and can do next."""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from . import leftovers
from .case import Case, Outcome, Promise, Saw, add
from .stage import WORLD, Body, Stage, play

#: Gloo's survivors wait for this long; its default is 30 minutes.
TIMEOUT_S = 6.0
SHORTER = f"the group's timeout is {TIMEOUT_S:g} s"


def _new_group(stage: Stage, rank: int, victim: int, saw: Saw) -> None:
    """Leaves the failed group and makes one of the survivors; its figures go into ``saw``."""
    survivors = [r for r in range(stage.world) if r != victim]
    # Those who leave early would tell Gloo's other ranks by closing their connections.
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
        saw.kind = "wrong"


def _killed_within(stage: Stage, rank: int, victim: int, count: int, asynchronous: bool, child: bool) -> Saw:
    """``victim`` is killed from a thread while all ranks call all_reduce again and again."""
    tensor = torch.ones(count)
    dist.barrier()
    if rank == victim:
        if child:
            stage.bystander(30)

        def kill() -> None:
            time.sleep(0.2)
            stage.now_it_happens()
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=kill).start()

    def calls() -> bool:
        deadline = time.monotonic() + 25
        while time.monotonic() < deadline:
            work = dist.all_reduce(tensor, async_op=asynchronous)
            if work is not None:
                work.wait()
        return False

    saw = stage.observe(calls)
    if saw.raised:
        _new_group(stage, rank, victim, saw)
    return saw


def _dies_between(stage: Stage, rank: int, victim: int, end: Callable[[], object]) -> Saw:
    """``victim`` ends between two collectives, while the others wait in the second."""
    dist.barrier()
    if rank == victim:
        time.sleep(0.2)
        stage.now_it_happens()
        end()
    saw = stage.observe(lambda: dist.all_reduce(torch.ones(1000)))
    if saw.raised:
        _new_group(stage, rank, victim, saw)
    return saw


def _uncaught() -> None:
    try:
        raise RuntimeError("a bug of the user's")
    except RuntimeError:
        # As the interpreter would: it runs what libraries have left for the end.
        atexit._run_exitfuncs()
        os._exit(1)


def _segfault() -> None:
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)


LARGE = "SIGKILL of rank 1 inside a 64 MB all_reduce; survivors keep their groups"
MANY = "SIGKILL of rank 1 of 16 inside a 1 MB all_reduce"
CHILD = "the same, while a forked child of the dead rank holds its descriptors"
OTHER = (
    "SIGKILL inside 4 KB operations, of rank 0, with asynchronous work; exception, _exit, SIGSEGV between collectives"
)


def _add(name: str, row: str, body: Body, how: str, victim: int = 1, world: int = WORLD) -> None:
    """``how``: what the message says of the end, where the kernel tells it."""
    crowded = world > WORLD
    promise = Promise(
        sees=("SymmPeerError",),
        names=(victim,),
        says=(rf"{how}|gone", r"#\d+", "group"),
        within=1.0 if crowded else 0.1,
        at_most={"destroy_s": 1.0, "new_group_s": 1.0},
        stretches=("destroy_s", "new_group_s"),
    )
    run = partial(play, body, world=world, timeout=TIMEOUT_S, limit=2.5 * TIMEOUT_S + 10, victims=(victim,))
    target = f"< {promise.within:g} s on all, rank and pid named; a new group < 1 s"
    add(Case(name, row, run, promise, target, SHORTER))


def _within(victim: int = 1, count: int = 16 << 20, asynchronous: bool = False, child: bool = False) -> Body:
    return lambda stage, rank: _killed_within(stage, rank, victim, count, asynchronous, child)


def _between(end: Callable[[], object]) -> Body:
    return lambda stage, rank: _dies_between(stage, rank, 1, end)


KILLED = r"signal 9 \(SIGKILL\)"
_add("killed in 64 MB", LARGE, _within(), KILLED)
_add("killed, child lives", CHILD, _within(child=True), KILLED)
_add("killed in 4 KB", OTHER, _within(count=1 << 10), KILLED)
_add("killed rank 0", OTHER, _within(victim=0), KILLED, victim=0)
_add("killed with async work", OTHER, _within(asynchronous=True), KILLED)
_add("uncaught exception", OTHER, _between(_uncaught), "exit(ed)? (with )?(code |status )?1|left")
_add("_exit", OTHER, _between(lambda: os._exit(3)), "exit(ed)? (with )?(code |status )?3")
_add("segmentation fault", OTHER, _between(_segfault), r"signal 11 \(SIGSEGV\)")
_add("killed among 16 ranks", MANY, _within(count=1 << 18), KILLED, world=16)


TORCHRUN = """
import os, signal, sys, threading, time, torch, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    torch.set_num_threads(1)
    dist.init_process_group(sys.argv[1])
    rank = dist.get_rank()
    dist.all_reduce(tensor := torch.ones(1 << 20))
    if rank == 1:
        def kill():
            time.sleep(0.3)
            open(os.path.join(sys.argv[2], "killed"), "w").write(f"{time.monotonic()} {os.getpid()}")
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Thread(target=kill).start()
    while True:
        dist.all_reduce(tensor)
main()
"""


def torchrun(side: str) -> Outcome:
    """SIGKILL of a rank under torchrun: how long the job lives on, and what its output and error files say."""
    with leftovers.fresh_folder() as place:
        (place / "script.py").write_text(TORCHRUN)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}"]
        command += [f"--log-dir={place / 'logs'}", str(place / "script.py"), side, str(place)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        ended = time.monotonic()
        killed = (place / "killed").read_text().split() if (place / "killed").exists() else ["0", "0"]
        outcome = Outcome(pids={1: int(killed[1])})
        files = filter(_whole, [path.read_text() for path in (place / "logs").rglob("error.json")])
        without = [text for text in files if "rank 1 (pid" not in text]
        line = next(
            (
                text
                for text in done.stderr.splitlines()
                if "Error" in text and re.search(r"rank 1\b", text) and "pid" in text
            ),
            "",
        )
        text = without[0] if without else line
        outcome.saw[0] = Saw("error" if done.returncode else "right", text, ended - float(killed[0]))
        outcome.figures["error_files_without_reason"] = float(len(without))
        return outcome


def _whole(text: str) -> bool:
    """Whether an error file is complete: torchrun may end a survivor that has opened its own and not yet written it."""
    try:
        return bool(json.loads(text))
    except json.JSONDecodeError:
        return False


add(
    Case(
        "killed under torchrun",
        "SIGKILL under torchrun",
        torchrun,
        Promise(
            sees=("error",), names=(1,), says=("SymmPeerError",), within=0.7, at_most={"error_files_without_reason": 0}
        ),
        "the job ends within 0.7 s, the reason in its output and in every error file",
        "seconds until torchrun itself has ended, its own exit included",
    )
)

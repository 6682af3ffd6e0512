"""Programs that end in every way that the interpreter knows: how long each takes, its output, the peers' error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

from . import resource_leaks
from .case import RIGHT, WRONG, Case, Outcome, Promise, Saw, add
from .processes import DUMPED

#: Imports torch once and forks both ranks of every ending; each fork exits like a program.
PROGRAM = """
import atexit, gc, json, os, sys, threading, time, torch, torch.distributed as dist
torch.set_num_threads(1)
gc.freeze()
side, folder, endings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
def started():
    for number in range(len(endings)):
        ranks = {}
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                return number, rank
            ranks[pid] = rank
        while ranks:
            pid, status = os.wait()
            with open(f"{folder}/ended-{number}-{ranks.pop(pid)}", "w") as file:
                file.write(f"{time.monotonic()} {os.waitstatus_to_exitcode(status)}")
    os._exit(0)
number, rank = started()
def note(name, text):
    with open(f"{folder}/{name}-{number}-{rank}", "w") as file:
        file.write(text)
with open(f"{folder}/log-{number}-{rank}", "w") as file:
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
dist.init_process_group(side, init_method=f"file://{folder}/store-{number}", rank=rank, world_size=2)
atexit.register(lambda: note("exiting", str(time.monotonic())))
exec(endings[number])
"""

#: Bodies of both ranks, which must end soon, with exit code 0, and print nothing.
EXITS = {
    "destroyed": "dist.all_reduce(torch.ones(3)); dist.destroy_process_group()",
    "not destroyed": "dist.all_reduce(torch.ones(3))",
    "open work": """
work = dist.all_reduce(torch.ones(1 << 20), async_op=True)
receive = dist.irecv(torch.ones(3), 1 - rank)
""",
    "callbacks": """
for _ in range(50):
    dist.all_reduce(torch.ones(4), async_op=True).get_future().then(lambda done: done.value())
""",
    "a receive of one rank": "dist.barrier()\nif rank == 0: dist.irecv(torch.ones(4), 1)",
    "a call of one rank": "dist.barrier()\nif rank == 0: dist.all_reduce(torch.ones(4), async_op=True)",
    "one rank earlier": """
dist.all_reduce(torch.ones(3))
if rank == 0:
    time.sleep(0.5)
""",
    "failed": """
try:
    dist.all_reduce(torch.ones(3 + rank))
except dist.DistBackendError:
    pass
""",
    "failed, destroyed": """
try:
    dist.all_reduce(torch.ones(3 + rank))
except dist.DistBackendError:
    pass
dist.destroy_process_group()
""",
    "in a thread": """
threading.Thread(target=lambda: dist.all_reduce(torch.ones(3)), daemon=True).start()
time.sleep(0.3)
""",
    **{
        f"a forked child {name}": f"""
dist.all_reduce(torch.ones(3))
pid = os.fork()
if pid == 0:
    {child}
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
dist.all_reduce(tensor := torch.ones(3))
assert tensor.tolist() == [2.0] * 3
"""
        for name, child in (("exits", "pass"), ("destroys the group", "dist.destroy_process_group()"))
    },
}

LEFT = "left the group (destroy_process_group or exit)"
#: Endings of the program of rank 1, and the error text of rank 0.
FAREWELLS = {
    "raise KeyError('x')": "left the group after KeyError: 'x';",
    "raise ValueError('one' + chr(10) + 'two')": "left the group after ValueError: one two;",
    "raise ValueError('é' * 200)": "left the group after ValueError: " + "é" * 56 + "…;",
    "raise ValueError(chr(0xD800))": "left the group after ValueError: ?;",
    "class Odd(Exception): __str__ = None\nraise Odd": "left the group after Odd;",
    "": LEFT,
    # The interpreter does not store a SystemExit, so peers get no reason.
    "sys.exit(3)": LEFT,
    "try: raise KeyError('caught')\nexcept KeyError: pass": LEFT,
}
FAREWELL = """
dist.barrier()
if rank == 1:
    exec({ending!r})
else:
    try:
        dist.all_reduce(torch.ones(4))
    except dist.DistBackendError as error:
        note("heard", str(error))
    # Only the exit of rank 1 is a subject here, and one by the interpreter takes 0.4 s of CPU.
    os._exit(0)
"""


def _exit(place: Path, number: int) -> Saw:
    """Checks how both ranks of an ending exited, and measures the slower one."""
    saw = Saw(RIGHT)
    for rank in range(2):
        ended, code = (place / f"ended-{number}-{rank}").read_text().split()
        log = DUMPED.sub("", (place / f"log-{number}-{rank}").read_text(errors="replace"))
        saw.seconds = max(saw.seconds, float(ended) - float((place / f"exiting-{number}-{rank}").read_text()))
        # torch itself suggests destroy_process_group() for some backends only; no other output is allowed.
        if code != "0" or log:
            saw.kind, saw.text = WRONG, f"{list(EXITS)[number]}, rank {rank}: {code}: {log[-400:]}"
    return saw


def _hears(text: str, expected: str) -> Saw:
    return Saw(RIGHT if "rank 1 (pid " in text and expected in text else WRONG, f"{text!r} lacks {expected!r}")


def programs(side: str) -> Outcome:
    endings = [*EXITS.values(), *(FAREWELL.format(ending=ending) for ending in FAREWELLS)]
    with resource_leaks.fresh_folder() as place:
        # Python 3.12 warns of every fork of a process with threads.
        warnings = ("-W", "error::ResourceWarning", "-W", "ignore:This process:DeprecationWarning")
        command = [sys.executable, *warnings, "-c", PROGRAM, side, str(place), json.dumps(endings)]
        subprocess.run(command, timeout=180, check=True)
        saw = [_exit(place, number) for number in range(len(EXITS))]
        for number, expected in enumerate(FAREWELLS.values(), len(EXITS)):
            heard = place / f"heard-{number}-0"
            saw.append(_hears(heard.read_text() if heard.exists() else "", expected))
        return Outcome(saw=dict(enumerate(saw)))


add(
    Case(
        "programs end",
        f"{len(EXITS)} ways in which both programs end, {len(FAREWELLS)} in which one does",
        programs,
        Promise(within=0.5),
        "< 0.5 s, nothing printed; the other hears of the exception",
        sides=("symm",),
        where="one",
    )
)


def _ends(rank: int, place: str, ending: str) -> None:
    """One of two ranks; rank 0 writes its error to a file."""
    dist.init_process_group("symm", init_method=f"file://{place}/store", rank=rank, world_size=2)
    dist.barrier()
    if rank == 1:
        exec(ending)
        return
    try:
        dist.all_reduce(torch.ones(4))
    except dist.DistBackendError as error:
        Path(place, "heard").write_text(str(error))


def process_ends(side: str, way: str, method: str, ending: str, expected: str) -> Outcome:
    with resource_leaks.fresh_folder() as place:
        if way == "torch.multiprocessing":
            processes = torch.multiprocessing.start_processes(
                _ends, (str(place), ending), nprocs=2, join=False, start_method=method
            ).processes
        else:
            processes = [get_context(method).Process(target=_ends, args=(rank, str(place), ending)) for rank in (0, 1)]
            for process in processes:
                process.start()
        for process in processes:
            process.join(60)
        heard = place / "heard"
        return Outcome(saw={0: _hears(heard.read_text() if heard.exists() else "", expected)})


#: A forked process exits by os._exit, a spawned one like a program.
for _way in ("multiprocessing", "torch.multiprocessing"):
    for _method, _ending, _expected in (
        ("spawn", "raise KeyError('x')", "left the group after KeyError: 'x';"),
        ("fork", "raise KeyError('x')", "left the group after KeyError: 'x';"),
        ("fork", "import sys; sys.exit(3)", "left the group after SystemExit: 3;"),
        ("fork", "", LEFT),
    ):
        add(
            Case(
                f"{_way}, {_method}: {_ending or 'returns'}",
                "a process of multiprocessing that ends without destroying its group",
                partial(process_ends, way=_way, method=_method, ending=_ending, expected=_expected),
                Promise(),
                "the other hears of the exception",
                sides=("symm",),
                where="one",
            )
        )


def _ends_early(rank: int, place: Path) -> None:
    dist.init_process_group("symm", init_method=f"symm+file://{place}/store", rank=rank, world_size=3)
    pids: list[int] = [0] * 3
    dist.all_gather_object(pids, os.getpid())
    if rank == 2:
        return
    with suppress(FileNotFoundError):
        while " Z " not in Path(f"/proc/{pids[2]}/stat").read_text():
            time.sleep(0.01)
    # Long enough for the notification to arrive.
    time.sleep(0.2)
    tensor = torch.full((3,), float(rank))
    if rank == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
        assert tensor.tolist() == [0.0] * 3
    (place / f"right-{rank}").touch()


def leaves_early(side: str) -> Outcome:
    """Rank 2 exits by os._exit: messages between the others must not fail because of that."""
    with resource_leaks.fresh_folder() as place:
        processes = [get_context("fork").Process(target=_ends_early, args=(rank, place)) for rank in range(3)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(30)
        codes = [process.exitcode for process in processes]
        right = codes == [0, 0, 0] and (place / "right-0").exists() and (place / "right-1").exists()
        return Outcome(saw={0: Saw(RIGHT if right else WRONG, str(codes))})


add(
    Case(
        "multiprocessing, while others send",
        "a process of multiprocessing that ends without destroying its group",
        leaves_early,
        Promise(),
        "it leaves in order: the messages of others arrive",
        sides=("symm",),
        where="one",
    )
)

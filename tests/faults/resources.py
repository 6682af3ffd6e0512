"""Many groups, many ranks, and a /dev/shm that is full or read-only."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import statistics
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch_symm

from . import resource_leaks
from .case import RIGHT, WRONG, Case, Outcome, Promise, Saw, add
from .processes import Stage, play, scene

GROUPS = 200
_CLONE_NEWNS = 0x00020000
_MS_RDONLY, _MS_REC, _MS_PRIVATE = 1, 1 << 14, 1 << 18


def many_groups(stage: Stage, rank: int) -> Saw:
    """Two hundred groups at once, all used, then destroyed."""
    dist.destroy_process_group(dist.new_group())
    had = resource_leaks.own()
    dist.barrier()
    begun = time.monotonic()
    groups = [dist.new_group() for _ in range(GROUPS)]
    made = time.monotonic() - begun
    right = True
    for number, group in enumerate(groups):
        dist.all_reduce(tensor := torch.full((3,), float(number)), group=group)
        right &= tensor.tolist() == [number * float(stage.world)] * 3
    more = resource_leaks.own() - had
    for group in groups:
        dist.destroy_process_group(group)
    if stage.side == "symm":
        # The groups have ended although this rank still refers to them.
        right &= not resource_leaks.beyond(had)
        right &= "was destroyed" in stage.observe(lambda: groups[0].allreduce([torch.ones(3)]).wait()).text
    groups.clear()
    del group
    return Saw(
        RIGHT if right else WRONG,
        left=dict(resource_leaks.beyond(had)),
        figures={
            "fds_per_group": more["fds"] / GROUPS,
            "threads_per_group": more["threads"] / GROUPS,
            "ms_per_group": made / GROUPS * 1e3,
        },
    )


add(
    Case(
        "200 groups",
        "200 groups at once",
        partial(play, many_groups, timeout=60, limit=60, over_tcp=True),
        Promise(
            at_most={"fds_per_group": 2.0, "threads_per_group": 1.0, "ms_per_group": 2.0}, stretches=("ms_per_group",)
        ),
        "at most 2 descriptors, 1 thread, 2 ms per group",
        "over torch's TCPStore",
    )
)


def mount(place: Path, full: bool) -> None:
    """Mounts 64 KiB for this process only, full or read-only; raises PermissionError if it may not mount."""
    libc = ctypes.CDLL(None, use_errno=True)
    steps = (
        libc.unshare(_CLONE_NEWNS),
        libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None),
        libc.mount(b"tmpfs", bytes(place), b"tmpfs", ctypes.c_ulong(0 if full else _MS_RDONLY), b"size=64k"),
    )
    if any(steps):
        raise PermissionError(ctypes.get_errno(), "mounting a file system for the case")
    if full:
        (place / "filler").write_bytes(bytes(1 << 16))


def works(rank: int, world: int) -> bool:
    """Returns true if collectives and messages of every size class are right."""
    right = True
    for count in (1, 5_000, 3_000_000):
        dist.all_reduce(tensor := torch.ones(count))
        right &= bool((tensor == world).all())
    received = torch.zeros(1_000_000)
    messages = [
        dist.P2POp(dist.isend, torch.full((1_000_000,), float(rank)), (rank + 1) % world),
        dist.P2POp(dist.irecv, received, (rank - 1) % world),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return right and bool((received == (rank - 1) % world).all())


def in_a_bad_place(stage: Stage, rank: int, kind: str) -> Saw:
    """Joins and works with a /dev/shm or temporary directory of this kind."""
    place = stage.place / "readonly" if kind == "TMPDIR read-only" else stage.place / ("d" * 100) / ("e" * 100)
    if kind.startswith("/dev/shm"):
        mount(Path("/dev/shm"), kind.endswith("full"))
    else:
        place.mkdir(parents=True, exist_ok=True)
        os.environ["TMPDIR"] = str(place)
    if kind == "TMPDIR read-only":
        mount(place, full=False)
    saw = stage.observe(lambda: stage.join(rank) or works(rank, stage.world))
    if kind == "TMPDIR long" and saw.kind == RIGHT:
        refused = stage.observe(lambda: torch_symm.TCPStore(f"unix:{place}/socket", 0, 1, is_master=True) is None)
        if refused.kind != "ValueError" or "at most 107" not in refused.text:
            return refused
    return saw


for _kind in ("/dev/shm full", "/dev/shm read-only", "TMPDIR read-only", "TMPDIR long"):
    scene(
        _kind,
        "/dev/shm full or read-only; TMPDIR read-only, or longer than the 107 bytes of a socket's path",
        "no effect; a socket with a long path is refused by name",
        Promise(),
        sides=("symm",) if _kind == "TMPDIR long" else ("gloo", "symm"),
        world=2,
        join=False,
    )(partial(in_a_bad_place, kind=_kind))


def limit_addresses(more: int) -> None:
    """Limits the process to ``more`` bytes of mappings above its present ones."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + more, resource.getrlimit(resource.RLIMIT_AS)[1]))


@scene(
    "no addresses for the memory",
    "RLIMIT_AS of rank 1 leaves no room for a group's memory",
    "< 1 s on all, with the bytes that are needed and free",
    Promise(
        sees=("SymmConfigError",),
        names=(1,),
        says=(r"out of address space: rank 1 \(pid \d+.* bytes, .*are free of RLIMIT_AS",),
        within=1.0,
    ),
    sides=("symm",),
    world=2,
)
def _(stage: Stage, rank: int) -> Saw:
    """Rank 1 has too few free addresses for the memory of a new group."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    dist.barrier()
    if rank == 1:
        limit_addresses(1 << 20)
    saw = stage.observe(lambda: dist.new_group(timeout=timedelta(seconds=30)) is None)
    resource.setrlimit(resource.RLIMIT_AS, before)
    stage.meet("failed", rank, range(2))
    return saw


def no_thread(stage: Stage, rank: int, send: bool) -> Saw:
    """Rank 1 lacks a thread for a message, so the message is not posted: its memory is unused, and its tag is free."""
    count = 20_000  # too long to be eager, too short for a separate mapping
    saw, before = Saw(RIGHT), resource.getrlimit(resource.RLIMIT_AS)
    dist.barrier()
    if rank == 1:
        tensor, released = torch.full((count,), 3.0), threading.Event()
        # Uses up the stacks that ended threads of Python and of Rust have left.
        for size in (0, 2 << 20):
            usual = threading.stack_size(size)
            for _ in range(6):
                threading.Thread(target=released.wait, daemon=True).start()
            threading.stack_size(usual)
        limit_addresses(1 << 20)
        saw = stage.observe(lambda: (dist.isend if send else dist.irecv)(tensor, 0, tag=5) is None)
        resource.setrlimit(resource.RLIMIT_AS, before)
        released.set()
        saw.kind = WRONG if saw.kind == RIGHT else saw.kind
        tensor.fill_(1)
    dist.barrier()
    if rank == 0 and not send:
        work = dist.isend(torch.full((count,), 666.0), 1, tag=5)
    dist.barrier()
    if rank == 1:
        time.sleep(0.05)
        if not bool((tensor == 1).all()):
            return Saw(WRONG, "the memory was written")
        dist.send(torch.full((7,), 4.0), 0, tag=5) if send else dist.recv(torch.empty(count), 0, tag=5)
    elif send:
        dist.recv(got := torch.zeros(7), 1, tag=5)
        saw.kind = RIGHT if bool((got == 4).all()) else WRONG
    else:
        work.wait()
    return saw


for _send in (True, False):
    scene(
        f"no thread for a {'send' if _send else 'receive'}",
        "RLIMIT_AS of rank 1 leaves no room for a message's thread",
        "an error, and the message is not posted",
        Promise(sees=("DistBackendError", "SymmConfigError", RIGHT), says=("progress thread",)),
        sides=("symm",),
        world=2,
    )(partial(no_thread, send=_send))


@scene(
    "memory that rank 0 cannot have",
    "memory that rank 0 cannot have",
    "an error on all, which has rank 0 and the bytes",
    Promise(sees=("SymmConfigError", "SymmTimeoutError"), names=(0,), within=1.5),
    sides=("symm",),
    world=3,
    join=False,
    timeout=0.5,
)
def _(stage: Stage, rank: int) -> Saw:
    """Rank 0's files, and so its shared memory, may not be longer than 1 MiB."""
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    saw = stage.observe(lambda: stage.join(rank) or False)
    if rank == 0 and not re.search(r"size of shared memory: .*; \d+ bytes are needed", saw.text):
        saw.kind = WRONG
    return saw


def load_generator(stage: Stage, rank: int) -> Saw:
    """More ranks than cores: short calls, timed, and one long one."""
    for _ in range(20):
        dist.all_reduce(torch.ones(2))
    taken, right = [], True
    for turn in range(300):
        tensor = torch.full((2,), float(turn))
        begun = time.monotonic()
        dist.all_reduce(tensor)
        taken.append((time.monotonic() - begun) * 1e3)
        right &= tensor.tolist() == [turn * float(stage.world)] * 2
    dist.all_reduce(large := torch.ones(1 << 20))
    right &= bool((large == stage.world).all())
    taken.sort()
    return Saw(
        RIGHT if right else WRONG,
        figures={"p50_ms": statistics.median(taken), "p99_ms": taken[int(len(taken) * 0.99)]},
    )


def crowded(side: str) -> Outcome:
    return play(load_generator, side, world=4 * max(1, min(4, len(os.sched_getaffinity(0)))), timeout=60, limit=60)


add(
    Case(
        "16 ranks on 4 cores",
        "four times as many ranks as cores (16 on 4), all_reduce of 8 bytes",
        crowded,
        Promise(at_most={"p99_ms": 20.0}, stretches=("p99_ms",)),
        "right, p99 < 20 ms",
    )
)

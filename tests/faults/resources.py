"""Many groups, many ranks, and a /dev/shm that is full or may not be written."""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from functools import partial

import torch
import torch.distributed as dist

from . import leftovers
from .case import RIGHT, WRONG, Case, Outcome, Promise, Saw, add
from .stage import Stage, play

GROUPS = 200
_CLONE_NEWNS = 0x00020000
_MS_RDONLY, _MS_REC, _MS_PRIVATE = 1, 1 << 14, 1 << 18


def many_groups(stage: Stage, rank: int) -> Saw:
    """Two hundred groups at once, all used, then destroyed."""
    dist.destroy_process_group(dist.new_group())
    had = leftovers.own()
    dist.barrier()
    begun = time.monotonic()
    groups = [dist.new_group() for _ in range(GROUPS)]
    made = time.monotonic() - begun
    right = True
    for number, group in enumerate(groups):
        dist.all_reduce(tensor := torch.full((3,), float(number)), group=group)
        right &= tensor.tolist() == [number * float(stage.world)] * 3
    more = leftovers.own() - had
    for group in groups:
        dist.destroy_process_group(group)
    del groups, group
    return Saw(
        RIGHT if right else WRONG,
        left=dict(leftovers.beyond(had)),
        figures={
            "fds_a_group": more["fds"] / GROUPS,
            "threads_a_group": more["threads"] / GROUPS,
            "ms_a_group": made / GROUPS * 1e3,
        },
    )


add(
    Case(
        "200 groups",
        "200 groups at once",
        partial(play, many_groups, timeout=60, limit=60, over_tcp=True),
        Promise(at_most={"fds_a_group": 2.0, "threads_a_group": 1.0, "ms_a_group": 2.0}, stretches=("ms_a_group",)),
        "at most 2 descriptors, 1 thread, 2 ms a group",
        "over torch's TCPStore",
    )
)


def in_small_shm(stage: Stage, rank: int, full: bool) -> Saw:
    """Joins and sums with a /dev/shm of its own, which is full or read-only."""
    libc = ctypes.CDLL(None, use_errno=True)

    def mount(source: bytes | None, kind: bytes | None, flags: int, data: bytes | None) -> None:
        target = b"/" if source is None else b"/dev/shm"
        if libc.mount(source, target, kind, ctypes.c_ulong(flags), data) != 0:
            raise PermissionError(ctypes.get_errno(), "mounting a /dev/shm for the case")

    if libc.unshare(_CLONE_NEWNS) != 0:
        raise PermissionError(ctypes.get_errno(), "a mount namespace for the case")
    mount(None, None, _MS_REC | _MS_PRIVATE, None)
    mount(b"tmpfs", b"tmpfs", 0 if full else _MS_RDONLY, b"size=64k")
    if full:
        with open("/dev/shm/filler", "wb", buffering=0) as filler:
            try:
                while filler.write(bytes(4096)):
                    pass
            except OSError:
                pass

    def joined() -> bool:
        stage.join(rank)
        dist.all_reduce(tensor := torch.ones(4 << 20))
        return bool((tensor == stage.world).all())

    return stage.observe(joined)


for _full in (True, False):
    add(
        Case(
            f"/dev/shm {'full' if _full else 'read-only'}",
            "/dev/shm full or read-only",
            partial(play, partial(in_small_shm, full=_full), join=False, timeout=10),
            Promise(),
            "no effect",
        )
    )


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

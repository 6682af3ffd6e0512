"""The system: kernel, cores, memory, descriptors, namespaces. Needs neither torch nor the native part."""

from __future__ import annotations

import os
import platform
import resource
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch_symm._live import files
from torch_symm._repr import counted
from torch_symm.launch.messages import sentence
from torch_symm.tools.command import overloaded

from . import cgroup
from .limits import CPU_RANKS
from .report import Problem, Section

#: The oldest supported kernel.
KERNEL = (5, 3)
#: The file by which ranks identify their machine.
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
#: Minimum number of file descriptors for stores and symmetric memory of some ranks.
DESCRIPTORS = 1024
#: File descriptors that torch's store needs in addition: 15 were counted on 2026-11-23 with torch 2.11.
STORE = 16
#: Below this size in bytes, free memory is scarce.
MEMORY = 512 << 20
#: Namespaces that all ranks must share, and the inode of the machine's own one; ``None`` if the inode is not fixed.
NAMESPACES = {"pid": 4026531836, "ipc": 4026531839, "net": None, "user": 4026531837, "time": 4026531834}


def system() -> Section:
    """Reports kernel and processor, and whether they are supported."""
    release, machine = platform.release(), platform.machine()
    found = {"system": platform.system(), "kernel": release, "machine": machine}
    problems = []
    if platform.system() != "Linux":
        problems.append(Problem(f"{platform.system()} is not supported", "run it on Linux", fatal=True))
    elif _numbers(release) < KERNEL:
        oldest = ".".join(map(str, KERNEL))
        problems.append(Problem(f"Linux {release} is too old", f"Linux {oldest} or newer is needed", fatal=True))
    elif not Path("/proc/self/stat").exists():
        problems.append(Problem("/proc is not mounted", "mount -t proc proc /proc", fatal=True))
    elif refused := _tried(BOOT_ID.read_bytes):
        text = f"{BOOT_ID} cannot be read: {refused}"
        problems.append(Problem(text, "mount all of /proc, and leave this path unmasked", fatal=True))
    if machine != "x86_64":
        problems.append(Problem(f"{machine} is not supported", "run it on x86-64"))
    return Section("system", found, [f"{platform.system()} {release}, {machine}"], problems)


def _numbers(release: str) -> tuple[int, ...]:
    parts = release.replace("-", ".").split(".")[:2]
    return tuple(int(part) for part in parts if part.isdigit())


def cores(ranks: int) -> Section:
    """Reports the cores that this process may use, compared with ``ranks``."""
    affinity, allowed = len(os.sched_getaffinity(0)), cgroup.cores_allowed()
    usable = affinity if allowed is None else min(affinity, allowed)
    found = {"cores": affinity, "limit": allowed, "ranks": ranks, "load": os.getloadavg()[0]}
    limited = "" if usable == affinity else f", of which a control group allows the time of {usable:g}"
    problems = []
    if ranks > usable:
        remedy = f"start at most {max(1, int(usable))}; more work, but slowly, since whoever waits gives its core away"
        problems.append(Problem(f"{ranks} ranks would share {usable:g} cores", remedy))
    if busy := overloaded():
        problems.append(Problem(busy, "end them, or wait: until then collectives are slow and times say little"))
    if ranks > CPU_RANKS:
        problems.append(Problem(f"a group has at most {CPU_RANKS} ranks, not {ranks}", "start fewer", fatal=True))
    return Section(
        "cores", found, [f"{affinity}{limited}, for {counted(ranks, 'rank')}; load {os.getloadavg()[0]:.1f}"], problems
    )


def memory() -> Section:
    """Reports free memory, and limits on addresses and files."""
    free, problems = cgroup.memory_free(), []
    if free is not None and free[0] < MEMORY:
        text = f"only {_shown(free[0])} of memory are free {free[1]}"
        problems.append(Problem(text, "free some, or raise the container's memory limit"))
    found: dict[str, Any] = {"free_bytes": free and free[0], "limited_by": free and free[1]}
    # Shared memory is a file, so the limit on files applies to it.
    for key, number, name, what, option in (
        ("address_space_bytes", resource.RLIMIT_AS, "RLIMIT_AS", "a process have {} of addresses", "-v"),
        ("file_bytes", resource.RLIMIT_FSIZE, "RLIMIT_FSIZE", "a file, shared memory too, have {}", "-f"),
    ):
        limit = resource.getrlimit(number)[0]
        found[key] = None if limit == resource.RLIM_INFINITY else limit
        if limit != resource.RLIM_INFINITY:
            text = f"{name} lets {what.format(_shown(limit))}; groups may not get enough"
            problems.append(Problem(text, f"ulimit {option} unlimited"))
    line = "unknown" if free is None else f"{_shown(free[0])} free {free[1]}"
    return Section("memory", found, [line, "/dev/shm is not used"], problems)


def descriptors(ranks: int) -> Section:
    """Reports the limit on open file descriptors, compared with the needs of a group of ``ranks``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        is_open = len(os.listdir("/proc/self/fd")) - 1
    except OSError:
        is_open = 0
    # Rank 0 holds the pidfds and connections of all others, a socket, the memory, and the membership; and torch's store
    # with a connection per rank.
    needed = is_open + 2 * (ranks - 1) + 3 + STORE + ranks
    found: dict[str, Any] = {"soft": soft, "hard": hard, "open": is_open, "needed": needed}
    taken = f"a group of {counted(ranks, 'rank')} takes {needed - is_open} more"
    line = f"{is_open} open of {soft} (hard limit {hard}); {taken}"
    problems = []
    if soft < needed:
        text = f"RLIMIT_NOFILE {soft} is too low: a group of {counted(ranks, 'rank')} needs {needed} descriptors"
        problems.append(Problem(text, f"ulimit -n {max(DESCRIPTORS, needed)}", fatal=True))
    elif soft < DESCRIPTORS:
        text = f"RLIMIT_NOFILE {soft} is low: stores, GPUs and symmetric memory need descriptors, too"
        problems.append(Problem(text, f"ulimit -n {DESCRIPTORS}"))
    return Section("descriptors", found, [line], problems)


def namespaces() -> Section:
    """Reports the namespaces and the user, which all ranks must share."""
    found: dict[str, Any] = {"uid": os.geteuid(), "pid_of_this": os.getpid()}
    own = []
    for name, initial in NAMESPACES.items():
        try:
            found[name] = int(os.readlink(f"/proc/self/ns/{name}").partition("[")[2].rstrip("]"))
        except (OSError, ValueError):
            found[name] = None
            continue
        if initial not in (None, found[name]):
            own.append(name)
    kind = f"{', '.join(own)} of a container" if own else "the machine's"
    return Section("namespaces", found, [f"{kind}; user {found['uid']}. All ranks must have the same"], [])


def folders() -> Section:
    """Reports where the last calls of failed groups are written."""
    folder = files.folder()
    unfit = _unfit(folder)
    problems = []
    if unfit:
        text = f"{folder} {unfit}: groups that fail leave no trace of their last calls"
        problems.append(Problem(text, "set SYMM_TRACE_DIR to a folder of this user's to which no other user may write"))
    return Section("traces", {"folder": str(folder), "writable": not unfit}, [f"go to {folder}"], problems)


def _unfit(folder: Path) -> str:
    """Returns why groups do not write to ``folder``; empty if they do. The core makes the same checks."""
    if not folder.is_symlink() and not folder.exists():
        return "" if writable(folder) else "cannot be made"
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return "is a symbolic link or no folder"
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}, not to {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "can be written by others"
    return "" if writable(folder) else "cannot be written to"


def writable(folder: Path) -> bool:
    """Returns true if a file can be made in ``folder``, or where it would be made; leaves no file."""
    existing = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    return not _tried(lambda: tempfile.TemporaryFile(dir=existing).close())


def _tried(step: Callable[[], object]) -> str:
    """Returns why ``step`` fails; empty if it does not."""
    try:
        step()
    except (OSError, AttributeError) as error:
        return sentence(error)
    return ""


def _shown(count: int) -> str:
    return f"{count >> 30} GiB" if count >= 10 << 30 else f"{count >> 20} MiB"

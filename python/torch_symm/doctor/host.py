"""What the system gives: kernel, cores, memory, descriptors, namespaces. Needs neither torch nor the native part."""

from __future__ import annotations

import mmap
import os
import platform
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import cgroup
from .child import sentence
from .limits import CPU_RANKS
from .report import Problem, Section, counted

#: Oldest kernel that has what is used.
KERNEL = (5, 3)
#: Descriptors below which stores and symmetric memory of some ranks may find none.
DESCRIPTORS = 1024
#: What a process with torch's store holds besides: it counted 15 on 2026-11-23, torch 2.11.
STORE = 16
#: Bytes below which little memory is free.
MEMORY = 512 << 20
#: Namespaces that all ranks must share, with the inode that the kernel gives to the machine's own; ``None``: to any.
NAMESPACES = {"pid": 4026531836, "ipc": 4026531839, "net": None, "user": 4026531837, "time": 4026531834}


def system() -> Section:
    """Kernel and processor: whether this is a machine of the kind that is supported."""
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
    if machine != "x86_64":
        problems.append(Problem(f"{machine} is not supported", "run it on x86-64"))
    return Section("system", found, [f"{platform.system()} {release}, {machine}"], problems)


def _numbers(release: str) -> tuple[int, ...]:
    parts = release.replace("-", ".").split(".")[:2]
    return tuple(int(part) for part in parts if part.isdigit())


def cores(ranks: int) -> Section:
    """Cores that this process may use, beside ``ranks``."""
    affinity, allowed = len(os.sched_getaffinity(0)), cgroup.cores_allowed()
    usable = affinity if allowed is None else min(affinity, allowed)
    found = {"cores": affinity, "limit": allowed, "ranks": ranks, "load": os.getloadavg()[0]}
    limited = "" if usable == affinity else f", of which a control group allows the time of {usable:g}"
    problems = []
    if ranks > usable:
        remedy = f"start at most {max(1, int(usable))}; more work, but slowly, since whoever waits gives its core away"
        problems.append(Problem(f"{ranks} ranks would share {usable:g} cores", remedy))
    if ranks > CPU_RANKS:
        problems.append(Problem(f"a group has at most {CPU_RANKS} ranks, not {ranks}", "start fewer", fatal=True))
    return Section(
        "cores", found, [f"{affinity}{limited}, for {counted(ranks, 'rank')}; load {os.getloadavg()[0]:.1f}"], problems
    )


def memory() -> Section:
    """Memory that is free, shared memory tried, and a limit on addresses."""
    free, problems = cgroup.memory_free(), []
    refused = _tried(_share)
    if refused:
        remedy = "allow memfd_create in the container's seccomp profile, and sealed files in vm.memfd_noexec"
        problems.append(Problem(f"memory cannot be shared: {refused}", remedy, fatal=True))
    if free is not None and free[0] < MEMORY:
        text = f"only {_shown(free[0])} of memory are free {free[1]}"
        problems.append(Problem(text, "free some, or raise the container's memory limit"))
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    addresses = None if limit == resource.RLIM_INFINITY else limit
    if addresses is not None:
        text = f"RLIMIT_AS lets a process have {_shown(addresses)} of addresses; groups may not get enough"
        problems.append(Problem(text, "ulimit -v unlimited"))
    found = {
        "free_bytes": free and free[0],
        "limited_by": free and free[1],
        "shared_memory": refused or "ok",
        "address_space_bytes": addresses,
    }
    line = "unknown" if free is None else f"{_shown(free[0])} free {free[1]}"
    shared = "fails" if refused else "works"
    return Section("memory", found, [line, f"shared memory (memfd) {shared}; /dev/shm is not used"], problems)


def _share() -> None:
    """Makes, sizes, maps and writes shared memory, as a group does."""
    descriptor = os.memfd_create("symm-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        with mmap.mmap(descriptor, mmap.PAGESIZE) as mapped:
            mapped[:1] = b"1"
    finally:
        os.close(descriptor)


def descriptors(ranks: int) -> Section:
    """The limit on open descriptors, beside what joining a group of ``ranks`` takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        is_open = len(os.listdir("/proc/self/fd")) - 1
    except OSError:
        is_open = 0
    # Rank 0 holds all others' processes and connections, a socket, the memory, and the membership; and torch's store
    # with a connection of each rank.
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
    refused = _tried(lambda: os.close(os.pidfd_open(os.getpid())))
    found["pidfd"] = refused or "ok"
    if refused:
        remedy = "allow pidfd_open in the container's seccomp profile"
        problems.append(Problem(f"processes cannot be watched: {refused}", remedy, fatal=True))
    return Section("descriptors", found, [line], problems)


def namespaces() -> Section:
    """The namespaces and the user that all ranks must have in common."""
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
    """Where the last calls of groups that failed are kept."""
    temporary = os.environ.get("TMPDIR", "")
    named = os.environ.get("SYMM_TRACE_DIR", "").strip()
    folder = Path(named if named.startswith("/") else temporary if temporary.startswith("/") else "/tmp")
    usable = writable(folder)
    problems = []
    if not usable:
        text = f"{folder} cannot be written to: groups that fail leave no trace of their last calls"
        problems.append(Problem(text, "set SYMM_TRACE_DIR to a folder that can be"))
    return Section("traces", {"folder": str(folder), "writable": usable}, [f"go to {folder}"], problems)


def writable(folder: Path) -> bool:
    """Whether a file can be made in ``folder``, or in the folder in which it would be made; leaves none."""
    existing = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    return not _tried(lambda: tempfile.TemporaryFile(dir=existing).close())


def _tried(step: Callable[[], object]) -> str:
    """Why ``step`` fails; empty if it does not."""
    try:
        step()
    except (OSError, AttributeError) as error:
        return sentence(error)
    return ""


def _shown(count: int) -> str:
    return f"{count >> 30} GiB" if count >= 10 << 30 else f"{count >> 20} MiB"

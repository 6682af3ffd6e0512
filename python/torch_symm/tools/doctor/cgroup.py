"""The limits of this process's control groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

#: The usual mount point of both versions.
MOUNT = Path("/sys/fs/cgroup")


def memory_free(proc: Path = Path("/proc"), mount: Path = MOUNT) -> tuple[int, str] | None:
    """Returns the bytes that are still available, without swap, and their limit's name; ``None`` if unknown.

    Memory that the kernel can drop counts as free.
    """
    found: list[tuple[int, str]] = []
    if (available := _field(proc / "meminfo", "MemAvailable:")) is not None:
        found.append((available * 1024, "on this machine"))
    for folder, two in _folders("memory", proc, mount):
        limit = _number(folder / ("memory.max" if two else "memory.limit_in_bytes"))
        used = _number(folder / ("memory.current" if two else "memory.usage_in_bytes"))
        # Version 1 writes a huge number for no limit.
        if limit is None or used is None or limit >= 1 << 62:
            continue
        caches = ("active_file", "inactive_file") if two else ("total_active_file", "total_inactive_file")
        dropped = sum(_field(folder / "memory.stat", name) or 0 for name in caches)
        found.append((max(0, limit - max(0, used - dropped)), f"in the memory cgroup {folder}"))
    return min(found, default=None)


def cores_allowed(proc: Path = Path("/proc"), mount: Path = MOUNT) -> float | None:
    """Returns the number of cores that the groups allow; ``None`` if they set no limit."""
    found = []
    for folder, two in _folders("cpu", proc, mount):
        if two:
            quota, _, period = _text(folder / "cpu.max").partition(" ")
        else:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        # "max" and -1 mean no limit.
        if quota.isdigit() and period.isdigit() and int(period):
            found.append(int(quota) / int(period))
    return min(found, default=None)


def _folders(controller: str, proc: Path, mount: Path) -> Iterator[tuple[Path, bool]]:
    """Yields the directories of this process's groups, innermost first, and whether they have version 2."""
    for line in _text(proc / "self/cgroup").splitlines():
        _, controllers, inside = ([*line.split(":", 2), "", ""])[:3]
        if controllers and controller not in controllers.split(","):
            continue
        places = (mount / controller,) if controllers else (mount, mount / "unified")
        for place in places:
            # In a container, the mount shows only a subtree, whose root is the container's own group.
            inner = place / inside.lstrip("/")
            start = inner if inner.is_dir() else place
            for folder in (start, *start.parents):
                if not folder.is_relative_to(place):
                    break
                yield folder, not controllers


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdigit() else None


def _field(path: Path, name: str) -> int | None:
    for line in _text(path).splitlines():
        words = line.split()
        if words[:1] == [name] and words[1].isdigit():
            return int(words[1])
    return None

"""Cores, caches and memory nodes as Linux shows them, and which of them this process may use."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch_symm._repr import counted
from torch_symm.tools.bench.machine import cpu_model
from torch_symm.tools.doctor import cgroup
from torch_symm.tools.doctor.report import Section

SYSTEM = Path("/sys/devices/system")


def numbers(text: str) -> list[int]:
    """Parses a list such as ``0-3,8``."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def ranges(cores: Iterable[int]) -> str:
    """Formats numbers as ``0-3,8``."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][1] + 1:
            parts[-1][1] = core
        else:
            parts.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def section(ranks: int, system: Path = SYSTEM) -> Section:
    """Reports the processor, for ``ranks`` ranks."""
    usable = sorted(os.sched_getaffinity(0))
    allowed = cgroup.cores_allowed()
    nodes = _nodes(system) or {0: usable}
    caches = _caches(system, usable)
    physical = {tuple(numbers(_text(system / f"cpu/cpu{core}/topology/core_cpus_list"))) or (core,) for core in usable}
    sockets = {_text(system / f"cpu/cpu{core}/topology/physical_package_id") or "0" for core in usable}
    found: dict[str, Any] = {
        "model": cpu_model(),
        "usable": usable,
        "cores": len(physical),
        "threads": [list(core) for core in sorted(physical)],
        "ranks": ranks,
        "sockets": len(sockets),
        "limit": allowed,
        "nodes": {str(node): cores for node, cores in nodes.items()},
        "caches": caches,
    }
    lines = [f"{found['model']}: {counted(len(sockets), 'socket')}, {counted(len(physical), 'core')}"]
    lines[0] += f", {counted(len(usable), 'hardware thread')} usable ({ranges(usable)})"
    if allowed is not None:
        lines.append(f"a control group allows the time of {allowed:g} of them")
    for node, cores in nodes.items():
        mine = [core for core in cores if core in usable]
        lines.append(f"NUMA node {node}: hardware threads {ranges(cores)}, usable {ranges(mine) or 'none'}")
    for cache in caches:
        shared = " | ".join(ranges(group) for group in cache["shared"][:8])
        more = f" and {len(cache['shared']) - 8} more" if len(cache["shared"]) > 8 else ""
        lines.append(f"{cache['name']}: {cache['size']} each, of threads {shared}{more}")
    share = min(len(usable), allowed or len(usable)) / ranks
    lines.append(
        f"{counted(ranks, 'rank')}: each may run on any of {ranges(usable)}, as nothing pins them; "
        f"{share:.2g} hardware thread{'' if share == 1 else 's'} a rank"
        + ("" if share >= 1 else ", so they wait for each other's time slices")
    )
    return Section("processor", found, lines)


def _nodes(system: Path) -> dict[int, list[int]]:
    folders = (system / "node").glob("node[0-9]*")
    return {
        int(path.name[4:]): numbers(_text(path / "cpulist")) for path in sorted(folders, key=lambda p: int(p.name[4:]))
    }


def _caches(system: Path, usable: Iterable[int]) -> list[dict[str, Any]]:
    """Returns data caches, level by level, and the groups of hardware threads that share one."""
    found: dict[tuple[int, str], set[tuple[int, ...]]] = {}
    for core in usable:
        for index in sorted((system / f"cpu/cpu{core}/cache").glob("index[0-9]*")):
            level, kind = _text(index / "level"), _text(index / "type")
            if kind != "Instruction" and level.isdecimal():
                group = tuple(numbers(_text(index / "shared_cpu_list"))) or (core,)
                found.setdefault((int(level), _text(index / "size")), set()).add(group)
    return [
        {
            "name": "L1d" if level == 1 else f"L{level}",
            "size": size,
            "shared": [list(group) for group in sorted(groups)],
        }
        for (level, size), groups in sorted(found.items())
    ]


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""

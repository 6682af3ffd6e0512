"""What a figure has to be quoted with: date, CPU, load, versions, and how busy others kept the cores."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch


def cpu_model() -> str:
    """The first ``model name`` of /proc/cpuinfo, or what the platform calls itself."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit of the source tree around this file, with ``+`` if it has changes; None outside one."""
    here = Path(__file__).resolve().parent
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=here, capture_output=True, text=True, timeout=10, check=True
        )
        changes = subprocess.run(
            ["git", "status", "--porcelain"], cwd=here, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "")


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def loadavg() -> list[float]:
    """The load average over 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]


@dataclass(frozen=True)
class Machine:
    """Where and when a run took place."""

    date: str
    cpu: str
    cores: int
    kernel: str
    python: str
    torch: str
    commit: str | None
    loadavg: list[float]


def describe() -> Machine:
    """The machine as it is now."""
    return Machine(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        cpu=cpu_model(),
        cores=usable_cores(),
        kernel=platform.release(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        commit=commit(),
        loadavg=loadavg(),
    )


def busy_seconds() -> float:
    """Core-seconds that all processes of the machine have used since boot; 0 where /proc/stat is missing."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")

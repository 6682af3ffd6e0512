"""The data that must accompany a figure: date, CPU, load, versions, and how busy other processes kept the cores."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

# NVLink multicast takes resources that the GPUs of a node share; a program that exits abnormally can leave them taken.
MULTICAST_SETTINGS = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


def cpu_model() -> str:
    """Returns the first ``model name`` of /proc/cpuinfo, or the platform's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """Returns the commit of the source tree around this file, with ``+`` if it has changes; otherwise None."""
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
    """Returns the number of cores on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def loadavg() -> list[float]:
    """Returns the load average over 1, 5 and 15 minutes."""
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
    """Describes the machine as it is now."""
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


@dataclass(frozen=True)
class Gpus:
    """The GPUs of a run and their software; ``settings``: the environment's settings of multicast."""

    names: list[str]
    driver: str | None
    cuda: str | None
    nccl: str | None
    settings: dict[str, str]

    def summary(self) -> str:
        """Returns the GPUs and versions in one line."""
        if not self.names:
            return "no GPU"
        kinds = ", ".join(f"{self.names.count(name)} × {name}" for name in dict.fromkeys(self.names))
        return f"{kinds}, driver {self.driver}, CUDA {self.cuda}, NCCL {self.nccl}"


def describe_gpus(count: int) -> Gpus:
    """Describes the first ``count`` GPUs through nvidia-smi, so that this process gets no context on any."""
    names, driver = [], None
    if count:
        try:
            requested = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
            answer = subprocess.run(requested, capture_output=True, text=True, timeout=30, check=True).stdout
            lines = [line.rpartition(",") for line in answer.strip().splitlines()[:count]]
            names, driver = [name.strip() for name, _, _ in lines], lines[0][2].strip() if lines else None
        except (OSError, subprocess.SubprocessError):
            names = ["unknown GPU"] * count
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if count else None  # type: ignore[no-untyped-call]
    settings = {name: os.environ[name] for name in MULTICAST_SETTINGS if name in os.environ}
    return Gpus(names, driver, torch.version.cuda, nccl, settings)


def busy_seconds() -> float:
    """Core-seconds that all processes of the machine have used since boot; 0 if /proc/stat is missing."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")

"""Judges versions, the native part, settings and algorithms."""

from __future__ import annotations

import os
import platform
import re
from typing import Any

from torch_symm import _version
from torch_symm._native import built
from torch_symm._repr import counted
from torch_symm.tools.bench.units import format_size

from .probe_result import MISSING, Probed
from .report import Problem, Section

#: Warnings about settings in the log.
COMPLAINT = re.compile(r"\[WARN  symm::config [^]]*\] (.*)")
#: Relevant settings of other software.
OTHERS = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TORCH_DEVICE_BACKEND_AUTOLOAD", "TORCH_SYMMMEM", "TMPDIR")


def versions(probed: Probed) -> Section:
    """Reports the versions of all relevant software, and whether torch can be imported and finds the backend."""
    torch, driver, python = probed.of("torch"), probed.of("driver"), platform.python_version()
    found = {
        "torch_symm": _version.__version__,
        "torch": torch.get("version"),
        "python": python,
        "cuda": torch.get("cuda"),
        "driver": driver.get("version"),
        "driver_cuda": driver.get("cuda"),
    }
    problems = []
    if error := probed.errors.get("child"):
        problems.append(Problem(error, "free descriptors, memory or processes", fatal=True))
    elif error := probed.errors.get("torch"):
        remedy = f"pip install '{_version.TORCH_REQUIREMENT}'"
        if error != MISSING:
            remedy = f"`python -c 'import torch'` shows all of it; else {remedy} anew"
        problems.append(Problem(error, remedy, fatal=True))
    elif not torch["distributed"]:
        text = "this torch was built without torch.distributed"
        problems.append(Problem(text, "install torch's own wheels", fatal=True))
    elif torch["unregistered"]:
        text = f"torch does not take backend symm: {torch['unregistered']}"
        problems.append(Problem(text, f"install torch_symm anew, for torch {torch['version']}", fatal=True))
    elif not torch["found_by_torch"]:
        problems.append(_unknown_to_torch())
    cuda = f"built for CUDA {found['cuda']}" if found["cuda"] else "built without CUDA"
    shown = f"torch {found['torch']} ({cuda})" if found["torch"] else "no torch"
    served = ".".join(map(str, driver.get("cuda", ())))
    driven = f"driver {driver.get('version', 'unknown')} (CUDA {served})" if driver else "no NVIDIA driver"
    lines = [f"torch_symm {found['torch_symm']}, {shown}, Python {python}", driven]
    return Section("versions", found, lines, problems)


def _unknown_to_torch() -> Problem:
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        text, remedy = "TORCH_DEVICE_BACKEND_AUTOLOAD keeps torch from looking for backends", "unset it"
    else:
        text, remedy = "torch_symm can be imported, but is not installed: torch does not find it", "pip install it"
    return Problem(text, f"{remedy}, or begin programs with `import torch_symm`")


def native(probed: Probed) -> Section:
    """Reports which shared object is loaded, and for which torch it was built."""
    minor = ".".join((probed.of("torch").get("version") or "").split(".")[:2])
    found = {"file": probed.of("native").get("file"), "for_torch": minor, "built_for": built(), "error": ""}
    if probed.works:
        version, problems = probed.of("native")["version"], []
        if version != _version.__version__:
            text = f"the native part is of torch_symm {version}, the package of {_version.__version__}"
            problems.append(Problem(text, "install torch_symm anew", fatal=True))
        others = ", ".join(other for other in built() if other != minor)
        line = f"{found['file']}, for torch {minor}" + (f" (there are others for {others})" if others else "")
        return Section("native", found, [line], problems)
    error = probed.errors.get("native", "not tried")
    found["error"] = error
    if "native" not in probed.errors:
        return Section("native", found, [error])
    text, _, remedy = error.removeprefix("ImportError: ").partition(": ")
    if not text.startswith("torch_symm ") or not remedy:
        text = f"the native part cannot be loaded: {error}"
        remedy = f"install torch_symm anew, with '{_version.TORCH_REQUIREMENT}', for this Python"
    return Section("native", found, ["cannot be loaded, see below"], [Problem(text, remedy, fatal=True)])


def settings(probed: Probed) -> Section:
    """Reports the variables that are set, and which of them have no effect."""
    own = {name: _shown(name, value) for name, value in sorted(os.environ.items()) if name.startswith("SYMM_")}
    others = {name: os.environ[name] for name in OTHERS if name in os.environ}
    complaints = [found[1] for found in map(COMPLAINT.match, probed.log.splitlines()) if found]
    found: dict[str, Any] = {"set": own, "others": others, "ignored": complaints}
    problems = [Problem(text, "docs/guide/settings.md has all settings") for text in complaints]
    shown = [f"{name}={value}" for name, value in {**own, **others}.items()]
    return Section("settings", found, shown or ["all as by default"], problems)


def _shown(name: str, value: str) -> str:
    return "(not shown)" if "SECRET" in name else value


def collectives(probed: Probed) -> list[Section]:
    """Reports the algorithm of each collective and size, for each device."""
    sections = []
    for device in ("cpu", "cuda"):
        found, error = probed.of(device), probed.errors.get(device)
        if error:
            text = f"no algorithms can be shown for {device}: {error}"
            sections.append(
                Section(
                    device, {"error": error}, [text], [Problem(text, "see SYMM_COST_PROFILE and SYMM_TOPOLOGY_FILE")]
                )
            )
        elif found:
            sections.append(Section(device, dict(found), _table(found)))
    return sections


def _table(found: Any) -> list[str]:
    rows = [
        [
            counted(found["ranks"], "rank"),
            *(format_size(int(size)) for size in next(iter(found["algorithms"].values()))),
        ]
    ]
    rows += [[op, *by_size.values()] for op, by_size in found["algorithms"].items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [*lines, f"costs: {found['costs']}"]

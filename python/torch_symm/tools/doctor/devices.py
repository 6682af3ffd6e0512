"""Judges the GPUs, their connections and the compiler of the kernels."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .host import writable
from .limits import GPU_RANKS
from .probe_result import Probed
from .report import Problem, Section

#: Minimum CUDA version of the driver, and minimum compute capability.
CUDA, CAPABILITY = [12, 4], [8, 0]
#: Maximum GPU memory of a group in bytes, by default.
WORKSPACE = 512 << 20
#: A file that NVIDIA's GPU driver makes.
DRIVER_FILE = Path("/dev/nvidiactl")


def gpus(probed: Probed, ranks: int) -> Section:
    """The GPUs of a process, and whether each can serve a rank."""
    if error := probed.errors.get("gpus"):
        problem = Problem(
            f"GPUs cannot be used: {error}", "nvidia-smi may say why; CUDA_VISIBLE_DEVICES= does without", True
        )
        return Section("gpus", {"error": error}, ["cannot be used, see below"], [problem])
    devices = probed.of("gpus").get("devices", [])
    if not devices:
        return _none(probed)
    problems, lines = [], []
    for index, gpu in enumerate(devices):
        capability = ".".join(map(str, gpu["capability"]))
        free = gpu["free_bytes"] >> 20
        lines.append(f"{index}: {gpu['name']}, capability {capability}, {free} of {gpu['total_bytes'] >> 20} MiB free")
        if gpu["capability"] < CAPABILITY:
            text = f"cuda:{index} has compute capability {capability}, which is too old"
            problems.append(Problem(text, 'use "cpu:symm,cuda:nccl"; 8.0 or newer is needed', fatal=True))
        if gpu["free_bytes"] < WORKSPACE:
            text = f"cuda:{index} has {free} MiB free; a group takes up to {WORKSPACE >> 20}"
            problems.append(Problem(text, "free some, or set SYMM_WORKSPACE_MB lower"))
    served = probed.of("driver").get("cuda", CUDA)
    if served < CUDA:
        text = f"the driver serves CUDA {'.'.join(map(str, served))}, which is too old"
        problems.append(Problem(text, f"install a driver for CUDA {'.'.join(map(str, CUDA))} or newer", fatal=True))
    if ranks > GPU_RANKS:
        text = f"a group with GPUs has at most {GPU_RANKS} ranks, not {ranks}"
        problems.append(Problem(text, "start fewer, or use another backend for CUDA tensors", fatal=True))
    if ranks > len(devices) and os.environ.get("SYMM_ALLOW_SHARED_GPUS", "").strip() != "1":
        text = f"{ranks} ranks would share {len(devices)} GPUs, which groups refuse for CUDA tensors"
        problems.append(Problem(text, "start a rank for each GPU; SYMM_ALLOW_SHARED_GPUS=1 allows it for tests"))
    return Section("gpus", {"devices": devices}, lines, problems)


def _none(probed: Probed) -> Section:
    if not probed.of("torch"):
        return Section("gpus", {"devices": []}, ["not looked for"])
    built, problems = probed.of("torch").get("cuda"), []
    reason = "torch was built without CUDA" if not built else "torch shows none"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        reason = "CUDA_VISIBLE_DEVICES hides them"
    elif DRIVER_FILE.exists():
        remedy = "install torch's CUDA wheels" if not built else "nvidia-smi may say why"
        problems.append(Problem(f"there is an NVIDIA driver, but no GPU can be used: {reason}", remedy))
    return Section("gpus", {"devices": [], "reason": reason}, [f"none: {reason}"], problems)


def links(probed: Probed) -> Section | None:
    """Reports how GPUs are connected and whether they share memory; ``None`` without GPUs and known links."""
    if not probed.gpus and "links" not in {**probed.found, **probed.errors}:
        return None
    problems, lines = [], []
    found: dict[str, Any] = {**probed.of("links"), **probed.of("peers")}
    if error := probed.errors.get("links"):
        found["error"] = error
        lines.append("not known, see below")
        problems.append(
            Problem(f"how GPUs are linked is not known: {error}", "see SYMM_TOPOLOGY_FILE; nvidia-smi topo -m")
        )
    # Omit the legend, which starts with "NV#".
    lines += [line for line in str(found.get("table", "")).partition("\nNV#")[0].splitlines() if line.strip()]
    pairs = found.get("pairs", [])
    if error := probed.errors.get("peers"):
        problems.append(
            Problem(f"copies between GPUs fail: {error}", "nvidia-smi may say why; see dmesg for Xid", fatal=True)
        )
    for pair in pairs:
        if not pair["copied"]:
            text = f"a copy from cuda:{pair['from']} to cuda:{pair['to']} fails: {pair['error']}"
            problems.append(
                Problem(text, "virtual machines and IOMMUs break peer copies: turn ACS off, or set SYMM_P2P=0", True)
            )
    apart = [f"{pair['from']}-{pair['to']}" for pair in pairs if pair["access"] is False]
    if apart:
        text = f"no peer access between cuda devices {' '.join(apart)}: they exchange through the host's memory, slowly"
        problems.append(Problem(text, "nvidia-smi topo -p2p r says why; or leave out some by CUDA_VISIBLE_DEVICES"))
    if pairs:
        copied = sum(pair["copied"] for pair in pairs)
        lines.append(f"peer access of {len(pairs) - len(apart)} of {len(pairs)} pairs; copies arrived whole: {copied}")
    return Section("links", found, lines, problems)


def kernels(probed: Probed) -> Section | None:
    """Reports the compiler of the kernels, and their cache; ``None`` without GPUs."""
    if not probed.gpus:
        return None
    found: dict[str, Any] = {"nvrtc": probed.of("nvrtc"), "cache": probed.of("native")["cache"], "writable": False}
    problems, lines = [], []
    if error := probed.errors.get("nvrtc"):
        text = f"no CUDA kernel can be compiled: {error}"
        problems.append(
            Problem(text, "pip install nvidia-cuda-nvrtc, or set SYMM_NVRTC_PATH to libnvrtc.so.*", fatal=True)
        )
        lines.append("no compiler, see below")
    else:
        version, path = found["nvrtc"]["version"], found["nvrtc"]["path"]
        lines.append(f"NVRTC {'.'.join(map(str, version))} at {path}")
    cache = found["cache"]
    found["writable"] = bool(cache) and writable(Path(cache))
    if found["writable"]:
        lines.append(f"kept in {cache}")
    elif os.environ.get("SYMM_CACHE_DIR", "").strip() != "0":
        text = f"compiled kernels are not kept: {cache or 'no folder for caches is known'}"
        problems.append(
            Problem(f"{text}; each process compiles anew", "set SYMM_CACHE_DIR to a folder that can be written")
        )
    return Section("kernels", found, lines, problems)

"""``torch-symm hello``."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from typing import Any

from torch_symm import _version
from torch_symm._repr import counted
from torch_symm.launch.ranks import run as run_programs
from torch_symm.tools.bench.units import format_size, format_us
from torch_symm.tools.command import PROGRAM, Parser, overloaded
from torch_symm.tools.doctor import cgroup
from torch_symm.tools.doctor.smoke_test import children, failed, transport

#: Time limit in seconds for starting, meeting and measuring.
LIMIT_S = 60.0
MOST_RANKS = 8


def parser() -> Parser:
    """Returns the parser of the command."""
    made = Parser(
        "hello",
        "Starts one rank per GPU or core (2 to 8), sums a number over them, and reports the transport and its speed. "
        "Exit status 1 if a rank failed.",
        [
            ("", "use the GPUs if there are two, otherwise the CPU"),
            ("--ranks 4 --device cpu", "start 4 ranks with CPU tensors"),
        ],
    )
    made.add_argument("--ranks", type=_ranks, help=f"number of ranks, 2 to {MOST_RANKS} (default: GPUs, or cores)")
    made.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there are two GPUs, otherwise cpu")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def _ranks(text: str) -> int:
    """Returns the number of ranks that ``--ranks`` gives."""
    if text.isascii() and text.isdigit() and len(text) < 20 and 2 <= int(text) <= MOST_RANKS:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r}: must be from 2 to {MOST_RANKS}")


def ranks_here(device: str | None = None) -> tuple[str, int]:
    """Returns the device and the number of ranks to start.

    The device is ``device``, or by default CUDA if there are two GPUs, otherwise the CPU. There is a rank for each GPU,
    or for each core that this process may use (at least 2), but not more than ``MOST_RANKS``.
    """
    if device != "cpu":
        import torch

        gpus = torch.cuda.device_count()
        if gpus > 1 or device == "cuda":
            return "cuda", min(gpus, MOST_RANKS)
    usable = min(len(os.sched_getaffinity(0)), cgroup.cores_allowed() or MOST_RANKS)
    return "cpu", max(2, min(int(usable), MOST_RANKS))


def run(parser: Parser, given: argparse.Namespace) -> int:
    """Starts the ranks and prints their findings; returns 1 if a rank failed."""
    device, here = ranks_here(given.device)
    ranks = here if given.ranks is None else given.ranks
    if device == "cuda" and not 2 <= ranks <= here:
        parser.error(f"from 2 ranks on, each with a GPU; torch finds {here} here (--device cpu needs none)")
    busy = overloaded()
    if not given.json:
        print(f"starting {ranks} ranks on {device} …", flush=True)
    found = _tried(device, ranks) | ({"warning": busy} if busy else {})
    if given.json:
        print(json.dumps(found, indent=1))
    elif "error" not in found:
        print("\n".join(_lines(found)))
    if "error" in found:
        print(f"{found['error']}\n  what could be wrong: {PROGRAM} doctor", file=sys.stderr)
    return int("error" in found)


def _tried(device: str, ranks: int) -> dict[str, Any]:
    """Starts the ranks and returns their findings, or an ``error``."""
    found = {"device": device, "ranks": ranks, "torch_symm": _version.__version__, "python": platform.python_version()}
    try:
        with tempfile.TemporaryDirectory(prefix="torch-symm-hello-") as folder:
            ended = run_programs(children("torch_symm.tools.hello_rank", device, ranks, folder), LIMIT_S)
    except OSError as error:
        return found | {"error": f"no ranks could be started: {error}"}
    if failure := failed(ended):
        rank, text = failure
        return found | {"error": f"{ranks} ranks on {device} failed: rank {rank}: {text}"}
    sent = [one.messages[-1] for one in ended]
    import torch

    return found | {
        "torch": torch.__version__,
        "joined_s": max(one["joined_s"] for one in sent),
        "sum": sent[0]["sum"],
        "transport": transport(device, "\n".join(one.errors for one in ended))[1],
        "us": {size: max(one["us"][size] for one in sent) for size in sent[0]["us"]},
    }


def _lines(found: dict[str, Any]) -> list[str]:
    times = (f"{format_us(us)} µs for {format_size(int(size))}" for size, us in found["us"].items())
    ranks = counted(found["ranks"], "rank")
    return [
        f"torch_symm {found['torch_symm']}, torch {found['torch']}, Python {found['python']}",
        f"{ranks} formed a group in {found['joined_s']:.1f} s, and all_reduce gave each the sum {found['sum']:g}",
        f"{found['device']} tensors, {found['transport']}",
        f"all_reduce takes {', '.join(times)} (on the slowest rank)",
        *([f"warning: {found['warning']}, so these times say little"] if "warning" in found else []),
        f"next: {PROGRAM} run PROGRAM; {PROGRAM} bench",
    ]

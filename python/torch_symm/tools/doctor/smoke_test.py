"""Tests ``init_process_group("symm")`` and an all-reduce here: two real ranks, with a deadline."""

from __future__ import annotations

import itertools
import os
import re
import socket
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch_symm.launch.messages import sentence
from torch_symm.launch.ranks import Ended, Program, run

from .report import Problem, Section

RANKS = 2
SECONDS = 60.0
#: Variables of a launcher, which the ranks set themselves.
LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "ROLE_",
    "MASTER_",
    "TORCHELASTIC_",
    "SYMM_LOG",
    "SYMM_TRACE_DIR",
)
REMEDY = "docs/guide/errors.md has the messages and what to do about each"
_ports = itertools.count()


def trial(device: str) -> Section:
    """Forms a group of two ranks on ``device``, and checks the sums of a short and a long tensor."""
    name = f"trial_{device}"
    try:
        with tempfile.TemporaryDirectory(prefix="torch-symm-doctor-") as folder:
            ended = run(children("torch_symm.tools.doctor.rank", device, RANKS, folder), SECONDS)
    except OSError as error:
        text = f"no ranks could be started: {sentence(error)}"
        return Section(
            name, {"ok": False, "error": text}, [text], [Problem(text, "free memory, descriptors or processes", True)]
        )
    if failure := failed(ended):
        rank, why = failure
        text = f"{RANKS} ranks on {device} failed: rank {rank}: {why}"
        return Section(name, {"ok": False, "error": text}, ["fails, see below"], [Problem(text, REMEDY, fatal=True)])
    return _worked(name, device, ended)


def _worked(name: str, device: str, ended: list[Ended]) -> Section:
    seconds = max(message["seconds"] for one in ended for message in one.messages if "seconds" in message)
    logs = "\n".join(one.errors for one in ended)
    direct, how = transport(device, logs)
    found: dict[str, Any] = {"ok": True, "ranks": RANKS, "seconds": seconds}
    line = f"{RANKS} ranks formed a group and summed in {seconds:.1f} s; {how}"
    problems = []
    if device == "cpu":
        found["direct_reads"] = direct
        if not direct and os.environ.get("SYMM_CMA", "").strip() != "0":
            text = "ranks cannot read each other's memory (process_vm_readv): long sends between CPU ranks are slower"
            problems.append(Problem(text, "allow it: docker run --cap-add=SYS_PTRACE, or kernel.yama.ptrace_scope=0"))
    else:
        found["mapped"] = direct
        if not direct and os.environ.get("SYMM_P2P", "").strip() != "0":
            text = "GPUs cannot map each other's memory: they exchange through the host's, slowly"
            problems.append(Problem(text, "see that the driver lets GPUs be peers (`nvidia-smi topo -p2p r`)"))
    return Section(name, found, [line], problems)


def transport(device: str, logs: str) -> tuple[bool, str]:
    """Returns whether ranks reach each other's memory, according to their logs, and how data moves between them."""
    if device == "cpu":
        direct = "reads long messages from the sender's memory" in logs
        return direct, f"shared memory; long messages {'are read from the sender' if direct else 'go in pieces'}"
    direct = bool(re.search(r"MiB on each GPU", logs))
    return direct, "through GPU memory" if direct else "through the host's memory"


def free_port() -> int:
    """Returns a free port of the loopback interface that the kernel does not assign to others, if there is one."""
    below = 0
    with suppress(OSError):
        below = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    lowest = min(10_000, max(1024, below // 2))
    for _ in range(below - lowest):
        # Concurrent processes start at different ports.
        port = lowest + (os.getpid() * 31 + next(_ports)) % (below - lowest)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    # The kernel may assign all ports that need no privilege.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def children(module: str, device: str, ranks: int, folder: str) -> list[Program]:
    """Returns ranks that run ``module`` with ``device``, meet at a free port of this node, and log to their output."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    plain |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
    }
    # The log tells the outcome; dumps of a failure are not kept.
    plain |= {"SYMM_LOG": "info", "SYMM_TRACE_DIR": folder}
    each = [plain | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return [Program(module, [device], environment) for environment in each]


def failed(ended: Sequence[Ended]) -> tuple[int, str] | None:
    """Returns the rank whose failure is closest to the cause, and why it failed; ``None`` if all succeeded."""
    failures = [(rank, why) for rank, one in enumerate(ended) if (why := _failure(one))]
    # A rank's own message is closer to the cause than another rank's exit.
    return min(failures, key=lambda one: not any("error" in m for m in ended[one[0]].messages), default=None)


def _failure(ended: Ended) -> str:
    """Returns why a rank failed; empty if it did not."""
    for message in ended.messages:
        if "error" in message:
            return f"{message['step']}: {message['error']}"
    return "" if ended.status == 0 and ended.messages else ended.last_words()

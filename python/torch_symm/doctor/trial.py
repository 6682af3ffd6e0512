"""Whether ``init_process_group("symm")`` and an all-reduce work here: two real ranks, with a deadline."""

from __future__ import annotations

import os
import re
import socket
import tempfile
from typing import Any

from .child import Child, Ended, run, sentence
from .report import Problem, Section

RANKS = 2
SECONDS = 60.0
#: Variables of a launcher, which the ranks have of their own.
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


def trial(device: str) -> Section:
    """Two ranks on ``device`` form a group, and compare the sums of a short and a long tensor."""
    name = f"trial_{device}"
    try:
        with tempfile.TemporaryDirectory(prefix="torch-symm-doctor-") as folder:
            ended = run(_ranks(device, folder), SECONDS)
    except OSError as error:
        text = f"no ranks could be started: {sentence(error)}"
        return Section(
            name, {"ok": False, "error": text}, [text], [Problem(text, "free memory, descriptors or processes", True)]
        )
    failures = [(rank, _failure(one)) for rank, one in enumerate(ended)]
    # What a rank says itself is nearer to the cause than how another ended.
    failures = sorted(
        (one for one in failures if one[1]), key=lambda one: not any("error" in m for m in ended[one[0]].messages)
    )
    if failures:
        rank, failure = failures[0]
        text = f"{RANKS} ranks on {device} failed: rank {rank}: {failure}"
        return Section(name, {"ok": False, "error": text}, ["fails, see below"], [Problem(text, REMEDY, fatal=True)])
    return _worked(name, device, ended)


def _worked(name: str, device: str, ended: list[Ended]) -> Section:
    seconds = max(message["seconds"] for one in ended for message in one.messages if "seconds" in message)
    logs = "\n".join(one.errors for one in ended)
    found: dict[str, Any] = {"ok": True, "ranks": RANKS, "seconds": seconds}
    line = f"{RANKS} ranks formed a group and summed in {seconds:.1f} s"
    problems = []
    if device == "cpu":
        found["direct_reads"] = "direct reads of peers' memory: true" in logs
        line += "; long messages are read from the sender" if found["direct_reads"] else "; long messages go in pieces"
        if not found["direct_reads"] and os.environ.get("SYMM_CMA", "").strip() != "0":
            text = "ranks cannot read each other's memory (process_vm_readv): long sends between CPU ranks are slower"
            problems.append(Problem(text, "allow it: docker run --cap-add=SYS_PTRACE, or kernel.yama.ptrace_scope=0"))
    else:
        found["mapped"] = bool(re.search(r"MiB on each GPU", logs))
        line += "; through GPU memory" if found["mapped"] else "; through the host's memory"
        if not found["mapped"] and os.environ.get("SYMM_P2P", "").strip() != "0":
            text = "GPUs cannot map each other's memory: they exchange through the host's, slowly"
            problems.append(Problem(text, "see that the driver lets GPUs be peers (`nvidia-smi topo -p2p r`)"))
    return Section(name, found, [line], problems)


def _ranks(device: str, folder: str) -> list[Child]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    plain |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"}
    # What happened is read from the log; dumps of a failure are not kept.
    plain |= {"SYMM_LOG": "info", "SYMM_TRACE_DIR": folder}
    each = [plain | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(RANKS)]
    return [Child("torch_symm.doctor.rank", [device], environment) for environment in each]


def _failure(ended: Ended) -> str:
    """Why a rank failed; empty if it did not."""
    for message in ended.messages:
        if "error" in message:
            return f"{message['step']}: {message['error']}"
    return "" if ended.status == 0 and ended.messages else ended.last_words()

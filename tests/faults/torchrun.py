"""A rank's process exits under torchrun: how long the job lives on, and the content of its output and error files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time

from . import resource_leaks
from .case import Case, Outcome, Promise, Saw, add
from .processes import WORLD

TORCHRUN = """
import os, signal, sys, threading, time, torch, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    torch.set_num_threads(1)
    dist.init_process_group(sys.argv[1])
    rank = dist.get_rank()
    dist.all_reduce(tensor := torch.ones(1 << 20))
    if rank == 1:
        def kill():
            time.sleep(0.3)
            open(os.path.join(sys.argv[2], "killed"), "w").write(f"{time.monotonic()} {os.getpid()}")
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Thread(target=kill).start()
    while True:
        dist.all_reduce(tensor)
main()
"""


def torchrun(side: str) -> Outcome:
    """SIGKILL of a rank under torchrun: how long the job lives on, and the content of its output and error files."""
    with resource_leaks.fresh_folder() as place:
        (place / "script.py").write_text(TORCHRUN)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}"]
        command += [f"--log-dir={place / 'logs'}", str(place / "script.py"), side, str(place)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        ended = time.monotonic()
        killed = (place / "killed").read_text().split() if (place / "killed").exists() else ["0", "0"]
        outcome = Outcome(pids={1: int(killed[1])})
        files = filter(_whole, [path.read_text() for path in (place / "logs").rglob("error.json")])
        without = [text for text in files if "rank 1 (pid" not in text]
        line = next(
            (
                text
                for text in done.stderr.splitlines()
                if "Error" in text and re.search(r"rank 1\b", text) and "pid" in text
            ),
            "",
        )
        text = without[0] if without else line
        outcome.saw[0] = Saw("error" if done.returncode else "right", text, ended - float(killed[0]))
        outcome.figures["error_files_without_reason"] = float(len(without))
        return outcome


def _whole(text: str) -> bool:
    """True if an error file is complete: torchrun may end a survivor that has opened its file but not written it."""
    try:
        return bool(json.loads(text))
    except json.JSONDecodeError:
        return False


add(
    Case(
        "killed under torchrun",
        "SIGKILL under torchrun",
        torchrun,
        Promise(
            sees=("error",), names=(1,), says=("SymmPeerError",), within=0.7, at_most={"error_files_without_reason": 0}
        ),
        "the job ends within 0.7 s, the reason in its output and in every error file",
        "seconds until torchrun itself has ended, its own exit included",
    )
)

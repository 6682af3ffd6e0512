"""Nodes with a network between them: namespaces of this machine that share only a kernel and a bridge.

Needs root, ``ip`` and ``unshare``. Run as a program it is one node: it forks that node's ranks and waits for them.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def lacking() -> str:
    """The reason why such nodes are impossible here; empty if they are possible, and in a rank on such a node."""
    if "SYMM_TEST_NAMESPACE" in os.environ:
        return ""
    if os.geteuid() != 0:
        return "namespaces of the network need root"
    missing = [tool for tool in ("ip", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} cannot be found"
    name = f"symm-{os.getpid()}-try"
    inside = ["-n", name, "link", "add"]
    steps = [
        ["netns", "add", name],
        [*inside, "wire", "type", "bridge"],
        [*inside, "h0", "master", "wire", "type", "veth", "peer", "name", "eth0"],
    ]
    try:
        for step in steps:
            tried = subprocess.run(["ip", *step], capture_output=True, text=True, check=False)
            if tried.returncode != 0:
                return f"ip {' '.join(step)}: {tried.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    return ""


class Nodes:
    """Nodes ``h0``, ``h1``, …, with ``layout[h]`` ranks on node ``h``, one after another."""

    def __init__(self, place: Path, layout: Sequence[int]) -> None:
        self.place = place
        self.layout = tuple(layout)
        self.names = [f"symm-{os.getpid()}-h{node}" for node in range(len(layout))]
        #: Namespace of the bridge; its port for a node has that node's name.
        self.wire = f"symm-{os.getpid()}-wire"
        self.inits: list[subprocess.Popen[bytes]] = []

    def ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    def connect(self) -> None:
        for name in (self.wire, *self.names):
            self.ip("netns", "add", name)
        self.ip("-n", self.wire, "link", "add", "wire", "type", "bridge")
        self.ip("-n", self.wire, "link", "set", "wire", "up")
        for node, name in enumerate(self.names):
            port = [f"h{node}", "master", "wire"]
            self.ip("-n", self.wire, "link", "add", *port, "type", "veth", "peer", "name", "eth0", "netns", name)
            self.ip("-n", self.wire, "link", "set", f"h{node}", "up")
            self.ip("-n", name, "addr", "add", f"10.77.0.{node + 1}/24", "dev", "eth0")
            self.ip("-n", name, "link", "set", "eth0", "up")
            self.ip("-n", name, "link", "set", "lo", "up")

    def start(self, function: str) -> None:
        """Runs ``function`` (``module:name``) on all ranks, with the rank, the layout and a directory for files."""
        layout = ",".join(map(str, self.layout))
        for node, name in enumerate(self.names):
            arguments = f'{function} {node} {layout} "{self.place}"'
            program = f'hostname h{node}; exec "{sys.executable}" "{__file__}" {arguments}'
            unshare = ["unshare", "-u", "-i", "-p", "-m", "--fork", "--kill-child", "--mount-proc", "sh", "-c", program]
            with (self.place / f"log-{node}").open("wb") as log:
                init = subprocess.Popen(["ip", "netns", "exec", name, *unshare], stdout=log, stderr=log)
            self.inits.append(init)

    def cut(self, node: int) -> None:
        """Unplugs the cable of ``node``."""
        print(f"{time.monotonic():.2f} s: the cable of h{node} comes out")
        self.ip("-n", self.wire, "link", "set", f"h{node}", "down")

    def limit(self, rate: str) -> None:
        """Limits the send rate of each node to ``rate``, as ``"1gbit"``; needs ``tc``."""
        for name in self.names:
            rule = ["dev", "eth0", "root", "tbf", "rate", rate, "burst", "256kb", "latency", "100ms"]
            subprocess.run(["ip", "netns", "exec", name, "tc", "qdisc", "add", *rule], check=True)

    def kill(self, node: int) -> None:
        """Kills all processes of ``node``, at once."""
        self.inits[node].kill()

    def stop(self, node: int) -> None:
        """Stops all processes of ``node``, at once; its kernel continues."""
        self._signal(node, signal.SIGSTOP)

    def resume(self, node: int) -> None:
        """Continues the stopped processes of ``node``."""
        self._signal(node, signal.SIGCONT)

    def _signal(self, node: int, number: signal.Signals) -> None:
        inside = os.readlink(f"/proc/{self.inits[node].pid}/ns/pid_for_children")
        for process in Path("/proc").glob("[0-9]*"):
            # Some may not be inspected, others have exited.
            with contextlib.suppress(OSError):
                if os.readlink(process / "ns" / "pid") == inside:
                    os.kill(int(process.name), number)

    def wait(self, name: str, ranks: Sequence[int] | None = None, timeout: float = 150) -> list[Path]:
        """Waits for the files ``name-RANK`` of ``ranks``, or of all, and returns their paths."""
        deadline = time.monotonic() + timeout
        paths = [self.place / f"{name}-{rank}" for rank in (range(sum(self.layout)) if ranks is None else ranks)]
        while not all(path.exists() for path in paths):
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.01)
        return paths

    def results(self, ranks: Sequence[int] | None = None, timeout: float = 150) -> list[Any]:
        """The return values of ``ranks``, or of all."""
        return [json.loads(path.read_text()) for path in self.wait("result", ranks, timeout)]

    def logs(self) -> str:
        logs = (self.place / f"log-{node}" for node in range(len(self.layout)))
        return "\n".join(log.read_text(errors="replace")[-4000:] for log in logs)

    def end(self) -> None:
        for init in self.inits:
            init.kill()
            init.wait()
        for name in (*self.names, self.wire):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@contextlib.contextmanager
def nodes_of(place: Path, layout: Sequence[int], function: str) -> Iterator[Nodes]:
    """Nodes whose ranks run ``function``; they are removed afterwards."""
    nodes = Nodes(place, layout)
    try:
        nodes.connect()
        nodes.start(function)
        yield nodes
    finally:
        nodes.end()


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)


def _node(function: str, node: int, layout: Sequence[int], place: Path) -> int:
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "python")]
    os.environ.update(GLOO_SOCKET_IFNAME="eth0", SYMM_TEST_NAMESPACE=str(node))
    module, name = function.split(":")
    body = getattr(importlib.import_module(module), name)
    children, first = [], sum(layout[:node])
    for rank in range(first, first + layout[node]):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                _write(place / f"result-{rank}", json.dumps(body(rank, layout, place)))
                status = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        children.append(pid)
    return max(os.waitpid(pid, 0)[1] for pid in children)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _, named, which, counts, folder = sys.argv
    sys.exit(min(_node(named, int(which), [int(count) for count in counts.split(",")], Path(folder)), 1))

"""Two hosts with a network between them: namespaces of this machine that share nothing but a kernel and a veth pair.

Needs root, ``ip`` and ``unshare``. Run as a program it is one host: it forks that host's ranks and waits for them.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Ranks of each host.
RANKS = 2


def lacking() -> str:
    """Why there can be no such hosts here; empty if there can."""
    if os.geteuid() != 0:
        return "namespaces of the network need root"
    missing = [tool for tool in ("ip", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} cannot be found"
    name = f"symm-{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        return f"ip netns add: {tried.stderr.strip()}"
    made = subprocess.run(
        ["ip", "-n", name, "link", "add", "v0", "type", "veth", "peer", "name", "v1"],
        capture_output=True,
        text=True,
        check=False,
    )
    subprocess.run(["ip", "netns", "del", name], check=False)
    return "" if made.returncode == 0 else f"ip link add: {made.stderr.strip()}"


class Hosts:
    """Two hosts, ``h0`` and ``h1``, whose ranks call a function each."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.names = [f"symm-{os.getpid()}-h{host}" for host in (0, 1)]
        self.inits: list[subprocess.Popen[bytes]] = []

    def ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    def connect(self) -> None:
        ends = [f"v{host}-{os.getpid() % 100000}" for host in (0, 1)]
        for name in self.names:
            self.ip("netns", "add", name)
        self.ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for host, (name, end) in enumerate(zip(self.names, ends, strict=True)):
            self.ip("link", "set", end, "netns", name, "name", "eth0")
            self.ip("-n", name, "addr", "add", f"10.77.0.{host + 1}/24", "dev", "eth0")
            self.ip("-n", name, "link", "set", "eth0", "up")
            self.ip("-n", name, "link", "set", "lo", "up")

    def start(self, function: str) -> None:
        """``function``: ``module:name``, called with the rank and what it writes its files into."""
        for host, name in enumerate(self.names):
            program = f'hostname h{host}; exec "{sys.executable}" "{__file__}" {function} {host} "{self.place}"'
            unshare = ["unshare", "-u", "-i", "-p", "-m", "--fork", "--kill-child", "--mount-proc", "sh", "-c", program]
            with (self.place / f"log-{host}").open("wb") as log:
                init = subprocess.Popen(["ip", "netns", "exec", name, *unshare], stdout=log, stderr=log)
            self.inits.append(init)

    def cut(self) -> None:
        """Takes the cable out."""
        self.ip("-n", self.names[1], "link", "set", "eth0", "down")

    def limit(self, rate: str) -> None:
        """Lets each host send ``rate`` at most, as ``"1gbit"``; needs ``tc``."""
        for name in self.names:
            rule = ["dev", "eth0", "root", "tbf", "rate", rate, "burst", "256kb", "latency", "100ms"]
            subprocess.run(["ip", "netns", "exec", name, "tc", "qdisc", "add", *rule], check=True)

    def kill(self, host: int) -> None:
        """Ends all processes of ``host``, at once."""
        self.inits[host].kill()

    def results(self, ranks: list[int], timeout: float = 60) -> list[Any]:
        """What ``ranks`` have returned."""
        deadline = time.monotonic() + timeout
        paths = [self.place / f"result-{rank}" for rank in ranks]
        while not all(path.exists() for path in paths):
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.01)
        return [json.loads(path.read_text()) for path in paths]

    def logs(self) -> str:
        return "\n".join((self.place / f"log-{host}").read_text(errors="replace")[-4000:] for host in (0, 1))

    def end(self) -> None:
        for init in self.inits:
            init.kill()
            init.wait()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@contextlib.contextmanager
def two_hosts(place: Path, function: str) -> Iterator[Hosts]:
    """Hosts whose ranks run ``function``; they are gone afterwards."""
    hosts = Hosts(place)
    try:
        hosts.connect()
        hosts.start(function)
        yield hosts
    finally:
        hosts.end()


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)


def _host(function: str, host: int, place: Path) -> int:
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "python")]
    module, name = function.split(":")
    body = getattr(importlib.import_module(module), name)
    os.environ.update(GLOO_SOCKET_IFNAME="eth0")
    children = []
    for rank in range(host * RANKS, (host + 1) * RANKS):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                _write(place / f"result-{rank}", json.dumps(body(rank, place)))
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
    sys.exit(min(_host(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])), 1))

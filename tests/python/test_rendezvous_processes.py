"""Real processes form groups of several backends through every store and every URL."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
import torch_symm
from ranks import free_port, run_ranks
from stores import SECRET

LIMIT = timedelta(seconds=30)
WORLD = 3
backends = pytest.mark.parametrize("backend", ["symm", "gloo"])


def _sum(rank: int, world_size: int, where: str) -> None:
    """A sum of the default group, which ends."""
    value = torch.arange(4.0) + rank
    dist.all_reduce(value)
    assert value.tolist() == [world_size * i + sum(range(world_size)) for i in range(4)], where
    dist.barrier()
    dist.destroy_process_group()


def _store(kind: str, rank: int, world_size: int, port: int) -> dist.Store:
    if kind == "file":
        return torch_symm.FileStore(str(ranks.scratch / kind), world_size)
    if kind == "prefix-file":
        return dist.PrefixStore("part", torch_symm.FileStore(str(ranks.scratch / kind), world_size))
    host, port = (f"unix:{ranks.scratch}/unix", 0) if kind == "tcp-unix" else ("127.0.0.1", port)
    secret = SECRET if kind == "tcp-secret" else None
    return torch_symm.TCPStore(host, port, world_size, rank == 0, LIMIT, secret=secret)


def _through_stores(rank: int, world_size: int, backend: str, ports: dict[str, int]) -> None:
    dist.init_process_group(backend, store=torch_symm.MemoryStore(), rank=0, world_size=1, timeout=LIMIT)
    _sum(0, 1, "memory")
    stores = {}
    for kind, port in ports.items():
        # Every store lives until all ranks have left all groups.
        stores[kind] = _store(kind, rank, world_size, port)
        dist.init_process_group(backend, store=stores[kind], rank=rank, world_size=world_size, timeout=LIMIT)
        dist.all_reduce(one := torch.ones(1), group=dist.new_group())
        assert one.item() == world_size
        _sum(rank, world_size, kind)
    ranks.meet("left", rank, world_size)


# proves P11
@backends
def test_through_a_store(backend: str) -> None:
    kinds = ("file", "prefix-file", "tcp", "tcp-secret", "tcp-unix")
    run_ranks(_through_stores, WORLD, backend, {kind: free_port() for kind in kinds}, backend=None)


#: URLs, and whether rank and number of ranks are arguments; otherwise they are in the environment.
URLS = (
    ("symm://127.0.0.1:PORT", False),
    ("symm://127.0.0.1:PORT", True),
    ("symm://127.0.0.1:PORT?secret_env=SYMM_TEST_WORD", False),
    ("symm://[::1]:PORT", False),
    ("symm://", False),
    ("symm://?secret_env=SYMM_TEST_WORD", True),
    ("symm://SCRATCH/socket", False),
    ("symm+file://SCRATCH/file", False),
    ("symm+file://SCRATCH/another", True),
)


def _by_url(rank: int, world_size: int, backend: str, ports: list[int]) -> None:
    for (url, explicit), port in zip(URLS, ports, strict=True):
        arguments = {"rank": rank, "world_size": world_size} if explicit else {}
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), SYMM_TEST_WORD=SECRET)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
        for name in ("RANK", "WORLD_SIZE") if explicit else ():
            del os.environ[name]
        place = url.replace("PORT", str(port)).replace("SCRATCH", str(ranks.scratch))
        dist.init_process_group(backend, init_method=place, timeout=LIMIT, **arguments)
        _sum(rank, world_size, url)


@backends
def test_by_url(backend: str) -> None:
    run_ranks(_by_url, WORLD, backend, [free_port() for _ in URLS], backend=None)


SCRIPT = """
import os, sys, torch, torch.distributed as dist
restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
os.environ["SYMM_TEST_WORD"] = "a word"
tried = []
for backend in ("gloo", "symm"):
    for method in ("env://", "symm://", "symm://?secret_env=SYMM_TEST_WORD"):
        # torch itself cannot form a second gloo group through the agent's store: it finds the addresses of the first.
        for turn in range(2 if (backend, method) != ("gloo", "env://") else 1 - restart):
            print(f"{backend} by {method}, turn {turn}", file=sys.stderr, flush=True)
            dist.init_process_group(backend, init_method=method)
            value = torch.ones(3)
            dist.all_reduce(value)
            assert value.tolist() == [2, 2, 2]
            dist.destroy_process_group()
            tried.append(f"{backend} {method}")
with open(os.path.join(sys.argv[1], f"{restart}-{os.environ['RANK']}"), "w") as file:
    file.write("\\n".join(tried))
raise SystemExit(1 - restart)
"""


def test_torchrun(tmp_path: Path) -> None:
    """Makes a group of each backend by each method twice, before and after torchrun restarts the ranks.

    The exception is gloo by env://: once before the restart.
    """
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["--max-restarts=1", str(script), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    methods = ("env://", "symm://", "symm://?secret_env=SYMM_TEST_WORD")
    wanted = [f"{backend} {method}" for backend in ("gloo", "symm") for method in methods for _ in range(2)]
    for restart, rank in itertools.product(range(2), range(2)):
        assert (tmp_path / f"{restart}-{rank}").read_text().splitlines() == wanted[1 + restart :], (restart, rank)


def _again_at_once(rank: int, world_size: int, url: str) -> None:
    for _ in range(3):
        dist.init_process_group("symm", url, rank=rank, world_size=world_size, timeout=LIMIT)
        dist.barrier()
        # The other ranks reach the server of the group that rank 0 has not left yet.
        time.sleep(0.2 if rank == 0 else 0)
        dist.destroy_process_group()


def test_a_group_may_follow_another_at_the_same_port() -> None:
    run_ranks(_again_at_once, WORLD, f"symm://127.0.0.1:{free_port()}", backend=None)


def _server_stops(rank: int, world_size: int) -> tuple[str, float]:
    serve = "import sys, torch.distributed as d; s = d.TCPStore('127.0.0.1', 0, is_master=True); "
    serve += "print(s.port, flush=True); sys.stdin.read()"
    server = subprocess.Popen([sys.executable, "-c", serve], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout
        store = dist.TCPStore("127.0.0.1", int(server.stdout.readline()))
        server.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        try:
            dist.init_process_group("symm", store=store, rank=0, world_size=2, timeout=timedelta(seconds=1))
        except torch_symm.SymmTimeoutError as error:
            return str(error), time.monotonic() - started
        return "formed", 0.0
    finally:
        server.kill()


@pytest.mark.timed
def test_a_stopped_server_of_torchs_store_is_named_at_the_deadline() -> None:
    [(message, seconds)] = run_ranks(_server_stops, 1, backend=None)
    assert "the store (c10d::TCPStore) at 127.0.0.1:" in message
    assert "did not answer Check within" in message
    assert 1 <= seconds < 10

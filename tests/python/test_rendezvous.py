"""The URLs of `init_method`: parameters, environment, and messages for errors."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import free_port, on_threads
from stores import SECRET, seconds, serve
from torch.distributed.rendezvous import rendezvous
from torch_symm import FileStore, TCPStore

VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "WORD",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT",
)


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def meet(url: str, rank: int = -1, world_size: int = -1, **options: Any) -> tuple[Any, int, int]:
    return next(rendezvous(url, rank, world_size, **options))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("symm://host:1?world_size=2", "rank parameter missing, and RANK is not set: pass rank= .*torchrun.* RANK"),
        ("symm://host:1?rank=0", "world size parameter missing, and WORLD_SIZE is not set"),
        ("symm+file:///tmp/x?rank=0", "world size parameter missing"),
        ("symm://host:1?rank=2&world_size=2", "rank 2 does not exist"),
        ("symm://host:1?rank=x&world_size=2", "rank 'x' is no number"),
        ("symm://host?rank=0&world_size=1", "port number missing"),
        ("symm://host:99999?rank=0&world_size=1", "99999"),
        ("symm://:1?rank=0&world_size=1", "host missing"),
        ("symm://host:1/path?rank=0&world_size=1", "'/path' after host and port"),
        ("symm://word@host:1?rank=0&world_size=1", "secret_env"),
        ("symm://host:1?rank=0&world_size=1&color=red&a=b", "unknown parameters: a, color"),
        ("symm://host:1?rank=0&world_size=1&rank=1", "given twice: rank"),
        ("symm://host:1?rank=0&world_size=1&secret_env=WORD", "'WORD'"),
        ("symm://host:1?rank=0&world_size=1&secret=word", "only secret=none does; use secret_env"),
        ("symm://host:1?rank=0&world_size=1&secret=none&secret_env=WORD", "contradict each other|'WORD'"),
        ("symm://?rank=0&world_size=1", "environment variable MASTER_ADDR expected"),
        ("symm+file://?rank=0&world_size=1", "path missing"),
        ("symm+file://host/x?rank=0&world_size=1", "symm[+]file:///path"),
        (
            "symm+file:///x?rank=0&world_size=1&secret_env=WORD",
            "unknown parameters: secret_env; the known ones are rank, world_size",
        ),
    ],
)
def test_what_is_wrong_is_said(url: str, words: str) -> None:
    scheme = url.partition(":")[0].replace("+", "[+]")
    with pytest.raises(
        ValueError, match=f"Error initializing torch.distributed using {scheme}:// rendezvous: .*{words}"
    ):
        meet(url)


def test_arguments_go_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORD": "", "RANK": "5", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="rank 5 does not exist in a world of 3"):
        meet("symm://localhost:1")
    with pytest.raises(ValueError, match="rank 4 does not exist in a world of 3"):
        meet("symm://localhost:1", rank=4)
    # An empty secret is rejected as if it were not set.
    with pytest.raises(ValueError, match="'WORD', which secret_env names, is not set or empty"):
        meet("symm://localhost:1?secret_env=WORD", 0, 1)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_host_and_port(host: str) -> None:
    port = free_port()
    for query, place in (("?secret=none", (host.strip("[]"), port)), ("", (f"unix:@torch-symm:{port}", 0))):
        url = f"symm://{host}:{port}{query}"
        store, rank, world_size = meet(url, 0, 1, timeout=seconds(7))
        assert (type(store), rank, world_size) == (TCPStore, 0, 1)
        assert ((store.host, store.port), store.is_master, store.timeout) == (place, True, seconds(7))
        store.set("key", "value")
        # The second store is opened as init_rpc does after init_process_group.
        again, _, _ = meet(url, 0, 1)
        assert again.get("key") == b"value"


def _other_users(port: int) -> str:
    """The error for a process of another user that opens a job's store."""
    code = f"""
import os, sys
from datetime import timedelta
import torch, torch_symm
store = torch_symm.TCPStore
os.setgid(65534); os.setuid(65534)
for host, port in (("127.0.0.1", {port}), ("unix:@torch-symm:{port}", 0)):
    try:
        store(host, port, None, False, timedelta(seconds=0.3), False).set("planted", "1")
        print("served")
    except torch.distributed.DistError as error:
        print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return result.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_other_users_of_the_host_are_not_served_by_default() -> None:
    port = free_port()
    store, _, _ = meet(f"symm://127.0.0.1:{port}", 0, 1)
    reported = _other_users(port)
    assert "served\n" not in reported and "refused" in reported and "its own user only" in reported, reported
    assert not store.check(["planted"])


def test_a_taken_port_says_by_whom() -> None:
    holder = serve()
    with pytest.raises(dist.DistNetworkError, match=rf"in use: this process, pid {os.getpid()}, listens .*MASTER_PORT"):
        TCPStore("127.0.0.1", holder.port, None, True, seconds(5), False)
    taken = [(free_port(), same) for same in (False, True)]
    code = f"""
import time, torch_symm
from datetime import timedelta
stores = [torch_symm.TCPStore("127.0.0.1", port, None, True, timedelta(seconds=5), False, require_same_user=same)
          for port, same in {taken}]
print("up", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "up\n"
        words = rf"in use: pid {other.pid} \(.*\) listens there; `kill {other.pid}` ends it"
        for port, same in taken:
            with pytest.raises(dist.DistNetworkError, match=words):
                TCPStore("127.0.0.1", port, None, True, seconds(5), False, require_same_user=same)
        other.kill()


def test_a_socket_in_the_file_system(tmp_path: Path) -> None:
    path = tmp_path / "sock et"
    store, _, _ = meet(f"symm://{tmp_path}/sock%20et", 0, 1)
    assert store.host == f"unix:{path}" and path.exists()
    del store
    assert not path.exists()


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    values = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORD": SECRET}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    store, rank, world_size = meet("symm://?secret_env=WORD")
    assert (rank, world_size, store.port) == (0, 1, port)
    with pytest.raises(dist.DistError):
        TCPStore("127.0.0.1", store.port, None, False, seconds(5), False).set("key", "value")


def beside_agent(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """A store like the one of torchrun's agent, in an environment like that of its ranks."""
    agent = dist.TCPStore("127.0.0.1", 0, None, True, seconds(20), wait_for_workers=False)
    values = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return agent


@pytest.mark.parametrize(
    ("arrived", "reported"),
    [
        ((), "rendezvous of 4 ranks: ranks 0, 1 and 3 did not arrive before the timeout, 1 did"),
        ((1, 3), "rendezvous of 4 ranks: rank 0 did not arrive before the timeout, 3 did"),
        ((0,), "rendezvous of 4 ranks: rank 0 arrived, but did not serve the store before the timeout"),
    ],
)
def test_ranks_that_do_not_arrive_beside_torchruns_agent_are_named(
    arrived: tuple[int, ...], reported: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = beside_agent(monkeypatch)
    for rank in arrived:
        agent.add(f"symm/rendezvous/0/turn/{rank}", 1)
    with pytest.raises(dist.DistStoreError, match=reported):
        meet("symm://", 2, 4, timeout=seconds(0.5))


def test_beside_torchruns_agent_a_rank_that_gave_up_before_rank_0_came_may_try_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = beside_agent(monkeypatch)
    with pytest.raises(dist.DistStoreError, match="rendezvous of 2 ranks: rank 0 did not arrive"):
        meet("symm://", 1, 2, timeout=seconds(0.2))
    on_threads([partial(meet, "symm://", rank, 2, timeout=seconds(20)) for rank in range(2)])
    assert [agent.get(f"symm/rendezvous/0/turn/{rank}") for rank in range(2)] == [b"1", b"1"]


def test_beside_torchruns_agent_the_store_has_the_timeout_and_its_address_is_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = beside_agent(monkeypatch)
    for turn in ("1", "2"):
        store, _, _ = meet("symm://", 0, 1, timeout=seconds(7))
        assert (store.timeout, store.is_master, store.port != agent.port) == (seconds(7), True, True)
        # The number of rank 0's meetings stays.
        assert [key for key in agent.list_keys() if "symm" in key] == ["symm/rendezvous/0/turn/0"]
        assert agent.get("symm/rendezvous/0/turn/0") == turn.encode()


def test_a_file_is_the_place_of_one_meeting_and_of_another_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"symm+file://{tmp_path}/a%20store"
    steps = rendezvous(url, 0, 1)
    store, rank, world_size = next(steps)
    assert (type(store), store.path, rank, world_size) == (FileStore, f"{tmp_path}/a store", 0, 1)
    with pytest.raises(RuntimeError, match=r"Unable to perform re-rendezvous using symm\+file:// method"):
        next(steps)
    store.set("key", "old")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    second, _, _ = meet(url, 0, 1)
    assert not second.check(["key"]) and type(second) is dist.PrefixStore

"""A network that is cut, and a host that is lost: hosts of namespaces, with a wire between them."""

from __future__ import annotations

import re
import shutil
import time
from datetime import timedelta
from pathlib import Path

import namespaces
import pytest
import torch
import torch.distributed as dist
import torch_symm

WHY_NOT = namespaces.lacking()

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def join(rank: int, limit_s: int) -> None:
    dist.init_process_group(
        "cpu:symm",
        init_method="tcp://10.77.0.1:29517",
        rank=rank,
        world_size=4,
        timeout=timedelta(seconds=limit_s),
    )


def survive(rank: int, place: Path) -> tuple[str, float]:
    """What the next call says of a failure that nobody has called into, and when it was heard of."""
    join(rank, 40)
    tensor = torch.full((200_000,), float(rank))
    dist.all_reduce(tensor)
    assert bool((tensor == 6).all())
    (place / f"ready-{rank}").touch()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    until = time.monotonic() + 30
    while "SUCCESS" in str(backend.get_error()):
        assert time.monotonic() < until, "nobody has told"
        time.sleep(0.001)
    heard = time.monotonic()
    with pytest.raises(torch_symm.SymmPeerError) as caught:
        dist.barrier()
    return str(caught.value), heard


def crawl(rank: int, place: Path) -> float:
    """Seconds of a call that fills a slow wire for longer than a host may be silent."""
    join(rank, 60)
    tensor = torch.full((1_000_000,), float(rank))
    begun = time.monotonic()
    dist.all_reduce(tensor)
    took = time.monotonic() - begun
    assert bool((tensor == 6).all())
    got = torch.empty(3)
    if rank == 0:
        dist.send(torch.arange(3.0), 3)
    elif rank == 3:
        dist.recv(got, 0)
        assert got.tolist() == [0.0, 1.0, 2.0]
    dist.barrier()
    dist.destroy_process_group()
    return took


@pytest.mark.skipif(shutil.which("tc") is None, reason="tc cannot be found")
def test_a_slow_wire_is_no_silent_host(tmp_path: Path) -> None:
    with namespaces.two_hosts(tmp_path, "test_hosts_namespaces:crawl") as hosts:
        # Each host sends 4 MB.
        hosts.limit("5mbit")
        for took in hosts.results([0, 1, 2, 3]):
            assert took > 5.0, f"{took:.1f} s: the wire was too quick to show anything"


def ready(hosts: namespaces.Hosts) -> None:
    deadline = time.monotonic() + 60
    while not all((hosts.place / f"ready-{rank}").exists() for rank in range(4)):
        assert time.monotonic() < deadline, hosts.logs()
        time.sleep(0.01)
    time.sleep(0.2)


def test_each_side_of_a_cut_network_names_the_other(tmp_path: Path) -> None:
    with namespaces.two_hosts(tmp_path, "test_hosts_namespaces:survive") as hosts:
        ready(hosts)
        cut = time.monotonic()
        hosts.cut()
        for rank, (text, heard) in enumerate(hosts.results([0, 1, 2, 3])):
            other = r'"h1" \(ranks 2 and 3\)' if rank < 2 else r'"h0" \(ranks 0 and 1\)'
            assert re.search(rf"host {other} of group .* has not answered for 5\.\d s", text), text
            assert 3.9 < heard - cut < 7, f"{heard - cut:.2f} s: {text}"
        # They are containers of one machine, as one rank says.
        advice = r"ranks 0 and 2 run in different containers of one host .* start the containers with .*--network=host"
        assert len(re.findall(advice, hosts.logs())) == 1, hosts.logs()


def test_a_host_whose_processes_all_end_is_named_at_once(tmp_path: Path) -> None:
    with namespaces.two_hosts(tmp_path, "test_hosts_namespaces:survive") as hosts:
        ready(hosts)
        killed = time.monotonic()
        hosts.kill(1)
        for text, heard in hosts.results([0, 1]):
            assert re.search(r'(host "h1" \(ranks 2 and 3\)|rank [23] \(host "h1", pid \d+\)) of group', text), text
            # Ends of processes take their time on a busy machine.
            assert heard - killed < 8, f"{heard - killed:.2f} s: {text}"
            print(f"heard after {1000 * (heard - killed):.0f} ms: {text}")

"""A network that is cut, and nodes that are lost or stopped; the nodes are namespaces with links between them."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import expected
import launch
import netns
import pytest
import torch
import torch.distributed as dist
import torch_symm
from collectives import run
from test_internode_collectives import moving, reducing, two_level

WHY_NOT = netns.lacking()

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def join(rank: int, layout: Sequence[int], limit_s: int) -> None:
    dist.init_process_group(
        "cpu:symm",
        init_method="tcp://10.77.0.1:29517",
        rank=rank,
        world_size=sum(layout),
        timeout=timedelta(seconds=limit_s),
    )


def hear(rank: int, place: Path) -> tuple[str, float]:
    """Returns the next call's error after a failure outside of any call, and the time at which it was noticed."""
    (place / f"ready-{rank}").touch()
    begun = time.monotonic()
    print(f"{begun:.2f} s: rank {rank} is ready", file=sys.stderr, flush=True)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    while "SUCCESS" in str(backend.get_error()):
        assert time.monotonic() < begun + 45, "nobody has told"
        time.sleep(0.001)
    heard = time.monotonic()
    with pytest.raises(torch_symm.SymmPeerError) as caught:
        dist.barrier()
    return str(caught.value), heard


def survive(rank: int, layout: Sequence[int], place: Path) -> tuple[str, float]:
    join(rank, layout, 40)
    tensor = torch.full((200_000,), float(rank))
    dist.all_reduce(tensor)
    assert bool((tensor == sum(range(sum(layout)))).all())
    return hear(rank, place)


def compute(rank: int, layout: Sequence[int], place: Path) -> tuple[str, float]:
    """Compares collectives and messages of every length with the expected results, then gets the error of a failure."""
    join(rank, layout, 60)
    world = sum(layout)
    reductions = [("SUM", torch.float32, count) for count in (37, 33_001, 300_001)]
    run([*reducing(reductions, rank, world, reference=two_level(tuple(layout))), *moving(rank, world)])
    for count in (3, 300_001):
        # Each rank sends a different message to every rank.
        sent = [expected.seeded(torch.float32, (count,), world * rank + to) for to in range(world)]
        got = [torch.empty(count) for _ in range(world)]
        others = [other for other in range(world) if other != rank]
        works = [dist.isend(sent[to], to) for to in others] + [dist.irecv(got[source], source) for source in others]
        for work in works:
            work.wait()
        for source in others:
            wanted = expected.seeded(torch.float32, (count,), world * source + rank)
            expected.assert_same_bits(got[source], wanted, ("message", source, rank, count))
    return hear(rank, place)


def crawl(rank: int, layout: Sequence[int], place: Path) -> float:
    """Seconds of a call that fills a slow link for longer than a node may be silent."""
    join(rank, layout, 60)
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


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("tc") is None, reason="tc cannot be found")
def test_a_slow_wire_is_no_silent_node(tmp_path: Path) -> None:
    with netns.nodes_of(tmp_path, (2, 2), "test_internode_namespaces:crawl") as nodes:
        # Each node sends 4 MB.
        nodes.limit("5mbit")
        for took in nodes.results():
            assert took > 5.0, f"{took:.1f} s: the wire was too quick to show anything"


def ready(nodes: netns.Nodes) -> float:
    """Waits until all ranks have finished their calls; returns the time."""
    nodes.wait("ready")
    time.sleep(0.2)
    return time.monotonic()


def ranks_of(layout: Sequence[int], node: int) -> list[int]:
    return [rank for rank, at in enumerate(launch.nodes_of(layout)) if at == node]


def all_but(layout: Sequence[int], node: int) -> list[int]:
    """The ranks of the other nodes."""
    return [rank for rank, at in enumerate(launch.nodes_of(layout)) if at != node]


def name(layout: Sequence[int], node: int) -> str:
    """The name of a node in messages."""
    ranks = list(map(str, ranks_of(layout, node)))
    return f'node "h{node}" (rank{"s" * (len(ranks) > 1)} {" and ".join(ranks)})'


def check_silent(layout: Sequence[int], node: int, text: str) -> None:
    assert re.search(rf"{re.escape(name(layout, node))} of group .* has not answered for 5\.\d s", text), text
    assert not any(name(layout, other) in text for other in range(len(layout)) if other != node), text


def check_gone(layout: Sequence[int], node: int, text: str) -> None:
    ranks = "|".join(map(str, ranks_of(layout, node)))
    one = rf'rank ({ranks}) \(node "h{node}", pid \d+\)'
    assert re.search(rf"({re.escape(name(layout, node))}|{one}) of group .* (is gone|has ended)", text), text


each_node_lost = pytest.mark.parametrize(
    ("layout", "lost"),
    [
        ((1, 1, 2), 2),
        pytest.param((2, 2), 1, marks=pytest.mark.slow),
        pytest.param((1, 1, 2), 0, marks=pytest.mark.slow),
        pytest.param((1, 1, 2), 1, marks=pytest.mark.slow),
    ],
    ids=str,
)


@pytest.mark.timed
@each_node_lost
def test_the_node_whose_cable_is_out_is_named_by_all_others(tmp_path: Path, layout: Sequence[int], lost: int) -> None:
    with netns.nodes_of(tmp_path, layout, "test_internode_namespaces:survive") as nodes:
        cut = ready(nodes)
        nodes.cut(lost)
        for node, (text, heard) in zip(launch.nodes_of(layout), nodes.results(), strict=True):
            # A cut node is connected only with the first node, so it misses that node. The first node is connected with
            # all others, so if it is cut, it may miss any of them first.
            missed = lost if node != lost else 0 if lost else next(other for other in (1, 2) if f'"h{other}"' in text)
            check_silent(layout, missed, text)
            assert 3.9 < heard - cut < 7, f"{heard - cut:.2f} s: {text}"
        # The nodes are containers of one machine; exactly one rank reports this.
        other = layout[0]
        advice = (
            rf"ranks 0 and {other} run in different containers of one node .* start the containers with .*--network="
        )
        assert len(re.findall(advice, nodes.logs())) == 1, nodes.logs()


@each_node_lost
def test_a_node_whose_processes_all_end_is_named_at_once(tmp_path: Path, layout: Sequence[int], lost: int) -> None:
    with netns.nodes_of(tmp_path, layout, "test_internode_namespaces:survive") as nodes:
        killed = ready(nodes)
        nodes.kill(lost)
        for text, heard in nodes.results(all_but(layout, lost)):
            check_gone(layout, lost, text)
            # Exits of processes take some time on a busy node.
            assert heard - killed < 8, f"{heard - killed:.2f} s: {text}"
            print(f"heard after {1000 * (heard - killed):.0f} ms: {text}")


@pytest.mark.timed
@pytest.mark.parametrize(
    ("layout", "stopped"),
    [((3, 1), 1), *(pytest.param((1, 1, 1, 1), node, marks=pytest.mark.slow) for node in (0, 3))],
    ids=str,
)
def test_a_node_whose_processes_are_stopped_is_named(tmp_path: Path, layout: Sequence[int], stopped: int) -> None:
    with netns.nodes_of(tmp_path, layout, "test_internode_namespaces:compute") as nodes:
        since = ready(nodes)
        nodes.stop(stopped)
        for text, heard in nodes.results(all_but(layout, stopped)):
            check_silent(layout, stopped, text)
            assert 3.9 < heard - since < 7, f"{heard - since:.2f} s: {text}"
        nodes.resume(stopped)
        (text, _), *_ = nodes.results(ranks_of(layout, stopped))
        check_silent(layout, stopped, text)

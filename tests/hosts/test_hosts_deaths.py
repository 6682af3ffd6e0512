"""Deaths on several hosts: whoever survives hears of them at once, also while it calls nothing, and by name."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
import torch_symm
from machines import NAMES, hosts_of, run_hosts
from test_groups import assert_nothing_left, resources
from torch_symm import _engines

#: Seconds in which all survivors know; 0.2 is what is promised where cores are free.
SOON = 0.5


def backend() -> dist.Backend:
    return dist.group.WORLD._get_backend(torch.device("cpu"))


def failed() -> bool:
    return "SUCCESS" not in str(backend().get_error())


def hear(deadline: float = 15) -> float:
    """The time when this rank has heard of a failure, without a call."""
    until = time.monotonic() + deadline
    while not failed():
        assert time.monotonic() < until, "nobody has told"
        time.sleep(0.001)
    return time.monotonic()


def call_until_it_fails() -> tuple[str, float]:
    """What a call says that must fail, and when it did."""
    with pytest.raises(torch_symm.SymmPeerError) as caught:
        while True:
            dist.all_reduce(torch.ones(4))
    return str(caught.value), time.monotonic()


def note(name: str, text: object) -> None:
    path: Path = ranks.scratch / f"{name}-"
    path.write_text(str(text))
    path.rename(ranks.scratch / name)


def noted(name: str) -> str:
    deadline = time.monotonic() + 20
    while not (ranks.scratch / name).exists():
        assert time.monotonic() < deadline, name
        time.sleep(0.001)
    return (ranks.scratch / name).read_text()


def die(rank: int, world_size: int, victim: int, calling: bool, child: bool) -> tuple[str, float, int] | None:
    dist.all_reduce(torch.ones(4))
    ranks.meet("before", rank, world_size)
    if rank == victim:
        # By then all others wait in their call, or do nothing.
        time.sleep(0.3)
        if child and os.fork() == 0:
            time.sleep(4)
            os._exit(0)
        note("died", f"{time.monotonic()} {os.getpid()}")
        os.kill(os.getpid(), signal.SIGKILL)
    if calling:
        text, moment = call_until_it_fails()
    else:
        moment = hear()
        begun = time.monotonic()
        text, raised = call_until_it_fails()
        assert raised - begun < SOON, "later calls raise at once"
    died, pid = noted("died").split()
    return text, moment - float(died), int(pid)


DEATHS = [
    ((2, 2), 0),
    ((2, 2), 1),
    ((2, 2), 2),
    ((2, 2), 3),
    ((3, 1), 0),
    ((3, 1), 2),
    ((3, 1), 3),
    ((1, 1, 1), 0),
    ((1, 1, 1), 1),
    ((1, 1, 1, 1), 2),
]


@pytest.mark.timed
@pytest.mark.parametrize("calling", [False, True], ids=["idle", "calling"])
@pytest.mark.parametrize(("layout", "victim"), DEATHS, ids=str)
def test_a_death_is_heard_of_on_all_hosts(layout: tuple[int, ...], victim: int, calling: bool) -> None:
    results = run_hosts(die, layout, victim, calling, False, expect_killed=[victim])
    check(results, layout, victim)


def check(results: ranks.Results, layout: tuple[int, ...], victim: int) -> None:
    heard = [result for rank, result in enumerate(results) if rank != victim]
    host = hosts_of(layout)[victim]
    for text, seconds, pid in heard:
        assert f'rank {victim} (host "{NAMES[host]}", pid {pid})' in text, text
        # Who shares the host with the dead knows how it ended.
        assert ("killed by signal 9 (SIGKILL)" if layout[host] > 1 else "is gone") in text, text
        assert seconds < SOON, f"{seconds:.3f} s: {text}"
    times = ", ".join(f"{1000 * seconds:.0f}" for _, seconds, _ in heard)
    print(f"{layout}: rank {victim} died; others heard after {times} ms: {heard[-1][0]}")


@pytest.mark.timed
def test_a_child_of_the_dead_hides_nothing() -> None:
    check(run_hosts(die, (1, 1, 1), 1, False, True, expect_killed=[1]), (1, 1, 1), 1)


def fork_a_child() -> None:
    if os.fork() == 0:
        time.sleep(10)
        os._exit(0)


def start_a_program() -> None:
    subprocess.Popen(["sleep", "10"], close_fds=False)


def die_within(rank: int, world_size: int, child: Callable[[], None]) -> None:
    message = torch.ones(1 << 22)
    dist.all_reduce(message)
    with_rails = resources()
    assert any("gloo" in name for name in with_rails), with_rails
    ranks.meet("before", rank, world_size)
    if rank == 1:
        child()
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
    with pytest.raises(torch_symm.SymmPeerError):
        while True:
            dist.all_reduce(message)
    dist.destroy_process_group()
    deadline = time.monotonic() + 3
    while left := [name for name in resources() if "gloo" in name or "symm-rail" in name]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.mark.timed
@pytest.mark.parametrize("child", [fork_a_child, start_a_program])
def test_a_child_of_the_dead_keeps_no_rail_open(child: Callable[[], None]) -> None:
    run_hosts(die_within, (1, 1, 1), child, expect_killed=[1])


def die_while_connecting(rank: int, world_size: int, kind: str) -> None:
    """Rank 1 is killed when rank 0 already waits for its address."""
    make = _engines.make
    dist.destroy_process_group()

    def dying(engine: str, name: str, *arguments: Any) -> Any:
        if rank == 1 and f"{kind}/" in name:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        return make(engine, name, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_engines, "make", dying)
        with pytest.raises(torch_symm.SymmPeerError, match="rank 1 "):
            ranks.init(rank, world_size, name="again")
            dist.recv(torch.zeros(4), 1) if rank == 0 else dist.send(torch.zeros(4), 0)
    if dist.is_initialized():
        dist.destroy_process_group()
    # Making the connection would go on until its limit of 30 s, or that of joining.
    deadline = time.monotonic() + 10
    while left := [name for name in resources() if "thread symm-" in name]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


@pytest.mark.parametrize("kind", ("symm-rail", "symm-pair"))
def test_a_death_while_hosts_connect_leaves_no_thread(kind: str) -> None:
    run_hosts(die_while_connecting, (1, 1), kind, expect_killed=[1])


def stop_host(rank: int, world_size: int) -> tuple[str, float] | None:
    dist.all_reduce(torch.ones(4))
    ranks.meet("before", rank, world_size)
    if rank >= 2:
        note(f"stopped-{rank}", f"{time.monotonic()} {os.getpid()}")
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    moment = hear()
    text, _ = call_until_it_fails()
    stopped = [noted(f"stopped-{other}").split() for other in (2, 3)]
    ranks.meet("heard", rank, 2)
    if rank == 0:
        for _, pid in stopped:
            os.kill(int(pid), signal.SIGKILL)
    return text, moment - max(float(at) for at, _ in stopped)


@pytest.mark.timed
def test_a_host_that_says_nothing_is_named() -> None:
    for text, seconds in run_hosts(stop_host, (2, 2), expect_killed=[2, 3])[:2]:
        assert re.search(r'host "b" \(ranks 2 and 3\) of group ".*" has not answered for 5\.\d s', text), text
        assert 3.9 < seconds < 7, text


def stop_leader(rank: int, world_size: int) -> None:
    dist.all_reduce(torch.ones(4))
    ranks.meet("before", rank, world_size)
    if rank == 3:
        leader = int(noted("leader"))
        time.sleep(6.5)
        os.kill(leader, signal.SIGCONT)
    elif rank == 2:
        note("leader", os.getpid())
        os.kill(os.getpid(), signal.SIGSTOP)
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    assert bool((tensor == 4).all())


def test_a_stopped_rank_is_no_dead_one() -> None:
    run_hosts(stop_leader, (2, 2))


def abort(rank: int, world_size: int, culprit: int) -> tuple[str, float, int] | None:
    dist.all_reduce(torch.ones(4))
    ranks.meet("before", rank, world_size)
    if rank == culprit:
        time.sleep(0.3)
        note("aborted", f"{time.monotonic()} {os.getpid()}")
        backend().abort()
        return None
    text, moment = call_until_it_fails()
    at, pid = noted("aborted").split()
    return text, moment - float(at), int(pid)


def end_beside_a_stopped_host(rank: int, world_size: int, count: int) -> float | None:
    dist.all_reduce(torch.ones(4))
    ranks.meet("before", rank, world_size)
    if rank == world_size - 1:
        note("stopped", os.getpid())
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    stopped, moments = int(noted("stopped")), []

    def end() -> None:
        moments.append(time.monotonic())
        backend().abort()

    threading.Timer(0.5, end).start()
    with pytest.raises(torch_symm.SymmAborted):
        dist.all_reduce(torch.ones(count))
    late = time.monotonic() - moments[0]
    dist.destroy_process_group()
    took = time.monotonic() - moments[0]
    os.kill(stopped, signal.SIGKILL)
    assert took < 2.0, took
    return late


@pytest.mark.timed
@pytest.mark.parametrize("count", [4, 1 << 20])
def test_a_call_that_waits_for_a_stopped_host_ends_with_the_group(count: int) -> None:
    late, _ = run_hosts(end_beside_a_stopped_host, (1, 1), count, expect_killed=[1])
    assert late < SOON, late


@pytest.mark.timed
@pytest.mark.parametrize(("layout", "culprit"), [((2, 2), 3), ((3, 1), 2), ((1, 1, 1), 0)], ids=str)
def test_an_abort_releases_calls_on_other_hosts(layout: tuple[int, ...], culprit: int) -> None:
    results = run_hosts(abort, layout, culprit)
    heard = [result for rank, result in enumerate(results) if rank != culprit]
    for text, seconds, pid in heard:
        assert f'rank {culprit} (host "{NAMES[hosts_of(layout)[culprit]]}", pid {pid}) aborted group' in text, text
        assert seconds < 1, text
    print(f"{layout}: others raise after {', '.join(f'{1000 * seconds:.0f}' for _, seconds, _ in heard)} ms")


def leave_early(rank: int, world_size: int) -> str | None:
    dist.all_reduce(torch.ones(4))
    ranks.meet("before", rank, world_size)
    if rank >= 2:
        dist.destroy_process_group()
        ranks.meet("gone", rank, world_size)
        ranks.meet("over", rank, world_size)
        return None
    ranks.meet("gone", rank, world_size)
    time.sleep(0.5)
    assert not failed(), "who leaves in order fails nobody"
    text, _ = call_until_it_fails()
    ranks.meet("over", rank, world_size)
    return text


@pytest.mark.parametrize("layout", [(2, 2), (2, 1, 1)], ids=str)
def test_who_leaves_in_order_is_named_by_the_next_call_only(layout: tuple[int, ...]) -> None:
    for text in run_hosts(leave_early, layout)[:2]:
        assert re.search(r'rank [23] \(host "[bc]", pid \d+\) of group ".*" left the group', text), text


def come_and_go(rank: int, world_size: int) -> None:
    for _ in range(2):
        dist.destroy_process_group(dist.new_group())
    before = resources()
    groups = [dist.new_group() for _ in range(5)]
    for group in groups:
        dist.all_reduce(torch.ones(4), group=group)
    for group in groups:
        dist.destroy_process_group(group)
    del group, groups
    assert_nothing_left(before)
    dist.barrier()
    dist.destroy_process_group()
    deadline = time.monotonic() + 20
    while any(name.startswith("thread symm-") for name in resources()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(name.startswith("thread symm-") for name in resources()), resources()


def test_groups_leave_no_thread_and_no_descriptor() -> None:
    run_hosts(come_and_go, (2, 2))

"""An argument that is refused on some ranks: those of other hosts that wait for them are told why, and soon."""

from __future__ import annotations

import time
from itertools import product

import pytest
import ranks
import test_coalescing
import torch
import torch.distributed as dist
import torch_symm
from machines import run_hosts


def overlapping() -> torch.Tensor:
    """No backend can reduce it."""
    return torch.ones(1).expand(64)


def freed() -> torch.Tensor:
    """There is nothing that could be sent."""
    tensor = torch.ones(64)
    tensor.untyped_storage().resize_(0)
    return tensor


def told(call: object) -> tuple[str, float]:
    begun = time.monotonic()
    with pytest.raises(torch_symm.SymmMismatch) as caught:
        call()  # type: ignore[operator]
    return str(caught.value), time.monotonic() - begun


def refuses(rank: int, world_size: int, refusing: tuple[int, ...], early: float) -> tuple[str, float] | None:
    dist.barrier()
    answer = None
    if rank in refusing:
        time.sleep(0.3 - early)
        with pytest.raises((ValueError, RuntimeError)):
            dist.all_reduce(overlapping())
        time.sleep(0.6)
        answer = told(lambda: dist.all_reduce(torch.ones(64)))
    else:
        time.sleep(early)
        answer = told(lambda: dist.all_reduce(torch.ones(64)))
    ranks.meet("over", rank, world_size)
    return answer


@pytest.mark.timed
@pytest.mark.parametrize("early", (0.0, 0.3), ids=("the others wait", "the others come later"))
@pytest.mark.parametrize(
    ("layout", "refusing"),
    [((1, 1), (0,)), ((1, 1), (1,)), ((1, 2), (0,)), ((2, 2), (0, 1)), ((2, 2, 1), (4,))],
    ids=str,
)
def test_a_refused_collective_is_told_to_other_hosts(
    layout: tuple[int, ...], refusing: tuple[int, ...], early: float
) -> None:
    for rank, (text, took) in enumerate(run_hosts(refuses, layout, refusing, early)):
        assert "refused a call and has not made it since" in text, text
        assert any(f"rank {other} (host" in text.partition("refused")[0] for other in refusing), text
        assert "in all_reduce, collective #" in text, text
        assert took < (0.1 if rank in refusing else 0.8), (rank, took)


def corrects(rank: int, world_size: int, pause: float) -> None:
    """Whoever makes the right call in time, or before others wait, disturbs nobody."""
    for turn in range(3):
        dist.barrier()
        if rank == turn % world_size:
            with pytest.raises((ValueError, RuntimeError)):
                dist.all_reduce(overlapping())
            time.sleep(pause)
        elif pause > 0.08:
            time.sleep(pause)
        tensor = torch.ones(64)
        dist.all_reduce(tensor)
        assert bool((tensor == world_size).all())


@pytest.mark.timed
@pytest.mark.parametrize("pause", (0.0, 0.04, 0.3))
@pytest.mark.parametrize("layout", [(1, 1), (2, 1)], ids=str)
def test_who_makes_the_right_call_disturbs_nobody(layout: tuple[int, ...], pause: float) -> None:
    run_hosts(corrects, layout, pause)


def all_refuse(rank: int, world_size: int) -> None:
    for _ in range(3):
        with pytest.raises((ValueError, RuntimeError)):
            dist.all_reduce(overlapping())
    time.sleep(0.03)
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [world_size] * 4


def all_refuse_and_one_is_late(rank: int, world_size: int) -> None:
    for late in (0, world_size - 1):
        dist.barrier()
        with pytest.raises((ValueError, RuntimeError)):
            dist.all_reduce(overlapping())
        time.sleep(0.5 if rank == late else 0.0)
        tensor = torch.ones(4)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [world_size] * 4


@pytest.mark.parametrize("layout", [(2,), (1, 1), (2, 2)], ids=str)
def test_a_rank_that_is_late_after_all_have_refused_fails_nobody(layout: tuple[int, ...]) -> None:
    run_hosts(all_refuse_and_one_is_late, layout)


@pytest.mark.parametrize("layout", [(1, 1), (2, 2)], ids=str)
def test_a_call_that_all_refuse_leaves_the_group_alone(layout: tuple[int, ...]) -> None:
    run_hosts(all_refuse, layout)


def refuses_again(rank: int, world_size: int, refusing: tuple[int, ...]) -> tuple[str, float]:
    """All refuse a call; then some refuse the next one, too, which the others make."""
    dist.barrier()
    for turn in range(2):
        if turn == 0 or rank in refusing:
            with pytest.raises((ValueError, RuntimeError)):
                dist.all_reduce(overlapping())
            time.sleep(0.2)
    if rank in refusing:
        time.sleep(0.6)
    answer = told(lambda: dist.all_reduce(torch.ones(64)))
    ranks.meet("over", rank, world_size)
    return answer


@pytest.mark.timed
@pytest.mark.parametrize(("layout", "refusing"), [((1, 1), (1,)), ((2, 2), (0, 1)), ((1, 1, 1), (2,))], ids=str)
def test_a_second_refusal_at_the_same_place_is_told_to_other_hosts(
    layout: tuple[int, ...], refusing: tuple[int, ...]
) -> None:
    for rank, (text, took) in enumerate(run_hosts(refuses_again, layout, refusing)):
        assert "refused a call and has not made it since" in text, text
        assert any(f"rank {other} (host" in text.partition("refused")[0] for other in refusing), text
        assert took < (0.1 if rank in refusing else 0.8), (rank, took)


def refuses_message(rank: int, world_size: int, kind: str, met: bool) -> tuple[str, float] | None:
    last = world_size - 1
    if met and rank in (0, last):
        dist.send(torch.ones(1), last) if rank == 0 else dist.recv(torch.ones(1), 0)
    dist.barrier()
    answer = None
    if rank == 0:
        time.sleep(0.2)
        with pytest.raises((ValueError, RuntimeError)):
            if kind == "send":
                dist.send(freed(), last, tag=4)
            else:
                dist.recv(overlapping(), last, tag=4)
    elif rank == last:
        # One that is offered waits for its receive.
        long = torch.ones(1 << 20)
        answer = told(lambda: dist.recv(long, 0, tag=4) if kind == "send" else dist.send(long, 0, tag=4))
    ranks.meet("over", rank, world_size)
    return answer


@pytest.mark.timed
@pytest.mark.parametrize("met", (True, False), ids=("connected", "not connected"))
@pytest.mark.parametrize("kind", ("send", "recv"))
@pytest.mark.parametrize("layout", [(1, 1), (2, 2)], ids=str)
def test_a_refused_message_is_told_to_the_peer_that_waits_for_it(layout: tuple[int, ...], kind: str, met: bool) -> None:
    text, took = run_hosts(refuses_message, layout, kind, met)[sum(layout) - 1]
    waits = "recv" if kind == "send" else "send"
    assert "rank 0 (host" in text and f"refused a call and has not made it since; rank {sum(layout) - 1}" in text, text
    assert f"waits for it in {waits}(4194304 bytes, float32, tag 4)" in text, text
    assert took < 5, took


def refuses_any(rank: int, world_size: int, met: bool) -> tuple[str, float] | None:
    if met:
        for peer in range(1, world_size):
            if rank in (0, peer):
                dist.send(torch.ones(1), peer) if rank == 0 else dist.recv(torch.ones(1), 0)
    dist.barrier()
    answer = None
    if rank == 0:
        time.sleep(0.2)
        with pytest.raises((ValueError, RuntimeError)):
            dist.recv(overlapping(), tag=4)
    else:
        answer = told(lambda: dist.send(torch.ones(1 << 20), 0, tag=4))
    ranks.meet("over", rank, world_size)
    return answer


@pytest.mark.timed
@pytest.mark.parametrize("met", (True, False), ids=("connected", "not connected"))
@pytest.mark.parametrize("layout", [(1, 1), (2, 2), (1, 1, 1)], ids=str)
def test_a_refused_receive_from_any_rank_is_told_to_all_that_send(layout: tuple[int, ...], met: bool) -> None:
    for text, took in run_hosts(refuses_any, layout, met)[1:]:
        assert "rank 0 (host" in text and "refused a call and has not made it since; rank" in text, text
        assert took < 5, took


def corrects_message(rank: int, world_size: int) -> None:
    for turn, pause in enumerate((0.0, 0.04, 0.3)):
        dist.barrier()
        if rank == 0:
            with pytest.raises((ValueError, RuntimeError)):
                dist.send(freed(), 1, tag=turn)
            time.sleep(pause)
            dist.send(torch.full((9,), float(turn)), 1, tag=turn)
        else:
            time.sleep(0.6 if pause > 0.08 else 0)
            got = torch.zeros(9)
            dist.recv(got, 0, tag=turn)
            assert bool((got == turn).all())


@pytest.mark.timed
def test_who_sends_the_right_message_disturbs_nobody() -> None:
    run_hosts(corrects_message, (1, 1))


def test_an_exception_ends_a_block() -> None:
    """Between hosts as inside one."""
    run_hosts(test_coalescing.after_exceptions, (1, 1), "symm")


@pytest.mark.timed
def test_one_limit_for_all_parts_of_a_block() -> None:
    run_hosts(test_coalescing.one_limit, (1, 1))


def corrects_later(rank: int, world_size: int) -> None:
    """Rank 0 refuses a message of rank 2, which learns of that, and makes another call before the right one."""
    for peer in (0, 2):
        dist.send(torch.ones(1), 2 - peer) if rank == peer else dist.recv(torch.ones(1), peer) if rank != 1 else None
    for turn, (refused, between) in enumerate(product(("send", "recv", "any"), ("barrier", "message", "receive"))):
        dist.barrier()
        if rank == 0:
            with pytest.raises((ValueError, RuntimeError)):
                if refused == "send":
                    dist.send(freed(), 2, tag=turn)
                else:
                    dist.recv(overlapping(), 2 if refused == "recv" else None, tag=turn)
            time.sleep(0.2)
        if between == "barrier":
            dist.barrier()
        elif between == "receive":
            # Of another tag: nothing tells rank 2 that rank 0 has begun it.
            if rank == 0:
                work = dist.irecv(torch.ones(1), 2, tag=100 + turn)
            ranks.meet(f"begun-{turn}", rank, world_size)
        elif rank < 2:
            dist.send(torch.ones(1), 1) if rank == 0 else dist.recv(torch.ones(1), 0)
        # Over rank 1, so that rank 2 comes after the call.
        if rank == 1:
            dist.send(torch.ones(1), 2)
        elif rank == 2:
            dist.recv(torch.ones(1), 1)
        # It waits for more than a piece, so that a send needs its receive, too.
        long = torch.full((1 << 20,), float(rank))
        if rank == 0:
            time.sleep(0.2)
            if refused == "send":
                dist.send(long, 2, tag=turn)
            else:
                dist.recv(long, 2 if refused == "recv" else None, tag=turn)
                assert bool((long == 2).all())
        elif rank == 2:
            dist.recv(long, 0, tag=turn) if refused == "send" else dist.send(long, 0, tag=turn)
            assert refused != "send" or bool((long == 0).all())
        if between == "receive" and rank != 1:
            dist.send(torch.ones(1), 0, tag=100 + turn) if rank == 2 else work.wait()


def test_a_refused_message_does_not_count_once_its_rank_has_made_another_call() -> None:
    run_hosts(corrects_later, (2, 1))

"""Outputs that share memory with each other or with inputs.

Inputs are read before anything is written, and outputs get their values one after another, so that the last one wins:
as if each had separate memory and was copied in the end. Gloo does the same where it can.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

WORLD = 3
#: Numbers of elements of a message that is inline, staged, and in several staged chunks.
COUNTS = (3, 3_000, 400_000)

DEVICES = (
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason=f"{WORLD} GPUs are needed")
    ),
)


def given(rank: int, count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) + 1000 * (rank + 1)


def total(count: int) -> torch.Tensor:
    return torch.stack([given(rank, count) for rank in range(WORLD)]).sum(0)


def one_after_the_other(base: torch.Tensor, places: list[slice], values: list[torch.Tensor]) -> torch.Tensor:
    for place, value in zip(places, values, strict=True):
        base[place] = value
    return base


def same_output(rank: int, count: int, device: str) -> None:
    own, everyone = given(rank, count).to(device), [given(r, count) for r in range(WORLD)]
    got = torch.zeros(count, device=device)
    dist.all_gather([got] * WORLD, own)
    assert torch.equal(got.cpu(), everyone[-1]), "all_gather"
    dist.all_gather([own] * WORLD, own)
    assert torch.equal(own.cpu(), everyone[-1]), "all_gather over its input"
    got = torch.zeros(count, device=device)
    dist.gather(given(rank, count).to(device), [got] * WORLD if rank == 1 else None, dst=1)
    assert torch.equal(got.cpu(), everyone[-1] if rank == 1 else torch.zeros(count)), "gather"
    dist.all_to_all([got] * WORLD, [given(rank, count).to(device) + to for to in range(WORLD)])
    assert torch.equal(got.cpu(), everyone[-1] + rank), "all_to_all"
    got = given(rank, count).to(device)
    dist.all_reduce_coalesced([got, got])
    assert torch.equal(got.cpu(), total(count)), "all_reduce_coalesced"
    dist.all_gather_coalesced([[got, got] for _ in range(WORLD)], [own, own + 1])
    assert torch.equal(got.cpu(), everyone[-1] + 1), "all_gather_coalesced"


def partly_the_same(rank: int, count: int, device: str) -> None:
    half = count // 2
    places = [slice(i * half, i * half + count) for i in range(WORLD)]
    room = torch.zeros(WORLD * count, device=device)
    dist.all_gather([room[place] for place in places], given(rank, count).to(device))
    everyone = [given(r, count) for r in range(WORLD)]
    wanted = one_after_the_other(torch.zeros(WORLD * count), places, everyone)
    assert torch.equal(room.cpu(), wanted), "all_gather"
    # The outputs in reverse order; the first one is strided.
    room = torch.zeros(WORLD * count, device=device)
    strided = room[: 2 * count : 2]
    dist.all_gather([strided, room[half : half + count], room[:count]], given(rank, count).to(device))
    wanted = torch.zeros(WORLD * count)
    wanted[: 2 * count : 2] = everyone[0]
    wanted[half : half + count] = everyone[1]
    wanted[:count] = everyone[2]
    assert torch.equal(room.cpu(), wanted), "all_gather of a strided one"
    room = given(rank, 2 * count).to(device)
    dist.all_reduce_coalesced([room[:count], room[half : half + count]])
    wanted = given(rank, 2 * count)
    wanted[: half + count] = total(2 * count)[: half + count]
    assert torch.equal(room.cpu(), wanted), "all_reduce_coalesced"


def beside_inputs(rank: int, count: int, device: str) -> None:
    """Several calls run as one, and one of them writes memory that another reads."""
    room = given(rank, 4 * count).to(device)
    whole = room.clone()
    inputs = [room[3 * count :], room[:count]]
    outputs = [room[: WORLD * count], torch.zeros(WORLD * count, device=device)]
    dist.group.WORLD.allgather_into_tensor_coalesced(outputs, inputs).wait()
    assert torch.equal(room[3 * count :], whole[3 * count :])
    for r in range(WORLD):
        piece = slice(r * count, (r + 1) * count)
        assert torch.equal(room[piece].cpu(), given(r, 4 * count)[3 * count :]), "the first"
        assert torch.equal(outputs[1][piece].cpu(), given(r, 4 * count)[:count]), (
            "the second reads what was there before"
        )
    room = given(rank, 4 * count).to(device)
    dist.scatter(room[count : 2 * count], [room[r * count // 2 :][:count] for r in range(WORLD)] if rank == 0 else None)
    assert torch.equal(room[count : 2 * count].cpu(), given(0, 4 * count)[rank * count // 2 :][:count]), "scatter"


def within(rank: int, count: int, device: str) -> None:
    """An input is a part of the output, or an output of the input: in the place of any rank, or between places."""
    everyone = torch.cat([given(r, count) for r in range(WORLD)])
    for begin in (*range(0, WORLD * count, count), 1):
        room = torch.zeros(WORLD * count, device=device)
        (piece := room[begin : begin + count]).copy_(given(rank, count))
        dist.all_gather_into_tensor(room, piece)
        assert torch.equal(room.cpu(), everyone), f"all_gather_into_tensor from {begin}"
    wanted = torch.stack([given(r, WORLD * count) for r in range(WORLD)]).sum(0).view(WORLD, count)[rank]
    for place in range(WORLD):
        room = given(rank, WORLD * count).to(device).view(WORLD, count)
        dist.reduce_scatter_tensor(room[place], room.view(-1))
        assert torch.equal(room[place].cpu(), wanted), f"reduce_scatter_tensor into {place}"
    parts = [torch.full((count,), -1.0, device=device) for _ in range(WORLD)]
    parts[1].copy_(given(rank, count))
    dist.gather(parts[1], parts if rank == 0 else None, dst=0)
    assert rank or torch.equal(torch.cat(parts).cpu(), everyone), "gather"
    parts = [given(r, count).to(device) for r in range(WORLD)]
    dist.scatter(parts[2], parts if rank == 0 else None, src=0)
    assert torch.equal(parts[2].cpu(), given(rank, count)), "scatter"


def one_after_another(rank: int, count: int, device: str) -> None:
    """Calls on copied tensors without a wait between them: each sees the results of the earlier."""
    whole = torch.zeros(2 * count, device=device)
    every_other, before = whole[::2], given(rank, count).to(device)
    every_other.copy_(before)
    sums = [dist.all_reduce(every_other, async_op=True) for _ in range(3)]
    over_all = torch.empty(WORLD * 2 * count, device=device)
    gathered = dist.all_gather_into_tensor(over_all, whole, async_op=True)
    # The input overlaps the output, and is the result of the call before.
    shifted = torch.arange(count + 1, dtype=torch.float32, device=device)
    parts = (
        [
            dist.broadcast(shifted, src=1, async_op=True),
            dist.all_to_all_single(shifted[1:], shifted[:-1], async_op=True),
        ]
        if count % WORLD == 0
        else []
    )
    dist.all_reduce(every_other)
    for work in (*sums, gathered, *parts):
        work.wait()
    once = total(count)
    thrice = torch.zeros(2 * count)
    thrice[::2] = once * WORLD**2
    assert torch.equal(over_all.cpu(), thrice.repeat(WORLD)), "all_gather after three all_reduces"
    assert torch.equal(every_other.cpu(), once * WORLD**3), "all_reduce without async_op"
    if parts:
        own = torch.arange(count, dtype=torch.float32).chunk(WORLD)[rank]
        assert torch.equal(shifted[1:].cpu(), own.repeat(WORLD)), "all_to_all over its input"


# proves P8
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", (same_output, partly_the_same, beside_inputs, within, one_after_another))
@pytest.mark.ranks(WORLD)
def test_outputs_that_share_memory(rank: int, case: Callable[[int, int, str], None], device: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    for count in COUNTS:
        case(rank, count, device)

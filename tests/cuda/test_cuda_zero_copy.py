"""Calls on tensors in symmetric memory: the same bits as on other tensors, and zero-copy wherever possible."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from cases import Case, Findings
from collectives import COLLECTIVES
from expected import name, op_of
from pool import WORLDS, Pool, device, needs_gpus, settle
from zero_copy import MB, direct, new_pool, numbers, rises, same_bytes, warm

pytestmark = needs_gpus

#: Collectives whose tensors have the length of the message; the others have that length for each rank.
WHOLE = ("all_reduce", "reduce", "broadcast", "ring")
SHAPES = ((9 * MB, 0), (9 * MB, 1), (3 * MB, -1))


def sweep(rank: int, world: int, collective: str) -> tuple[int, int]:
    """Compares calls with the definition; tensors are symmetric, misaligned, or symmetric on every second rank."""
    findings = Findings()
    memory = new_pool()
    with torch.cuda.use_mem_pool(memory):
        kept = torch.ones(8 * MB, dtype=torch.uint8, device=device())
    warm(dist.all_reduce, kept)
    before = direct()
    parts = 1 if collective in WHOLE else world
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for size, more in SHAPES:
            for layout, everyone in (("contiguous", True), ("offset", True), ("contiguous", False)):
                count = size // dtype.itemsize // parts + more
                case = Case(rank, world, dtype, count, layout, more == 1, device=device())
                mine = everyone or rank % 2 == 0
                with (
                    findings.case(f"{case.about}, {'symmetric' if mine else 'ordinary'}"),
                    torch.cuda.use_mem_pool(memory) if mine else nullcontext(),
                ):
                    COLLECTIVES[collective](case)
    return findings.close(), direct() - before


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("world", WORLDS)
def test_as_defined(pool: Pool, world: int, collective: str) -> None:
    found = pool.run(sweep, world, collective, timeout=200)
    assert [cases for cases, _ in found] == [27] * world
    # Messages around a ring may have been sent through staging before the receiver offers its tensor.
    assert collective == "ring" or any(used for _, used in found), found


Call = Callable[[torch.Tensor, torch.Tensor, dist.ReduceOp], object]
REDUCING: dict[str, Call] = {
    "all_reduce": lambda own, wide, op: dist.all_reduce(wide, op),
    "reduce": lambda own, wide, op: dist.reduce(wide, 1, op),
    "reduce_scatter": lambda own, wide, op: dist.reduce_scatter_tensor(own, wide, op),
}


def reductions(rank: int, world: int) -> list[int]:
    """Every op gives the same bits as on ordinary tensors."""
    memory = new_pool()
    findings = Findings()
    count = 9 * MB // 4 // world // 8 * 8
    with torch.cuda.use_mem_pool(memory):
        buffer = torch.empty(2 * count * world, device=device())
    warm(dist.all_reduce, buffer)
    before = direct()
    kinds = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.int32, torch.uint8)
    for dtype in kinds:
        for op in ("SUM", "AVG", "MAX", "PRODUCT", "PREMUL_SUM", "BXOR"):
            if op == ("PREMUL_SUM" if not dtype.is_floating_point else "BXOR"):
                continue
            length = count * 4 // dtype.itemsize
            given = numbers(length * world, dtype, seed=3)
            for label, call in REDUCING.items():
                with findings.case(f"{label} {op} {name(dtype)}"):
                    results = []
                    for place in (None, buffer.view(torch.uint8)):
                        own, wide = torch.zeros(length, dtype=dtype, device=device()), given.clone()
                        if place is not None:
                            both = place[: (length + length * world) * dtype.itemsize].view(dtype)
                            both.copy_(torch.cat([own, wide]))
                            own, wide = both[:length], both[length:]
                        call(own, wide, op_of(op, 0.5 + rank))
                        results.append([own.clone(), wide.clone() if label != "reduce" or rank == 1 else own.clone()])
                    assert all(same_bytes(a, b) for a, b in zip(*results, strict=True))
    used = direct() - before
    return [findings.close(), used]


@pytest.mark.parametrize("world", WORLDS)
def test_every_reduce_op_has_the_same_bits(pool: Pool, world: int) -> None:
    for cases, used in pool.run(reductions, world, timeout=200):
        assert used == cases, "every second of the calls has symmetric tensors"


def counted(rank: int, world: int) -> None:
    """Every kind of call counts as zero-copy on exactly the ranks that exchange data without staging."""
    memory = new_pool()
    count = 16 * MB // 4 // world // 4 * 4
    with torch.cuda.use_mem_pool(memory):
        wide, other = torch.ones(count * world, device=device()), torch.ones(count * world, device=device())
    ordinary = torch.ones(count * world, device=device())
    warm(dist.all_reduce, wide)
    everyone = [1] * world
    # For a broadcast by rank 1, the location of rank 1's tensor does not matter.
    from_ordinary = [1, 0, *everyone[2:]] if world > 2 else everyone
    pieces, shifted = list(other.view(world, count)), wide[1:] if rank == 1 else wide[:-1]
    calls: list[tuple[str, Callable[[], object], list[int]]] = [
        ("all_reduce", lambda: dist.all_reduce(wide), everyone),
        ("all_reduce of integers", lambda: dist.all_reduce(wide.view(torch.int32)), everyone),
        ("reduce", lambda: dist.reduce(wide, 0), everyone),
        # Each of several other ranks gets a part from the root through staging, and stores it directly on the rest.
        ("broadcast", lambda: dist.broadcast(wide, 0), [0, *everyone[1:]] if world > 2 else everyone),
        ("broadcast from ordinary memory", lambda: dist.broadcast(ordinary if rank == 1 else wide, 1), from_ordinary),
        (
            "broadcast of a misaligned tensor",
            lambda: dist.broadcast(wide[1:] if rank == 1 else wide[:-1], 1),
            from_ordinary,
        ),
        ("broadcast into ordinary memory", lambda: dist.broadcast(wide if rank == 1 else ordinary, 1), [0] * world),
        ("all_gather", lambda: dist.all_gather_into_tensor(other, wide[:count]), everyone),
        ("all_gather of a list", lambda: dist.all_gather(pieces, wide[:count]), everyone),
        ("all_gather in place", lambda: dist.all_gather_into_tensor(other, pieces[rank]), everyone),
        ("reduce_scatter", lambda: dist.reduce_scatter_tensor(other[:count], wide), everyone),
        ("all_to_all", lambda: dist.all_to_all_single(other, wide), everyone),
        ("gather", lambda: dist.gather(wide[:count], pieces if rank == 0 else None, 0), everyone),
        ("scatter", lambda: dist.scatter(wide[:count], pieces if rank == 0 else None, 0), everyone),
        ("async_op", lambda: dist.all_reduce(wide, async_op=True).wait(), everyone),
        # Only the output must be symmetric, because peers store into it; the input may be in any memory.
        ("all_gather from ordinary memory", lambda: dist.all_gather_into_tensor(other, ordinary[:count]), everyone),
        ("all_gather into ordinary memory", lambda: dist.all_gather_into_tensor(ordinary, wide[:count]), [0] * world),
        ("all_reduce of ordinary tensors", lambda: dist.all_reduce(ordinary), [0] * world),
        # Sums are stored directly on the ranks whose tensors permit it.
        ("all_reduce, one is ordinary", lambda: dist.all_reduce(ordinary if rank == 1 else wide), everyone),
        ("all_reduce, one is misaligned", lambda: dist.all_reduce(shifted), everyone),
        ("short all_reduce", lambda: dist.all_reduce(wide[:1000]), [0] * world),
        ("short all_gather", lambda: dist.all_gather_into_tensor(other[: world * 60_000], wide[:60_000]), [0] * world),
        (
            "short all_to_all",
            lambda: dist.all_to_all_single(other[: world * 60_000], wide[: world * 60_000]),
            [0] * world,
        ),
        ("short sends and receives", lambda: ring(rank, world, wide[:60_000], other[:60_000]), [0] * world),
        ("receives into ordinary memory", lambda: ring(rank, world, wide, ordinary), [0] * world),
    ]
    findings = Findings()
    for label, call, wanted in calls:
        with findings.case(label):
            assert [rises(call) for _ in range(2)] == [wanted] * 2
    findings.close()


def ring(rank: int, world: int, own: torch.Tensor, other: torch.Tensor) -> None:
    sends, receives = dist.P2POp(dist.isend, own, (rank + 1) % world), dist.P2POp(dist.irecv, other, (rank - 1) % world)
    for work in dist.batch_isend_irecv([sends, receives]):
        work.wait()


def messages(rank: int, world: int) -> None:
    """Sends and receives: data sent after the receiver's offer go directly to its tensor, from any memory."""
    memory = new_pool()
    # More than staging holds: data that the sender has not sent when the receiver arrives are zero-copy. From 64 MiB on
    # (SYMM_CUDA_TUNING=overlapped_bytes) copy engines may move a message, which test_cuda_copy_engine.py tests.
    count = 60 * MB // 4
    with torch.cuda.use_mem_pool(memory):
        symmetric = torch.empty(count + 8, device=device())
    ordinary = torch.empty(count + 8, device=device())
    warm(lambda: ring(rank, world, ordinary, symmetric))
    source, findings = (rank - 1) % world, Findings()
    for label, out, into, length, wanted in (
        ("symmetric", ordinary, symmetric, count, 2),
        ("an odd length", ordinary[1:], symmetric[4:], count - 3, 2),
        ("misaligned", ordinary, symmetric[1:], count - 1, 0),
        ("into ordinary memory", symmetric, ordinary, count, 0),
        ("into every second rank's symmetric memory", None, ordinary if rank % 2 else symmetric, count, None),
    ):
        with findings.case(label):
            given = torch.empty(length, device=device()) if out is None else out[:length]
            for turn in range(3):
                given.copy_(numbers(length, seed=turn))
                into.fill_(float("nan"))
                used = rises(ring, rank, world, given, into[:length])
                generator = torch.Generator(device()).manual_seed(100 * turn + source)
                expected = torch.empty(length, device=device()).uniform_(-4, 4, generator=generator)
                assert same_bytes(into[:length], expected), f"turn {turn}"
                assert bool(into[length:].isnan().all()), "bytes behind the message were written"
                assert wanted is None or used == [wanted] * world, (turn, used)
    settle()
    findings.close()


@pytest.mark.parametrize("body", (messages, counted))
@pytest.mark.parametrize("world", WORLDS)
def test_what_is_direct(pool: Pool, world: int, body: Callable[..., None]) -> None:
    pool.run(body, world)


def views(rank: int, world: int) -> None:
    """Parts of one tensor at offsets that differ from rank to rank, and calls in direct succession."""
    memory = new_pool()
    count = 5 * MB // 4
    with torch.cuda.use_mem_pool(memory):
        large = torch.zeros(64 * MB // 4, device=device())
    warm(dist.all_reduce, large)
    findings = Findings()
    for turn in range(20):
        start = 4 * ((7919 * (turn + 1) * (rank + 1)) % (10 * MB // 4))
        given = numbers(count, seed=turn)
        dist.all_reduce(wanted := given.clone())
        with findings.case(f"all_reduce at {start}"):
            piece = large[start : start + count]
            piece.copy_(given)
            before = direct()
            dist.all_reduce(piece)
            assert direct() == before + 1, "not direct"
            assert same_bytes(piece, wanted)
        with findings.case(f"many all_reduces at {start}"):
            for _ in range(5):
                piece.copy_(given)
                dist.all_reduce(piece)
                assert same_bytes(piece, wanted)
        with findings.case(f"all_gather at {start}"):
            output = large[start : start + 4 * (count // 8) * world].view(world, -1)
            dist.all_gather_into_tensor(output, given[: output.shape[1]])
            everyone = torch.empty_like(output)
            dist.all_gather_into_tensor(everyone, given[: output.shape[1]])
            assert same_bytes(output, everyone)
    settle()
    findings.close()


# proves P8
@pytest.mark.parametrize("world", WORLDS)
def test_views_at_any_offset(pool: Pool, world: int) -> None:
    pool.run(views, world)


def apart(rank: int, world: int) -> None:
    """All-to-alls in which one rank after another has only short messages, alternating with a long one."""
    memory = new_pool()
    # Longer than any message on LL lines, and than the shortest message that is worth a handshake.
    long, short = 5 * MB // 4, 16
    with torch.cuda.use_mem_pool(memory):
        wide, other = (torch.empty(long * world, device=device()) for _ in range(2))
    wide.fill_(1)
    warm(dist.all_reduce, wide)
    findings = Findings()
    for turn in range(2 * world):
        alone = turn % world
        lengths = [[short if alone in (a, b) else long for b in range(world)] for a in range(world)]
        for label, matrix in ((f"rank {alone} apart", lengths), ("all long", [[long] * world] * world)):
            sends, receives = matrix[rank], [matrix[peer][rank] for peer in range(world)]
            with findings.case(f"turn {turn}, {label}"):
                given, got = wide[: sum(sends)], other[: sum(receives)]
                for to, piece in enumerate(given.split(sends)):
                    piece.fill_(100 * turn + 10 * rank + to)
                got.zero_()
                dist.all_to_all_single(got, given, receives, sends)
                for source, piece in enumerate(got.split(receives)):
                    assert bool((piece == 100 * turn + 10 * source + rank).all()), source
    findings.close()


@pytest.mark.skipif(max(WORLDS) < 3, reason="needs three ranks (SYMM_ALLOW_SHARED_GPUS=1 SYMM_TEST_WORLDS=3)")
@pytest.mark.parametrize("world", [world for world in WORLDS if world > 2] or [3])
def test_ranks_without_a_long_message_keep_pace(pool: Pool, world: int) -> None:
    pool.run(apart, world)

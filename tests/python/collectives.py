"""Every collective: the call of one case, and its expected result. For all numbers of nodes, CPU and CUDA."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import expected
import pytest
import torch
import torch.distributed as dist
from cases import CPU, Case, Findings, Misaligned, Placed, Reference, long_inputs, long_sum
from expected import assert_same, assert_same_bits, name, op_of, seeded

#: Settings of malloc: the sizes from which it frees and allocates by system calls.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def views(placed: Iterable[Placed | Misaligned]) -> list[torch.Tensor]:
    return [each.view for each in placed]


def all_reduce(c: Case) -> None:
    tensor = c.place(c.given())
    c.call(dist.all_reduce, tensor.view, op=c.redop)
    c.same(tensor, c.total())


def reduce(c: Case) -> None:
    tensor = c.place(c.given())
    c.call(dist.reduce, tensor.view, group_dst=c.root, op=c.redop)
    c.same(tensor, c.total() if c.rank == c.root else c.given())


def broadcast(c: Case) -> None:
    tensor = c.place(c.given())
    c.call(dist.broadcast, tensor.view, group_src=c.root)
    c.same(tensor, c.given(c.root))


def all_gather(c: Case) -> None:
    outputs, tensor = [c.blank() for _ in range(c.world)], c.place(c.given())
    c.call(dist.all_gather, views(outputs), tensor.view)
    for rank, output in enumerate(outputs):
        c.same(output, c.given(rank))
    c.same(tensor, c.given())


def all_gather_uneven(c: Case) -> None:
    """Lengths that grow by one element from rank to rank, except that rank 1 has none."""
    all_gather_split(c, [0 if rank == 1 else c.count + rank for rank in range(c.world)])


def all_gather_split(c: Case, counts: list[int]) -> None:
    """``counts[rank]`` elements from each rank."""
    outputs, tensor = [c.blank(count) for count in counts], c.place(c.given(count=counts[c.rank]))
    c.call(dist.all_gather, views(outputs), tensor.view)
    for rank, output in enumerate(outputs):
        c.same(output, c.given(rank, counts[rank]))


def all_gather_into_tensor(c: Case) -> None:
    output, tensor = c.blank(c.count * c.world), c.place(c.given())
    c.call(dist.all_gather_into_tensor, output.view, tensor.view)
    c.same(output, torch.cat(c.all()))
    c.same(tensor, c.given())


def all_gather_in_place(c: Case) -> None:
    output = c.blank(c.count * c.world)
    flat = output.view
    flat[c.rank * c.count : (c.rank + 1) * c.count].copy_(c.given())
    c.call(dist.all_gather_into_tensor, flat, flat[c.rank * c.count : (c.rank + 1) * c.count])
    c.same(output, torch.cat(c.all()))


def all_gather_list_in_place(c: Case) -> None:
    whole = c.place(c.wide())
    pieces = list(whole.view.view(c.world, c.count))
    c.call(dist.all_gather, pieces, pieces[c.rank])
    c.same(whole, torch.cat([c.parts(rank)[rank] for rank in range(c.world)]))


def gather(c: Case) -> None:
    outputs = [c.blank() for _ in range(c.world)] if c.rank == c.root else []
    c.call(dist.gather, c.place(c.given()).view, views(outputs) if c.rank == c.root else None, group_dst=c.root)
    for rank, output in enumerate(outputs):
        c.same(output, c.given(rank))


def scatter(c: Case) -> None:
    output = c.blank()
    parts = [c.place(part).view for part in c.wide().view(c.world, c.count)] if c.rank == c.root else None
    c.call(dist.scatter, output.view, parts, group_src=c.root)
    c.same(output, c.parts(c.rank)[c.root])


def reduce_scatter(c: Case) -> None:
    output, inputs = c.blank(), [c.place(part).view for part in c.wide().view(c.world, c.count)]
    c.call(dist.reduce_scatter, output.view, inputs, op=c.redop)
    c.same(output, c.total_of(c.rank))


def reduce_scatter_uneven(c: Case) -> None:
    """Lengths that differ between ranks; one rank has none."""
    reduce_scatter_split(c, [0 if rank == c.count % 3 else c.count + rank for rank in range(c.world)])


def reduce_scatter_split(c: Case, counts: list[int]) -> None:
    """``counts[rank]`` elements for each rank."""
    inputs = [c.place(c.wide(count=count)[rank * count : (rank + 1) * count]) for rank, count in enumerate(counts)]
    output = c.blank(counts[c.rank])
    c.call(dist.reduce_scatter, output.view, views(inputs), op=c.redop)
    c.same(output, c.total_of(c.rank, counts[c.rank]))


def reduce_scatter_tensor(c: Case) -> None:
    output, tensor = c.blank(), c.place(c.wide())
    c.call(dist.reduce_scatter_tensor, output.view, tensor.view, op=c.redop)
    c.same(output, c.total_of(c.rank))
    c.same(tensor, c.wide())


def reduce_scatter_in_place(c: Case) -> None:
    flat = c.wide().clone()
    output = flat[c.rank * c.count : (c.rank + 1) * c.count]
    c.call(dist.reduce_scatter_tensor, output, flat, op=c.redop)
    assert_same_bits(output, c.total_of(c.rank), c.about)


def all_to_all(c: Case) -> None:
    outputs, inputs = [c.blank() for _ in range(c.world)], [c.place(part) for part in c.wide().view(c.world, c.count)]
    c.call(dist.all_to_all, views(outputs), views(inputs))
    for output, part in zip(outputs, c.parts(c.rank), strict=True):
        c.same(output, part)


def all_to_all_single(c: Case) -> None:
    output, tensor = c.blank(c.count * c.world), c.place(c.wide())
    c.call(dist.all_to_all_single, output.view, tensor.view)
    c.same(output, torch.cat(c.parts(c.rank)))


def all_to_all_in_place(c: Case) -> None:
    whole = c.place(c.wide())
    c.call(dist.all_to_all_single, whole.view, whole.view)
    c.same(whole, torch.cat(c.parts(c.rank)))


def all_to_all_list_in_place(c: Case) -> None:
    whole = c.place(c.wide())
    pieces = list(whole.view.view(c.world, c.count))
    c.call(dist.all_to_all, pieces, list(pieces))
    c.same(whole, torch.cat(c.parts(c.rank)))


def all_to_all_uneven(c: Case) -> None:
    """Splits by which some ranks send nothing to others."""
    all_to_all_split(c, [[((a + 2 * b) % 3) * c.count for b in range(c.world)] for a in range(c.world)])


def all_to_all_kept(c: Case) -> None:
    """Splits by which each rank keeps more than it sends, and rank 0 more than the others."""
    splits = [[(5 - a % 2 if a == b else 1) * c.count for b in range(c.world)] for a in range(c.world)]
    splits[0][0] += 3 * c.count
    all_to_all_split(c, splits)


def all_to_all_split(c: Case, splits: list[list[int]]) -> None:
    """``splits[a][b]`` elements from a to b."""
    own, theirs = splits[c.rank], [splits[giver][c.rank] for giver in range(c.world)]
    output, tensor = c.blank(sum(theirs)), c.place(c.given(count=sum(own)))
    c.call(dist.all_to_all_single, output.view, tensor.view, theirs, own)
    pieces = [c.given(giver, sum(splits[giver])).split(splits[giver])[c.rank] for giver in range(c.world)]
    c.same(output, torch.cat(pieces))


def all_to_all_list_uneven(c: Case) -> None:
    """Splits that differ between pairs of ranks; some are 0."""
    all_to_all_list_split(c, [[((a + 2 * b) % 3) * c.count + b % 2 for b in range(c.world)] for a in range(c.world)])


def all_to_all_list_split(c: Case, splits: list[list[int]]) -> None:
    """As ``all_to_all_split``, with a tensor for each rank."""
    sent = c.given(count=sum(splits[c.rank])).split(splits[c.rank])
    outputs = [c.blank(splits[giver][c.rank]) for giver in range(c.world)]
    c.call(dist.all_to_all, views(outputs), [c.place(piece).view for piece in sent])
    for giver, output in enumerate(outputs):
        c.same(output, c.given(giver, sum(splits[giver])).split(splits[giver])[c.rank])


def coalesced(c: Case) -> None:
    """Three all_reduces at once, then two gathers, then two scatters.

    Without a device, torch records the calls and makes one coalesced call of them; with one, the backend does so.
    """
    device = None if c.layout == "contiguous" else c.device
    tensors = [c.place(c.given(count=c.count + more)) for more in range(3)]
    outputs, inputs = [c.blank(c.count * c.world) for _ in range(2)], [c.place(c.given()) for _ in range(2)]
    halves, sources = [c.blank() for _ in range(2)], [c.place(c.wide()) for _ in range(2)]
    for body in (
        lambda: [dist.all_reduce(tensor.view, c.redop, c.group) for tensor in tensors],
        lambda: [dist.all_gather_into_tensor(a.view, b.view, c.group) for a, b in zip(outputs, inputs, strict=True)],
        lambda: [
            dist.reduce_scatter_tensor(a.view, b.view, c.redop, c.group) for a, b in zip(halves, sources, strict=True)
        ],
    ):
        with dist._coalescing_manager(c.group, device=device, async_ops=c.asynchronous) as manager:
            body()
        if c.asynchronous:
            c.finish(manager)
    for more, tensor in enumerate(tensors):
        c.same(tensor, c.total(c.count + more))
    for output, half in zip(outputs, halves, strict=True):
        c.same(output, torch.cat(c.all()))
        c.same(half, c.total_of(c.rank))


def ring(c: Case) -> None:
    """Each rank sends to the next and receives from the previous, in one batch."""
    output, tensor = c.blank(), c.place(c.given())
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, tensor.view, (c.rank + 1) % c.world),
            dist.P2POp(dist.irecv, output.view, (c.rank - 1) % c.world),
        ]
    )
    for work in works:
        work.wait()
    c.same(output, c.given((c.rank - 1) % c.world))


COLLECTIVES: dict[str, Callable[[Case], None]] = {
    each.__name__: each
    for each in (
        all_reduce, reduce, broadcast, all_gather, all_gather_uneven, all_gather_into_tensor, all_gather_in_place,
        gather, scatter, reduce_scatter, reduce_scatter_tensor, all_to_all, all_to_all_single, all_to_all_uneven,
        all_to_all_kept, coalesced, ring,
    )
}  # fmt: skip
#: Additional collectives on CPU tensors.
ON_CPU: dict[str, Callable[[Case], None]] = {
    **COLLECTIVES,
    **{
        each.__name__: each
        for each in (
            all_gather_list_in_place, reduce_scatter_uneven, reduce_scatter_in_place, all_to_all_in_place,
            all_to_all_list_in_place, all_to_all_list_uneven,
        )
    },
}  # fmt: skip
#: Reductions with an op, and movements that name a root.
REDUCING = ("all_reduce", "reduce", "reduce_scatter_uneven")
ROOTED = ("broadcast", "gather", "scatter")
#: Movements without a root.
MOVING = ("all_gather_into_tensor", "all_gather_uneven", "all_to_all_uneven", "all_to_all_list_uneven")
#: Collectives whose tensors must be flat, because they are cut along the first dimension.
FLAT = (
    "all_gather_uneven", "all_gather_in_place", "all_to_all_single", "all_to_all_uneven", "all_to_all_kept",
    "coalesced", "all_gather_list_in_place", "all_to_all_in_place", "all_to_all_list_in_place",
)  # fmt: skip


def layouts_of(collective: str, count: int) -> list[str]:
    """The layouts in which CUDA tensors with this many elements can be passed to it."""
    return [
        layout
        for layout in ("contiguous", "offset", "strided", "transposed")
        if (layout != "transposed" or (collective not in FLAT and count % 2 == 0))
        and (layout != "strided" or collective != "all_gather_in_place")
    ]


def make(cases: Iterable[tuple[str, Case]]) -> None:
    """Computes the inputs and expected results of most cases, which ranks forked in ``cases.shared`` then inherit."""
    for collective, case in cases:
        case.parts(0)
        for more in range(case.world if collective == "reduce_scatter_uneven" else 1):
            case.total(case.count + more)


def run(cases: Iterable[tuple[str, Case]]) -> int:
    """Makes the call of each case and returns their number. Fails with a list of the wrong results."""
    for threshold in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
        # New pages for each tensor would take a fifth of the time.
        ctypes.CDLL(None).mallopt(threshold, 1 << 30)
    findings = Findings()
    for collective, case in cases:
        with findings.case(f"{collective} {case.about}"):
            ON_CPU[collective](case)
    return findings.close()


def objects(rank: int, world: int, device: torch.device = CPU) -> None:
    """Collectives of Python objects of several sizes, and a barrier."""
    everyone = [{"rank": r, "text": "x" * (r * 5000), "tensor": torch.arange(r)} for r in range(world)]
    got: list[Any] = [None] * world
    dist.all_gather_object(got, everyone[rank])
    assert str(got) == str(everyone)
    last = rank == world - 1
    dist.gather_object(everyone[rank], gathered := [None] * world if last else None, dst=world - 1)
    assert str(gathered) == str(everyone if last else None)
    listed: list[Any] = everyone[:2] if last else [None, None]
    dist.broadcast_object_list(listed, src=world - 1, device=device)
    assert str(listed) == str(everyone[:2])
    share: list[Any] = [None]
    dist.scatter_object_list(share, everyone if rank == 0 else [None] * world, src=0)
    assert str(share) == str([everyone[rank]])
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


def refusals(world: int, device: torch.device = CPU) -> int:
    """Reductions that a type lacks are rejected by name. Called on the backend, because torch rejects some itself."""
    backend = dist.group.WORLD._get_backend(device)
    findings = Findings()
    for dtype in expected.DTYPES:
        for op in (op for op in expected.OPS if not expected.served(op, dtype)):
            host = seeded(dtype, (6,), 1)
            tensor = host.clone().to(device)
            options, scatter = dist.AllreduceOptions(), dist.ReduceScatterOptions()
            options.reduceOp = scatter.reduceOp = op_of(op, 2.0)
            with findings.case(f"{op} {name(dtype)}"):
                with pytest.raises(NotImplementedError) as refusal:
                    backend.allreduce([tensor], options)
                text = str(refusal.value)
                assert op in text and name(dtype) in text and "use SUM" in text, text
                with pytest.raises(NotImplementedError, match=op):
                    backend._reduce_scatter_base(tensor[: 6 // world].clone(), tensor, scatter)
                assert_same_bits(tensor.cpu(), host, "a refused tensor is as it was")
    dist.all_reduce(one := torch.ones(3, device=device))
    assert bool((one == world).all()), "nothing was exchanged before"
    return findings.close()


def prefixes(
    rank: int,
    world: int,
    reference: Reference,
    lengths: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device = CPU,
) -> None:
    """A prefix of a longer sum has the same bits, whatever algorithm it uses."""
    for dtype in dtypes:
        wanted = long_sum(reference, "SUM", dtype, lengths[-1], world)
        whole = long_inputs(dtype, lengths[-1], world)[rank].to(device)
        for length in lengths:
            dist.all_reduce(got := whole[:length].clone())
            assert_same(got.cpu(), wanted[:length], ("all_reduce", dtype, length))
            each = length // world
            got = torch.empty(each, dtype=dtype, device=device)
            dist.reduce_scatter_tensor(got, whole[: each * world].clone())
            assert_same(got.cpu(), wanted[rank * each : (rank + 1) * each], ("reduce_scatter", dtype, length))

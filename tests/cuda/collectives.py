"""Every collective: the call of one case, and what it must give. One table."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from cases import LAYOUTS, Case
from expected import reduced
from pool import device


def all_reduce(c: Case) -> None:
    tensor = c.place(c.given())
    c.call(dist.all_reduce, tensor.view)
    c.same(tensor, reduced("SUM", c.all()))


def reduce(c: Case) -> None:
    tensor = c.place(c.given())
    c.call(dist.reduce, tensor.view, c.root)
    if c.rank == c.root:
        c.same(tensor, reduced("SUM", c.all()))


def broadcast(c: Case) -> None:
    tensor = c.place(c.given())
    c.call(dist.broadcast, tensor.view, c.root)
    c.same(tensor, c.given(c.root))


def all_gather(c: Case) -> None:
    outputs, tensor = [c.blank() for _ in range(c.world)], c.place(c.given())
    c.call(dist.all_gather, [output.view for output in outputs], tensor.view)
    for rank, output in enumerate(outputs):
        c.same(output, c.given(rank))
    c.same(tensor, c.given())


def all_gather_uneven(c: Case) -> None:
    """One rank more than the other, and rank 1 nothing."""
    counts = [0 if rank == 1 else c.count + rank for rank in range(c.world)]
    outputs, tensor = [c.blank(count) for count in counts], c.place(c.given(count=counts[c.rank]))
    c.call(dist.all_gather, [output.view for output in outputs], tensor.view)
    for rank, output in enumerate(outputs):
        c.same(output, c.given(rank, counts[rank]))


def all_gather_into_tensor(c: Case) -> None:
    output, tensor = c.blank(c.count * c.world), c.place(c.given())
    c.call(dist.all_gather_into_tensor, output.view, tensor.view)
    c.same(output, torch.cat(c.all()))


def all_gather_in_place(c: Case) -> None:
    output = c.blank(c.count * c.world)
    flat = output.view
    flat[c.rank * c.count : (c.rank + 1) * c.count].copy_(c.given())
    c.call(dist.all_gather_into_tensor, flat, flat[c.rank * c.count : (c.rank + 1) * c.count])
    c.same(output, torch.cat(c.all()))


def gather(c: Case) -> None:
    outputs = [c.blank() for _ in range(c.world)] if c.rank == c.root else []
    views = [output.view for output in outputs] if c.rank == c.root else None
    c.call(dist.gather, c.place(c.given()).view, views, c.root)
    for rank, output in enumerate(outputs):
        c.same(output, c.given(rank))


def scatter(c: Case) -> None:
    output = c.blank()
    parts = [c.place(part).view for part in c.wide().view(c.world, c.count)] if c.rank == c.root else None
    c.call(dist.scatter, output.view, parts, c.root)
    c.same(output, c.parts(c.rank)[c.root])


def reduce_scatter(c: Case) -> None:
    output, inputs = c.blank(), [c.place(part).view for part in c.wide().view(c.world, c.count)]
    c.call(dist.reduce_scatter, output.view, inputs)
    c.same(output, reduced("SUM", c.parts(c.rank)))


def reduce_scatter_tensor(c: Case) -> None:
    output, tensor = c.blank(), c.place(c.wide())
    c.call(dist.reduce_scatter_tensor, output.view, tensor.view)
    c.same(output, reduced("SUM", c.parts(c.rank)))
    c.same(tensor, c.wide())


def all_to_all(c: Case) -> None:
    outputs, inputs = [c.blank() for _ in range(c.world)], [c.place(part) for part in c.wide().view(c.world, c.count)]
    c.call(dist.all_to_all, [output.view for output in outputs], [tensor.view for tensor in inputs])
    for output, part in zip(outputs, c.parts(c.rank), strict=True):
        c.same(output, part)


def all_to_all_single(c: Case) -> None:
    output, tensor = c.blank(c.count * c.world), c.place(c.wide())
    c.call(dist.all_to_all_single, output.view, tensor.view)
    c.same(output, torch.cat(c.parts(c.rank)))


def all_to_all_uneven(c: Case) -> None:
    """Some ranks send others nothing."""
    all_to_all_split(c, [[((a + 2 * b) % 3) * c.count for b in range(c.world)] for a in range(c.world)])


def all_to_all_kept(c: Case) -> None:
    """Each rank keeps more than it sends, rank 0 more than the others."""
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


def coalesced(c: Case) -> None:
    """Three all_reduces at once, then two gathers, then two scatters."""
    tensors = [c.place(c.given(count=c.count + more)) for more in range(3)]
    outputs, inputs = [c.blank(c.count * c.world) for _ in range(2)], [c.place(c.given()) for _ in range(2)]
    halves, sources = [c.blank() for _ in range(2)], [c.place(c.wide()) for _ in range(2)]
    for body in (
        lambda: [dist.all_reduce(tensor.view) for tensor in tensors],
        lambda: [dist.all_gather_into_tensor(a.view, b.view) for a, b in zip(outputs, inputs, strict=True)],
        lambda: [dist.reduce_scatter_tensor(a.view, b.view) for a, b in zip(halves, sources, strict=True)],
    ):
        with dist._coalescing_manager(device=device(), async_ops=c.asynchronous) as manager:
            body()
        if c.asynchronous:
            manager.wait()
    for more, tensor in enumerate(tensors):
        c.same(tensor, reduced("SUM", [c.given(rank, c.count + more) for rank in range(c.world)]))
    for output, half in zip(outputs, halves, strict=True):
        c.same(output, torch.cat(c.all()))
        c.same(half, reduced("SUM", c.parts(c.rank)))


def ring(c: Case) -> None:
    """Everybody sends to the next and receives from the one before, in one batch."""
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
#: Those whose tensors must be flat, since they are cut along the first dimension.
FLAT = (
    "all_gather_uneven", "all_gather_in_place", "all_to_all_single", "all_to_all_uneven", "all_to_all_kept",
    "coalesced",
)  # fmt: skip


def layouts_of(collective: str, count: int) -> list[str]:
    """The layouts in which this many elements can be given to it."""
    return [
        layout
        for layout in LAYOUTS
        if (layout != "transposed" or (collective not in FLAT and count % 2 == 0))
        and (layout != "strided" or collective != "all_gather_in_place")
    ]

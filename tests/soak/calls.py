"""Every kind of call: how one rank starts it, and its expected result."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import collectives
import expected
import torch
import torch.distributed as dist
from cases import Case, Misaligned, Placed, shared
from draw import Call

Check = Callable[[], None]
#: Kinds whose tensors are cut along their first dimension, and kinds whose two tensors must have like shapes.
FLAT = ("all_to_all_single", "coalesced", "all_gather_into_tensor", "reduce_scatter_tensor")


@dataclass
class Place:
    """This rank's view of a group."""

    group: Any
    ranks: Sequence[int]
    me: int
    device: torch.device
    timeout: float
    #: The time at which this rank last entered a call, with its data ready.
    called: float = 0.0

    def enter(self) -> None:
        self.called = time.monotonic()

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass
class Started:
    """A started call of this rank: how to wait for it, and how to check the result."""

    call: Call
    works: list[Any]
    checks: list[Check]
    bytes: int
    began: float = 0.0

    def finish(self) -> None:
        """Waits, and compares with the model."""
        self.wait()
        self.check()

    def wait(self) -> None:
        for work in self.works:
            work.wait()

    def check(self) -> None:
        for check in self.checks:
            check()


class Begun(Case):
    """A case whose call is started at once. Its works and checks are for later; both may be many."""

    def __init__(self, spot: Place, call: Call) -> None:
        transposed = call.layout == "transposed"
        super().__init__(
            spot.me,
            spot.size,
            call.dtype,
            call.count,
            "contiguous" if transposed and call.kind in FLAT else call.layout,
            call.background,
            call.op,
            device=spot.device,
            group=spot.group,
            root=call.root,
            seed=call.seed,
        )
        self.about = str(call)
        self.spot, self.bytes = spot, 0
        self.works: list[Any] = []
        self.checks: list[Check] = []

    def place(self, flat: torch.Tensor, empty: Callable[..., torch.Tensor] | None = None) -> Placed | Misaligned:
        self.bytes += flat.numel() * flat.element_size()
        placed = super().place(flat, empty)
        self.spot.enter()
        return placed

    def call(self, function: Callable[..., dist.Work | None], *args: object, **options: object) -> None:
        self.spot.enter()
        super().call(function, *args, **options)

    def finish(self, work: Any) -> None:
        self.works.append(work)

    def same(self, placed: Placed | Misaligned, wanted: torch.Tensor) -> None:
        self.checks.append(lambda: placed.check(wanted, self.about))

    def lengths(self) -> list[list[int]]:
        """The number of elements for each pair of ranks."""
        dice = random.Random(self.seed)
        if dice.random() < 0.3:
            return [[self.count] * self.world for _ in range(self.world)]
        choices = (0, 1, self.count, self.count // 2)
        return [[dice.choice(choices) for _ in range(self.world)] for _ in range(self.world)]


def begin(place: Place, call: Call) -> Started:
    """Starts ``call``, and waits for a synchronous one; raises the exceptions of torch."""
    if place.device.type == "cuda" and call.op == "PREMUL_SUM" and call.dtype in expected.NARROW:
        # On GPUs each product is rounded before it is sent.
        call = replace(call, op="SUM")
    case = Begun(place, call)
    with shared():
        KINDS[call.kind](case)
    return Started(call, case.works, case.checks, case.bytes)


def all_gather(c: Begun) -> None:
    collectives.all_gather_split(c, [row[0] for row in c.lengths()])


def reduce_scatter(c: Begun) -> None:
    collectives.reduce_scatter_split(c, c.lengths()[0])


def all_to_all(c: Begun) -> None:
    collectives.all_to_all_list_split(c, c.lengths())


def all_to_all_single(c: Begun) -> None:
    collectives.all_to_all_split(c, c.lengths())


def barrier(c: Begun) -> None:
    c.call(dist.barrier)


def monitored_barrier(c: Begun) -> None:
    c.spot.enter()
    c.spot.group.monitored_barrier(timedelta(seconds=c.spot.timeout), bool(c.seed % 2))


def objects(c: Begun) -> None:
    got: list[Any] = [None] * c.world
    c.spot.enter()
    dist.all_gather_object(got, ("from", c.rank, "x" * (c.count % 5000)), group=c.group)

    def check() -> None:
        assert [each[1] for each in got] == list(range(c.world)), (c.about, got)

    c.checks.append(check)


def pairs(c: Begun) -> list[tuple[int, int, torch.Tensor]]:
    """Senders, receivers and data of messages, in the order in which all ranks iterate over the list."""
    dice = random.Random(c.seed)
    found = []
    for number in range(dice.randint(1, 6)):
        if c.world > 1:
            source, target = dice.sample(range(c.world), 2)
            count = dice.choice((c.count, dice.randrange(c.count + 1)))
            found.append((source, target, expected.seeded(c.dtype, (count,), c.seed + number)))
    return found


def messages(c: Begun) -> None:
    for tag, (source, target, sent) in enumerate(pairs(c)):
        if c.rank == source:
            given = c.place(sent).view
            c.spot.enter()
            if c.asynchronous:
                c.works.append(dist.isend(given, group=c.group, tag=tag, group_dst=target))
            else:
                dist.send(given, group=c.group, tag=tag, group_dst=target)
        elif c.rank == target:
            output = c.blank(sent.numel())
            c.spot.enter()
            if c.asynchronous:
                c.works.append(dist.irecv(output.view, group=c.group, tag=tag, group_src=source))
            else:
                dist.recv(output.view, group=c.group, tag=tag, group_src=source)
            c.same(output, sent)


def batch(c: Begun) -> None:
    operations = []
    for tag, (source, target, sent) in enumerate(pairs(c)):
        if c.rank == source:
            given = c.place(sent).view
            operations.append(dist.P2POp(dist.isend, given, group=c.group, tag=tag, group_peer=target))
        elif c.rank == target:
            output = c.blank(sent.numel())
            operations.append(dist.P2POp(dist.irecv, output.view, group=c.group, tag=tag, group_peer=source))
            c.same(output, sent)
    c.spot.enter()
    c.works += dist.batch_isend_irecv(operations) if operations else []


KINDS: dict[str, Callable[[Begun], None]] = {
    **{
        each.__name__: each
        for each in (
            collectives.all_reduce, collectives.reduce, collectives.broadcast, collectives.all_gather_into_tensor,
            collectives.gather, collectives.scatter, collectives.reduce_scatter_tensor,
        )
    },
    **{
        each.__name__: each
        for each in (
            collectives.coalesced, all_gather, reduce_scatter, all_to_all, all_to_all_single, barrier,
            monitored_barrier, objects, messages, batch,
        )
    },
}  # fmt: skip

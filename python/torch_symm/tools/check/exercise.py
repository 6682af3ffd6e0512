"""Makes one call on one rank, and checks its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .cases import Case
from .reference import FACTOR, difference, reduced, values


class Exercise:
    """A case on this rank."""

    def __init__(self, case: Case, rank: int, world: int, group: dist.ProcessGroup, device: torch.device) -> None:
        """``rank`` and ``world``: in ``group``, whose members are the first ranks of the job."""
        self._case, self._rank, self._world, self._group, self._device = case, rank, world, group, device
        self._root = case.number % world
        self._made: list[torch.Tensor] = []
        self._before: list[torch.Tensor] = []
        self._finding: str | None = None

    def finding(self) -> str | None:
        """Makes the call and returns the error in its result, or ``None``.

        Raises:
            Exception: the call raised it.
        """
        getattr(self, f"_{self._case.op}")()
        return self._finding or self._around()

    def _own(self, rank: int | None = None, count: int | None = None) -> torch.Tensor:
        case = self._case
        return values(case.dtype, case.count if count is None else count, 3 + (self._rank if rank is None else rank))

    def _place(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns ``flat`` on the device, with a guard element before or behind it that must not be written."""
        base = torch.ones(flat.numel() + 1, dtype=torch.uint8).to(flat.dtype).to(self._device)
        self._made.append(base)
        view = base[self._case.offset :][: flat.numel()]
        view.copy_(flat)
        return view

    def _blank(self, count: int) -> torch.Tensor:
        return self._place(torch.zeros(count, dtype=torch.uint8).to(self._case.dtype))

    def _around(self) -> str | None:
        one = torch.ones(1, dtype=torch.uint8).to(self._case.dtype)
        for base in self._made:
            beside = base[:1] if self._case.offset else base[-1:]
            if difference(beside, one):
                return "the element beside a tensor was written"
        return None

    def _call(self, function: Callable[..., Any], *given: object, **options: object) -> None:
        work = function(*given, group=self._group, async_op=self._case.asynchronous, **options)
        if work is not None:
            work.wait()

    def _same(self, got: torch.Tensor, wanted: torch.Tensor, what: str = "") -> None:
        if self._finding is None and (found := difference(got, wanted)):
            self._finding = f"{what}{found}"

    def _same_parts(self, got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
        for rank, (one, other) in enumerate(zip(got, wanted, strict=True)):
            self._same(one, other, f"part of rank {rank}: ")

    def _op(self) -> Any:
        if self._case.redop == "PREMUL_SUM":
            return dist._make_nccl_premul_sum(FACTOR)  # type: ignore[attr-defined]
        return getattr(dist.ReduceOp, self._case.redop)

    def _all_inputs(self, count: int | None = None) -> list[torch.Tensor]:
        return [self._own(rank, count) for rank in range(self._world)]

    def _all_reduce(self) -> None:
        tensor = self._place(self._own())
        self._call(dist.all_reduce, tensor, op=self._op())
        self._same(tensor, reduced(self._case.redop, self._all_inputs()))

    def _reduce(self) -> None:
        tensor = self._place(self._own())
        self._call(dist.reduce, tensor, dst=self._root, op=self._op())
        if self._rank == self._root:
            self._same(tensor, reduced(self._case.redop, self._all_inputs()))

    def _reduce_scatter(self) -> None:
        count = self._case.count
        source, output = self._place(self._own(count=count * self._world)), self._blank(count)
        self._call(dist.reduce_scatter_tensor, output, source, op=self._op())
        parts = [one[self._rank * count :][:count] for one in self._all_inputs(count * self._world)]
        self._same(output, reduced(self._case.redop, parts))

    def _broadcast(self) -> None:
        tensor = self._place(self._own()) if self._rank == self._root else self._blank(self._case.count)
        self._call(dist.broadcast, tensor, src=self._root)
        self._same(tensor, self._own(self._root))

    def _all_gather(self) -> None:
        output = self._blank(self._case.count * self._world)
        self._call(dist.all_gather_into_tensor, output, self._place(self._own()))
        self._same(output, torch.cat(self._all_inputs()))

    def _all_gather_uneven(self) -> None:
        wanted = [self._own(rank, self._case.count + rank) for rank in range(self._world)]
        outputs = [self._blank(one.numel()) for one in wanted]
        self._call(dist.all_gather, outputs, self._place(wanted[self._rank]))
        self._same_parts(outputs, wanted)

    def _gather(self) -> None:
        outputs = [self._blank(self._case.count) for _ in range(self._world)] if self._rank == self._root else None
        self._call(dist.gather, self._place(self._own()), outputs, dst=self._root)
        if outputs is not None:
            self._same_parts(outputs, self._all_inputs())

    def _scatter(self) -> None:
        output = self._blank(self._case.count)
        sources = [self._place(one) for one in self._all_inputs()] if self._rank == self._root else None
        self._call(dist.scatter, output, sources, src=self._root)
        self._same(output, self._own())

    def _all_to_all(self) -> None:
        count = self._case.count
        output, source = self._blank(count * self._world), self._place(self._own(count=count * self._world))
        self._call(dist.all_to_all_single, output, source)
        wanted = [one[self._rank * count :][:count] for one in self._all_inputs(count * self._world)]
        self._same(output, torch.cat(wanted))

    def _all_to_all_uneven(self) -> None:
        sent = [[self._length(giver, taker) for taker in range(self._world)] for giver in range(self._world)]
        given, taken = sent[self._rank], [row[self._rank] for row in sent]
        output, source = self._blank(sum(taken)), self._place(self._own(count=sum(given)))
        self._call(dist.all_to_all_single, output, source, output_split_sizes=taken, input_split_sizes=given)
        wanted = [
            self._own(giver, sum(row))[sum(row[: self._rank]) :][: row[self._rank]] for giver, row in enumerate(sent)
        ]
        self._same(output, torch.cat(wanted))

    def _length(self, giver: int, taker: int) -> int:
        return (self._case.count * (taker + 1) + giver) % (self._case.count + 2)

    def _send_recv(self) -> None:
        output, source = self._blank(self._case.count), self._place(self._own())
        to, come = (self._rank + 1) % self._world, (self._rank - 1) % self._world
        tag = self._case.number % 5 if self._device.type == "cpu" else 0
        works = [
            dist.isend(source, to, group=self._group, tag=tag),
            dist.irecv(output, come, group=self._group, tag=tag),
        ]
        for work in works:
            if work is not None:
                work.wait()
        self._same(output, self._own(come))

    def _barrier(self) -> None:
        self._call(dist.barrier)

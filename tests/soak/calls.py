"""Every kind of call: how one rank starts it, and its expected result."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import expected
import torch
import torch.distributed as dist
from draw import Call
from torch.distributed.distributed_c10d import _coalescing_manager

Check = Callable[[], None]


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
    check: Check
    bytes: int
    began: float = 0.0

    def finish(self) -> None:
        """Waits, and compares with the model."""
        self.wait()
        self.check()

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class Buffer:
    """A tensor in some layout, with access to the memory around it."""

    def __init__(self, values: torch.Tensor, layout: str, device: torch.device) -> None:
        count, dtype = values.numel(), values.dtype
        rows = next((rows for rows in (7, 5, 3, 2) if count and count % rows == 0), 0)
        if layout == "strided":
            self.around = torch.zeros(2 * count, dtype=dtype, device=device)
            self.tensor = self.around[1::2]
        elif layout == "transposed" and rows:
            self.around = torch.zeros(count, dtype=dtype, device=device)
            self.tensor = self.around.view(count // rows, rows).t()
        elif layout == "offset":
            self.around = torch.zeros(count + 5, dtype=dtype, device=device)
            self.tensor = self.around[3 : 3 + count]
        else:
            self.around = self.tensor = torch.zeros(count, dtype=dtype, device=device)
        self.layout = layout
        self.tensor.copy_(values.view(self.tensor.shape))

    def check(self, wanted: torch.Tensor, about: object) -> None:
        """Fails unless the tensor holds ``wanted`` and nothing else was written."""
        got = self.tensor.cpu()
        expected.assert_same(got.reshape(-1), wanted.reshape(-1), about)
        around = self.around.cpu()
        if self.layout == "strided":
            around = around[0::2]
        elif self.layout == "offset":
            around = torch.cat([around[:3], around[-2:]])
        else:
            return
        assert not expected.bits(around).any(), f"{about}: bytes outside the tensor were written"


def begin(place: Place, call: Call) -> Started:
    """Starts ``call``, and waits for a synchronous one; raises the exceptions of torch."""
    if place.device.type == "cuda" and call.op == "PREMUL_SUM" and call.dtype in expected.NARROW:
        # On GPUs each product is rounded before it is sent.
        call = replace(call, op="SUM")
    works, check, volume = KINDS[call.kind](place, call)
    return Started(call, [work for work in works if work is not None], check, volume)


def values(call: Call, count: int, rank: int, part: int = 0) -> torch.Tensor:
    """The input of ``rank``."""
    return expected.seeded(call.dtype, (count,), (call.seed * 131 + rank * 17 + part) % (1 << 62))


Kind = tuple[list[Any], Check, int]


def _lay(place: Place, call: Call, flat: torch.Tensor) -> Buffer:
    return Buffer(flat, call.layout, place.device)


def _rubbish(place: Place, call: Call, count: int) -> Buffer:
    """Memory for a result, with other values in it."""
    return _lay(place, call, values(call, count, 99, place.me))


def _factor(rank: int) -> float:
    return 0.5 + rank


def _op(place: Place, call: Call) -> Any:
    return expected.op_of(call.op, _factor(place.me))


def _reduced(place: Place, call: Call, inputs: list[torch.Tensor]) -> torch.Tensor:
    return expected.reduced(call.op, inputs, [_factor(rank) for rank in range(place.size)])


def _all(place: Place, call: Call, count: int, part: int = 0) -> list[torch.Tensor]:
    return [values(call, count, rank, part) for rank in range(place.size)]


def _bytes(*buffers: Buffer) -> int:
    return sum(buffer.tensor.numel() * buffer.tensor.element_size() for buffer in buffers)


def _lengths(place: Place, call: Call) -> list[list[int]]:
    """The number of elements for each pair of ranks."""
    dice = random.Random(call.seed)
    if dice.random() < 0.3:
        return [[call.count] * place.size for _ in range(place.size)]
    return [[dice.choice((0, 1, call.count, call.count // 2)) for _ in range(place.size)] for _ in range(place.size)]


def _all_reduce(place: Place, call: Call) -> Kind:
    inputs = _all(place, call, call.count)
    buffer = _lay(place, call, inputs[place.me])
    place.enter()
    work = dist.all_reduce(buffer.tensor, _op(place, call), group=place.group, async_op=call.background)
    return [work], lambda: buffer.check(_reduced(place, call, inputs), call), _bytes(buffer)


def _reduce(place: Place, call: Call) -> Kind:
    inputs = _all(place, call, call.count)
    buffer = _lay(place, call, inputs[place.me])
    root = place.ranks[call.root]
    place.enter()
    work = dist.reduce(buffer.tensor, root, _op(place, call), group=place.group, async_op=call.background)
    mine = place.me == call.root
    return (
        [work],
        lambda: buffer.check(_reduced(place, call, inputs) if mine else inputs[place.me], call),
        _bytes(buffer),
    )


def _broadcast(place: Place, call: Call) -> Kind:
    sent = values(call, call.count, call.root)
    buffer = _lay(place, call, sent) if place.me == call.root else _rubbish(place, call, call.count)
    place.enter()
    work = dist.broadcast(buffer.tensor, place.ranks[call.root], group=place.group, async_op=call.background)
    return [work], lambda: buffer.check(sent, call), _bytes(buffer)


def _all_gather(place: Place, call: Call) -> Kind:
    lengths = [row[0] for row in _lengths(place, call)]
    inputs = [values(call, length, rank) for rank, length in enumerate(lengths)]
    outputs = [_rubbish(place, call, length) for length in lengths]
    given = _lay(place, call, inputs[place.me])
    room = [output.tensor for output in outputs]
    place.enter()
    work = dist.all_gather(room, given.tensor, group=place.group, async_op=call.background)
    return [work], lambda: _check_each(outputs, inputs, call), _bytes(*outputs)


def _check_each(outputs: Sequence[Buffer], wanted: Sequence[torch.Tensor], about: object) -> None:
    for number, (output, right) in enumerate(zip(outputs, wanted, strict=True)):
        output.check(right, (about, number))


def _all_gather_into_tensor(place: Place, call: Call) -> Kind:
    inputs = _all(place, call, call.count)
    output = Buffer(values(call, call.count * place.size, 99), "plain", place.device)
    given = Buffer(inputs[place.me], "plain", place.device)
    place.enter()
    work = dist.all_gather_into_tensor(output.tensor, given.tensor, group=place.group, async_op=call.background)
    return [work], lambda: output.check(torch.cat(inputs), call), _bytes(output)


def _gather(place: Place, call: Call) -> Kind:
    inputs = _all(place, call, call.count)
    mine = place.me == call.root
    outputs = [_rubbish(place, call, call.count) for _ in inputs] if mine else []
    given = _lay(place, call, inputs[place.me])
    room = [output.tensor for output in outputs] if mine else None
    place.enter()
    work = dist.gather(given.tensor, room, place.ranks[call.root], group=place.group, async_op=call.background)
    return [work], lambda: _check_each(outputs, inputs if mine else [], call), _bytes(*outputs)


def _scatter(place: Place, call: Call) -> Kind:
    parts = _all(place, call, call.count)
    mine = place.me == call.root
    given = [_lay(place, call, part) for part in parts] if mine else []
    output = _rubbish(place, call, call.count)
    lists = [buffer.tensor for buffer in given] if mine else None
    place.enter()
    work = dist.scatter(output.tensor, lists, place.ranks[call.root], group=place.group, async_op=call.background)
    return [work], lambda: output.check(parts[place.me], call), _bytes(output)


def _reduce_scatter(place: Place, call: Call) -> Kind:
    lengths = _lengths(place, call)[0]
    given = [_lay(place, call, values(call, length, place.me, part)) for part, length in enumerate(lengths)]
    output = _rubbish(place, call, lengths[place.me])
    lists = [buffer.tensor for buffer in given]
    place.enter()
    work = dist.reduce_scatter(output.tensor, lists, _op(place, call), group=place.group, async_op=call.background)
    inputs = _all(place, call, lengths[place.me], place.me)
    return [work], lambda: output.check(_reduced(place, call, inputs), call), _bytes(*given)


def _reduce_scatter_tensor(place: Place, call: Call) -> Kind:
    pieces = [values(call, call.count, place.me, part) for part in range(place.size)]
    given = Buffer(torch.cat(pieces), "plain", place.device)
    output = Buffer(values(call, call.count, 99), "plain", place.device)
    op = _op(place, call)
    place.enter()
    work = dist.reduce_scatter_tensor(output.tensor, given.tensor, op, group=place.group, async_op=call.background)
    inputs = _all(place, call, call.count, place.me)
    return [work], lambda: output.check(_reduced(place, call, inputs), call), _bytes(given)


def _all_to_all(place: Place, call: Call) -> Kind:
    lengths = _lengths(place, call)
    given = [_lay(place, call, values(call, lengths[place.me][to], place.me, to)) for to in range(place.size)]
    wanted = [values(call, lengths[rank][place.me], rank, place.me) for rank in range(place.size)]
    outputs = [_rubbish(place, call, part.numel()) for part in wanted]
    room, lists = [output.tensor for output in outputs], [buffer.tensor for buffer in given]
    place.enter()
    work = dist.all_to_all(room, lists, group=place.group, async_op=call.background)
    return [work], lambda: _check_each(outputs, wanted, call), _bytes(*outputs, *given)


def _all_to_all_single(place: Place, call: Call) -> Kind:
    lengths = _lengths(place, call)
    sent = lengths[place.me]
    received = [lengths[rank][place.me] for rank in range(place.size)]
    given = [values(call, length, place.me, to) for to, length in enumerate(sent)]
    wanted = [values(call, length, rank, place.me) for rank, length in enumerate(received)]
    output = Buffer(values(call, sum(received), 99), "plain", place.device)
    whole = Buffer(torch.cat(given), "plain", place.device)
    place.enter()
    work = dist.all_to_all_single(
        output.tensor, whole.tensor, received, sent, group=place.group, async_op=call.background
    )
    return [work], lambda: output.check(torch.cat(wanted), call), _bytes(output, whole)


def _coalesced(place: Place, call: Call) -> Kind:
    counts = [call.count, 3, call.count // 2]
    inputs = [_all(place, call, count, part) for part, count in enumerate(counts)]
    buffers = [Buffer(each[place.me], "plain", place.device) for each in inputs]
    place.enter()
    with _coalescing_manager(place.group, place.device, async_ops=call.background) as manager:
        for buffer in buffers:
            dist.all_reduce(buffer.tensor, _op(place, call), group=place.group)
    works = [manager] if call.background else []
    return works, lambda: _check_each(buffers, [_reduced(place, call, each) for each in inputs], call), _bytes(*buffers)


def _barrier(place: Place, call: Call) -> Kind:
    place.enter()
    return [dist.barrier(group=place.group, async_op=call.background)], lambda: None, 0


def _monitored_barrier(place: Place, call: Call) -> Kind:
    place.enter()
    place.group.monitored_barrier(timedelta(seconds=place.timeout), bool(call.seed % 2))
    return [], lambda: None, 0


def _objects(place: Place, call: Call) -> Kind:
    got: list[Any] = [None] * place.size
    place.enter()
    dist.all_gather_object(got, ("from", place.me, "x" * (call.count % 5000)), group=place.group)

    def check() -> None:
        assert [each[1] for each in got] == list(range(place.size)), (call, got)

    return [], check, 0


def _pairs(place: Place, call: Call) -> list[tuple[int, int, int]]:
    """Senders, receivers and numbers of elements, in the order in which all ranks iterate over the list."""
    dice = random.Random(call.seed)
    pairs = []
    for _ in range(dice.randint(1, 6)):
        if place.size > 1:
            source, target = dice.sample(range(place.size), 2)
            pairs.append((source, target, dice.choice((call.count, dice.randrange(call.count + 1)))))
    return pairs


def _messages(place: Place, call: Call) -> Kind:
    works, outputs, wanted, held = [], [], [], []
    for tag, (source, target, count) in enumerate(_pairs(place, call)):
        sent = values(call, count, source, tag)
        if place.me == source:
            held.append(_lay(place, call, sent))
            send = dist.isend if call.background else dist.send
            place.enter()
            works.append(send(held[-1].tensor, place.ranks[target], group=place.group, tag=tag))
        elif place.me == target:
            outputs.append(_rubbish(place, call, count))
            wanted.append(sent)
            place.enter()
            if call.background:
                works.append(dist.irecv(outputs[-1].tensor, place.ranks[source], group=place.group, tag=tag))
            else:
                dist.recv(outputs[-1].tensor, place.ranks[source], group=place.group, tag=tag)
    return works, lambda: _check_each(outputs, wanted, call), _bytes(*outputs)


def _batch(place: Place, call: Call) -> Kind:
    operations, outputs, wanted = [], [], []
    for tag, (source, target, count) in enumerate(_pairs(place, call)):
        sent = values(call, count, source, tag)
        if place.me == source:
            given = _lay(place, call, sent).tensor
            operations.append(dist.P2POp(dist.isend, given, place.ranks[target], place.group, tag))
        elif place.me == target:
            outputs.append(_rubbish(place, call, count))
            wanted.append(sent)
            room = outputs[-1].tensor
            operations.append(dist.P2POp(dist.irecv, room, place.ranks[source], place.group, tag))
    place.enter()
    works = dist.batch_isend_irecv(operations) if operations else []
    return works, lambda: _check_each(outputs, wanted, call), _bytes(*outputs)


KINDS: dict[str, Callable[[Place, Call], Kind]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "coalesced": _coalesced,
    "barrier": _barrier,
    "monitored_barrier": _monitored_barrier,
    "objects": _objects,
    "messages": _messages,
    "batch": _batch,
}

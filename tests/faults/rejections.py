"""A rank rejects a call because of its arguments: ranks that wait for it get the reason, no others are affected."""

from __future__ import annotations

import mmap
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from .arguments import REFUSED
from .case import RIGHT, WRONG, Promise, Saw
from .processes import Layout, Stage, scene

Call = Callable[[Stage], object]
TARGET = "the ranks that wait hear within 0.1 s (0.2 s between nodes) which rank refused what; all raise the same"


def freed() -> torch.Tensor:
    tensor = torch.zeros(10)
    tensor.untyped_storage().resize_(0)
    return tensor


def overlapping() -> torch.Tensor:
    return torch.ones(1).expand(64)


def read_only() -> torch.Tensor:
    """Memory that may only be read."""
    with tempfile.TemporaryFile() as file, warnings.catch_warnings():
        # Torch warns that writing to it is undefined.
        warnings.simplefilter("ignore")
        file.truncate(4 * 4096)
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), dtype=torch.float32)


def gathered(out: int, given: int, dtype: torch.dtype = torch.float32, asynchronous: bool = False) -> None:
    work = dist.all_gather_into_tensor(torch.zeros(out, dtype=dtype), torch.ones(given), async_op=asynchronous)
    if asynchronous:
        work.wait()


def exchanged(splits: list[int], asynchronous: bool = False) -> None:
    work = dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [2, 2], splits, async_op=asynchronous)
    if asynchronous:
        work.wait()


def summed(stage: Stage, *tensors: torch.Tensor) -> None:
    stage.backend.allreduce(list(tensors), dist.AllreduceOptions()).wait()


def refusal(stage: Stage, call: Call, rank: int = 0) -> Saw | None:
    """Makes a call that must be rejected, and stores the reason for other ranks; ``None`` if the call was rejected."""
    saw = stage.observe(lambda: call(stage))
    (stage.place / f"refusal-{rank}").write_text(saw.text.splitlines()[0] if saw.text else "")
    return None if saw.kind in REFUSED else Saw(WRONG, f"not refused: {saw.kind}: {saw.text}")


def told(
    stage: Stage,
    rank: int,
    wrong: Call,
    right: Call,
    refusing: tuple[int, ...],
    early: float = 0.0,
    again: bool = False,
) -> Saw:
    """Some ranks reject a call in which the others wait, or which the others make ``early`` seconds later."""
    dist.barrier()
    if again:
        refusal(stage, wrong)
        time.sleep(0.2)
    bad = None
    if rank in refusing:
        time.sleep(0.3 - early)
        stage.now_it_happens()
        bad = refusal(stage, wrong, rank)
    else:
        time.sleep(early)
        begun = time.monotonic()
        saw = stage.observe(lambda: right(stage))
        saw.seconds = min(saw.seconds, time.monotonic() - begun)
    stage.meet("told", rank, range(stage.world), 5)
    begun = time.monotonic()
    after = stage.observe(dist.barrier)
    if rank in refusing:
        after.seconds = time.monotonic() - begun
        return bad or after
    reasons = [(stage.place / f"refusal-{r}").read_text() for r in refusing]
    # On several nodes, the messages of two ranks may name different waiting ranks.
    right = any(reason in saw.text for reason in reasons) and after.text == saw.text
    if not stage.layout and not right:
        saw.kind, saw.text = WRONG, f"{saw.text}, then {after.text}, of {reasons}"
    return saw


def _told(name: str, row: str, says: tuple[str, ...], layout: Layout = (), world: int = 2, **what: object) -> None:
    scene(
        f"refused: {name}",
        row,
        TARGET,
        Promise(sees=("SymmMismatchError",), says=says, same=not layout, within=0.2 if layout else 0.1),
        sides=("symm",),
        layout=layout,
        world=world,
        timeout=20,
    )(partial(told, **what))  # type: ignore[arg-type]


ONE = "a collective that rank 1 refuses"
#: The call that rank 1 rejects, the call in which rank 0 waits, and the name of the latter.
CALLS: dict[str, tuple[Call, Call, str]] = {
    "another length": (lambda _: gathered(7, 4), lambda _: gathered(8, 4), "all_gather"),
    "no elements": (lambda _: gathered(8, 0), lambda _: gathered(8, 4), "all_gather"),
    "another dtype": (lambda _: gathered(8, 4, torch.int32), lambda _: gathered(8, 4), "all_gather"),
    "asynchronous": (
        lambda _: gathered(7, 4, asynchronous=True),
        lambda _: gathered(8, 4, asynchronous=True),
        "all_gather",
    ),
    "split": (lambda _: exchanged([3, 2]), lambda _: exchanged([2, 2]), "all_to_all"),
    "asynchronous split": (lambda _: exchanged([5, -1], True), lambda _: exchanged([2, 2], True), "all_to_all"),
    "another device": (lambda s: summed(s, torch.zeros(3, device="meta")), lambda s: summed(s, torch.zeros(3)), ""),
    "no list": (lambda s: summed(s), lambda s: summed(s, torch.zeros(3)), ""),
    "freed memory": (lambda _: dist.broadcast(freed(), 0), lambda _: dist.broadcast(torch.zeros(10), 0), "broadcast"),
    "memory that is mapped read-only": (lambda s: summed(s, read_only()), lambda s: summed(s, torch.zeros(4096)), ""),
    "dtype that nothing serves": (
        lambda s: summed(s, torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8)),
        lambda s: summed(s, torch.zeros(3)),
        "",
    ),
    "reduce op": (
        lambda _: dist.all_reduce(torch.zeros(3), dist.ReduceOp.BAND),
        lambda _: dist.all_reduce(torch.zeros(3, dtype=torch.int32), dist.ReduceOp.BAND),
        "",
    ),
}
for _name, (_wrong, _right, _call) in CALLS.items():
    _waits = f"rank 0 is blocked in {_call or 'all_reduce'}, collective #2 of group"
    _told(_name, ONE, (r"rank 1 \(pid", "rejected", _waits), wrong=_wrong, right=_right, refusing=(1,))
_late = {"wrong": lambda _: gathered(7, 4), "right": lambda _: gathered(8, 4)}
_told("before the others call", ONE, (r"rank 1 \(pid", "rejected"), refusing=(1,), early=0.3, **_late)
_told(
    "by two of four",
    ONE,
    (r"rank [13] \(pid", "rejected", "ranks 0 and 2 are blocked"),
    world=4,
    wrong=lambda _: gathered(15, 4),
    right=lambda _: gathered(16, 4),
    refusing=(1, 3),
)
for _layout, _refusing, _times in (
    ((1, 1), (0,), ("waiting", "late")),
    ((1, 1), (1,), ("waiting", "late", "again")),
    ((1, 2), (0,), ("waiting", "late")),
    ((2, 2), (0, 1), ("waiting", "late", "again")),
    ((2, 2, 1), (4,), ("waiting", "late")),
    ((1, 1, 1), (2,), ("again",)),
):
    for _time in _times:
        _told(
            f"by {_refusing} of {_layout}, {_time}",
            "a collective that ranks of one node refuse",
            (
                rf'rank [{"".join(map(str, _refusing))}] \(node ".*rejected a call and has not repeated it since',
                "in all_reduce, collective #",
            ),
            _layout,
            wrong=lambda _: dist.all_reduce(overlapping()),
            right=lambda _: dist.all_reduce(torch.ones(64)),
            refusing=_refusing,
            early=0.3 if _time == "late" else 0.0,
            again=_time == "again",
        )


def message_told(
    stage: Stage, rank: int, wrong: Call, right: Call, refuser: int, waiting: tuple[int, ...], met: bool = True
) -> Saw:
    """A rank rejects a message for which others wait. ``met``: true if these ranks have exchanged messages before."""
    for peer in waiting if met else ():
        for sender, receiver in ((refuser, peer), (peer, refuser)):
            if rank == sender:
                dist.send(torch.zeros(3), receiver)
            elif rank == receiver:
                dist.recv(torch.zeros(3), sender)
    dist.barrier()
    saw: Saw | None = None
    if rank == refuser:
        time.sleep(0.2)
        stage.now_it_happens()
        saw = refusal(stage, wrong)
    elif rank in waiting:
        saw = stage.observe(lambda: right(stage))
    stage.meet("told", rank, range(stage.world), 5)
    if rank in waiting and saw is not None:
        reason = (stage.place / "refusal-0").read_text()
        if saw.kind != "SymmMismatchError" or (not stage.layout and reason not in saw.text):
            saw.kind, saw.text = WRONG, f"{saw.text} of {reason}"
    return saw or Saw(RIGHT)


def _message(name: str, says: tuple[str, ...], layout: Layout = (), **what: object) -> None:
    scene(
        f"refused message: {name}",
        "a message that a rank of another node refuses" if layout else "a message that rank 1 refuses",
        TARGET,
        Promise(sees=("SymmMismatchError", RIGHT), says=says, within=0.2 if layout else 0.1),
        sides=("symm",),
        layout=layout,
        world=2,
        timeout=20,
    )(partial(message_told, **what))  # type: ignore[arg-type]


def long() -> torch.Tensor:
    """A tensor whose send uses rendezvous and waits for the receive."""
    return torch.zeros(1 << 20)


for _name, _wrong, _right, _waits in (
    ("send of freed memory", lambda _: dist.send(freed(), 0), lambda _: dist.recv(torch.zeros(4), 1), "recv, tag 0,"),
    (
        "isend of freed memory",
        lambda _: dist.isend(freed(), 0, tag=3),
        lambda _: dist.irecv(torch.zeros(4), 1, tag=3).wait(),
        "recv, tag 3,",
    ),
    ("overlapping receive", lambda _: dist.recv(overlapping(), 0), lambda _: dist.send(long(), 1), "send, tag 0,"),
    (
        "overlapping receive from any",
        lambda _: dist.recv(overlapping(), None),
        lambda _: dist.isend(long(), 1).wait(),
        "send, tag 0,",
    ),
    (
        "batch with freed memory",
        lambda _: dist.batch_isend_irecv([dist.P2POp(dist.isend, freed(), 0)]),
        lambda _: [work.wait() for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.zeros(4), 1)])],
        "recv, tag 0,",
    ),
):
    _words = (r"rank 1 \(pid", "rejected", f"rank 0 is blocked in {_waits} of group")
    _message(_name, _words, wrong=_wrong, right=_right, refuser=1, waiting=(0,))
SINCE = r"rank 0 \(node.*rejected a call and has not repeated it since; rank "
for _met in (True, False):
    for _layout in ((1, 1), (2, 2), (1, 1, 1)):
        _last, _title = sum(_layout) - 1, f"of {_layout}, {'' if _met else 'not '}connected"
        _others = tuple(range(1, _last + 1))
        _message(
            f"recv from any {_title}",
            (SINCE,),
            _layout,
            wrong=lambda _: dist.recv(overlapping(), tag=4),
            right=lambda _: dist.send(long(), 0, tag=4),
            refuser=0,
            waiting=_others,
            met=_met,
        )
        if _layout == (1, 1, 1):
            continue
        for _kind, _waits in (("send", "recv"), ("recv", "send")):
            _calls: dict[str, Call] = {
                "send": lambda _, last=_last: dist.send(freed(), last, tag=4),
                "recv": lambda _, last=_last: dist.recv(overlapping(), last, tag=4),
            }
            _answers: dict[str, Call] = {
                "send": lambda _: dist.send(long(), 0, tag=4),
                "recv": lambda _: dist.recv(long(), 0, tag=4),
            }
            _message(
                f"{_kind} {_title}",
                (rf"{SINCE}{_last}", rf"is blocked in {_waits}\(4194304 bytes, float32, tag 4\)"),
                _layout,
                wrong=_calls[_kind],
                right=_answers[_waits],
                refuser=0,
                waiting=(_last,),
                met=_met,
            )


def wrong_sum(stage: Stage) -> Saw | None:
    return refusal(stage, lambda _: dist.all_reduce(overlapping()))


def right_sum(world: int) -> bool:
    dist.all_reduce(tensor := torch.ones(64))
    return bool((tensor == world).all())


def corrects(stage: Stage, rank: int) -> Saw:
    """A rank that makes the right call in time, or before others wait, affects no other rank."""
    for turn, pause in enumerate((0.0, 0.01, 0.04, 0.3)):
        dist.barrier()
        begun = time.monotonic()
        if rank == turn % stage.world:
            if bad := wrong_sum(stage):
                return bad
            time.sleep(pause)
            # On a busy node a short pause may take longer, and then the others may be notified.
            if pause < 0.08 < time.monotonic() - begun:
                (stage.place / "slow").touch()
        elif pause > 0.08:
            time.sleep(pause)
        saw = stage.observe(lambda: right_sum(stage.world))
        if saw.raised and (stage.place / "slow").exists():
            return Saw(RIGHT)
        if saw.kind != RIGHT:
            return saw
    # Longer than a notification takes: the rejections have left nothing.
    time.sleep(0.3)
    return stage.observe(lambda: right_sum(stage.world))


def all_refuse(stage: Stage, rank: int) -> Saw:
    """A call that all ranks reject affects no rank: repeated, while a call is in progress, or if one rank is late."""
    for _ in range(3):
        if bad := wrong_sum(stage):
            return bad
    time.sleep(0.3)
    right = right_sum(stage.world)
    work = dist.all_reduce(torch.ones(3), async_op=True)
    bad = wrong_sum(stage)
    work.wait()
    time.sleep(0.3)
    for late in (0, stage.world - 1):
        dist.barrier()
        bad = bad or wrong_sum(stage)
        time.sleep(0.5 if rank == late else 0.0)
        right &= right_sum(stage.world)
    return bad or Saw(RIGHT if right else WRONG)


def queued(stage: Stage, rank: int) -> Saw:
    """Rank 1 rejects a call while its earlier calls, which rank 0 makes later, are still queued."""
    tensors = [torch.ones(10) for _ in range(3)]
    bad = None
    if rank == 1:
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        bad = wrong_sum(stage)
        time.sleep(0.3)
        stage.meet("queued", rank, range(2))
        for work in works:
            work.wait()
    else:
        stage.meet("queued", rank, range(2))
        for tensor in tensors:
            dist.all_reduce(tensor)
    return bad or Saw(RIGHT if all(bool((tensor == 2).all()) for tensor in tensors) else WRONG)


def corrects_message(stage: Stage, rank: int, pauses: tuple[float, ...]) -> Saw:
    """Rank 1 sends the rejected message correctly, soon or before rank 0 waits; within a node its next one is late."""
    for turn, pause in enumerate(pauses):
        if stage.layout:
            dist.barrier()
        if rank == 1:
            if bad := refusal(stage, lambda _, turn=turn: dist.send(freed(), 0, tag=turn)):
                return bad
            time.sleep(pause)
            dist.send(torch.full((9,), float(turn)), 0, tag=turn)
            time.sleep(0.0 if stage.layout else 0.3)
        else:
            time.sleep(0.6 if pause > 0.08 else 0)
            dist.recv(got := torch.zeros(9), 1, tag=turn)
            if not bool((got == turn).all()):
                return Saw(WRONG)
    return Saw(RIGHT)


DISTURBS = "refusals that disturb no other rank"
for _layout in ((), (1, 1), (2, 1), (2, 2)):
    _bodies = {"corrected call": corrects, "refused by all": all_refuse}
    if _layout in ((), (1, 1)):
        _pauses = (0.0, 0.04, 0.3) if _layout else (0.0,) * 3
        _bodies["corrected message"] = partial(corrects_message, pauses=_pauses)
    if not _layout:
        _bodies["behind queued calls"] = queued
    for _name, _body in _bodies.items():
        _world = 3 if _name == "refused by all" else 2
        _where = f", {_layout}" if _layout else ""
        scene(f"{_name}{_where}", DISTURBS, "right", Promise(), sides=("symm",), layout=_layout, world=_world)(_body)

"""What a victim does to itself, and the errors that the other ranks must get."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import draw
import torch
import torch.distributed as dist
import torch_symm
from table import CHILD, STRUCK

if TYPE_CHECKING:
    from rank import Round

#: Exceptions of joining when another rank does not arrive, or exits meanwhile.
JOINING = (
    torch_symm.SymmPeerError,
    torch_symm.SymmTimeoutError,
    torch_symm.SymmConfigError,
    dist.DistNetworkError,
    dist.DistStoreError,
)
#: Exceptions of a fault on all ranks except the victims.
HEARD: dict[str, tuple[type[BaseException], ...]] = {
    "kill": (torch_symm.SymmPeerError,),
    "kill two": (torch_symm.SymmPeerError,),
    "kill with a child": (torch_symm.SymmPeerError,),
    "exit": (torch_symm.SymmPeerError,),
    "abort": (torch_symm.SymmPeerError,),
    "leave": (torch_symm.SymmPeerError,),
    "stop for long": (torch_symm.SymmTimeoutError,),
    "late": (torch_symm.SymmTimeoutError,),
    "mismatch": (torch_symm.SymmMismatchError,),
    # The second class if the victim leaves the group before the missing call is noticed.
    "argument": (torch_symm.SymmMismatchError, torch_symm.SymmPeerError),
    "kill joining": (torch_symm.SymmPeerError,),
    "stop joining": (torch_symm.SymmTimeoutError,),
}
#: Exceptions on the victim, if they differ.
FELT: dict[str, tuple[type[BaseException], ...]] = {
    "abort": (torch_symm.SymmAbortedError,),
    # Another thread may remove the group from torch's tables before this thread reads them.
    "leave": (torch_symm.SymmAbortedError, ValueError, RuntimeError),
    "argument": (ValueError, TypeError),
}
WORDS = {"abort": "abort", "leave": "left", "stop for long": "stopped", "exit": ""}
#: Seconds within which a failure must be reported: the promise is 0.1 s on an idle node.
LIMIT = 2.0


def act(round: Round) -> None:
    """Performs the fault on this rank, a victim, at its call of the storm."""
    fault = round.program.fault
    if fault.kind == "late":
        time.sleep(fault.seconds)
    elif fault.kind == "exit":
        _exit(round, fault.variant)
    elif fault.kind == "fork":
        _fork(round, fault.variant)
    elif fault.kind in ("abort", "leave"):
        if fault.variant == "thread":
            thread = threading.Thread(target=_later, args=(round, fault))
            thread.start()
            round.threads.append(thread)
        else:
            _end(round, fault)
    elif fault.kind == "mismatch":
        disagree(round, fault.variant)
    elif fault.kind == "argument":
        group = round.places[fault.group].group
        # One element more than the ranks' parts have.
        dist.all_gather_into_tensor(torch.zeros(dist.get_world_size(group) * 4 + 1), torch.zeros(4), group=group)


def _later(round: Round, fault: draw.Fault) -> None:
    time.sleep(fault.delay)
    _end(round, fault)


def _end(round: Round, fault: draw.Fault) -> None:
    group = round.places[fault.group].group
    round.table.mark(round.rank, STRUCK)
    if fault.kind == "abort":
        group._get_backend(round.device).abort()
        return
    if fault.variant == "all":
        dist.destroy_process_group()
    else:
        group._get_backend(round.device).shutdown()
    # The victim leaves only once its started calls have finished, for which other ranks may be late.
    round.table.mark(round.rank, STRUCK)


def disagree(round: Round, variant: str) -> None:
    """A call that differs from :func:`agreed` in one respect."""
    place = round.places[round.program.fault.group]

    def zeros(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, device=round.device)

    calls: dict[str, Callable[[], object]] = {
        "size": lambda: dist.all_reduce(zeros(101), group=place.group),
        "large size": lambda: dist.all_reduce(zeros(1_000_000), group=place.group),
        "dtype": lambda: dist.all_reduce(zeros(100, torch.float32), group=place.group),
        "op": lambda: dist.all_reduce(zeros(100), dist.ReduceOp.MAX, group=place.group),
        "collective": lambda: dist.all_gather_into_tensor(zeros(100 * place.size), zeros(100), group=place.group),
        "barrier": lambda: dist.barrier(group=place.group),
        "root": lambda: dist.broadcast(zeros(100), place.ranks[0], group=place.group),
    }
    calls[variant]()


def agreed(round: Round) -> None:
    """The call of all others while a victim makes a different call or a rejected one."""
    fault = round.program.fault
    place = round.places[fault.group]
    if fault.kind == "argument":
        room = torch.zeros(place.size * 4, device=round.device)
        dist.all_gather_into_tensor(room, torch.zeros(4, device=round.device), group=place.group)
    elif fault.variant == "root":
        dist.broadcast(torch.zeros(100, dtype=torch.int32, device=round.device), place.ranks[1], group=place.group)
    else:
        dist.all_reduce(torch.zeros(100, dtype=torch.int32, device=round.device), group=place.group)


def _exit(round: Round, variant: str) -> NoReturn:
    round.table.mark(round.rank, STRUCK)
    if variant == "in order":
        # The interpreter's steps at exit, except its own teardown.
        atexit._run_exitfuncs()
        os._exit(0)
    if variant == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(5)
    os._exit(3 if variant == "code 3" else 0)


def leave_child(round: Round) -> None:
    """Forks a child that holds all open resources of this rank until the supervisor ends it."""
    child = os.fork()
    if child == 0:
        time.sleep(120)
        os._exit(0)
    round.table.put(round.rank, CHILD, child)


def _fork(round: Round, variant: str) -> None:
    if variant == "live on":
        leave_child(round)
        return
    child = os.fork()
    if child == 0:
        os._exit(_as_child(round, variant))
    round.table.put(round.rank, CHILD, child)
    deadline = time.monotonic() + 10
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline:
            raise AssertionError(f"the forked child hangs in {variant!r}")
        time.sleep(0.002)
    round.table.put(round.rank, CHILD, 0)
    assert os.waitstatus_to_exitcode(status) == 0, f"the forked child's {variant!r} ended with {status}"


def _as_child(round: Round, variant: str) -> int:
    try:
        if variant == "exit in order":
            atexit._run_exitfuncs()
        elif variant == "destroy":
            dist.destroy_process_group()
        elif variant == "use":
            for place in round.places:
                if place is not None:
                    try:
                        dist.all_reduce(torch.ones(3), group=place.group)
                    except torch_symm.SymmConfigError:
                        continue
                    return 4
        return 0
    except BaseException:
        return 5

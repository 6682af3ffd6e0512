"""The torch backends that connect nodes: which ones a user's choice selects, and how one is made."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from torch_symm import _torch_compat

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend, Store

#: Why a backend that torch knows cannot connect nodes.
_UNFIT = {
    "symm": "it connects the ranks of one node",
    "mpi": "torch makes its groups by all ranks of a job at once",
    "fake": "it moves nothing",
    "undefined": "it is none",
}
#: Maximum length of a choice.
_LONGEST = 100


def find(choice: str) -> tuple[str, str]:
    """Returns the backends for CPU and CUDA tensors that ``choice`` selects: ``"cpu:mine,cuda:nccl"`` or ``"mine"``.

    A single name selects the backend for the devices that it serves. The default is Gloo for CPU tensors, and no
    backend for CUDA tensors: ``""``.

    Raises:
        ValueError: the backend does not exist, or cannot serve the device; the message lists the alternatives.
    """
    if len(choice) > _LONGEST:
        raise ValueError(f"the names are longer than {_LONGEST} characters")
    found = {"cpu": "gloo", "cuda": ""}
    for part in choice.lower().split(","):
        device, colon, name = part.strip().rpartition(":")
        served = _served(name)
        if not colon:
            if "," in choice:
                raise ValueError(f"{part!r} names no device: cpu:NAME,cuda:NAME does")
            found.update(dict.fromkeys(found.keys() & set(served), name))
        elif device not in found:
            raise ValueError(f"{part!r} is for {device!r}; nodes are connected for cpu and cuda")
        elif device not in served:
            raise ValueError(f"{name!r} serves {' and '.join(served)}, not {device}")
        else:
            found[device] = name
    return found["cpu"], found["cuda"]


def _served(name: str) -> list[str]:
    """The devices that the backend ``name`` serves."""
    known = distributed_c10d.Backend
    if name in _UNFIT:
        raise ValueError(f"{name!r} cannot connect nodes: {_UNFIT[name]}; {_there()}")
    if not _torch_compat.knows_backend(name):
        raise ValueError(f"torch knows no backend {name!r}; {_there()}")
    return list(known.backend_capability.get(name, ["cpu", "cuda"]))


def _there() -> str:
    listed = distributed_c10d.Backend.backend_list
    known = [name for name in listed if name not in _UNFIT and _torch_compat.knows_backend(name)]
    return "there are " + ", ".join(map(repr, ("none", "auto", *known)))


def make(backend: str, name: str, store: Store, rank: int, size: int, timeout: timedelta, device: int) -> Backend:
    """Makes the backend ``backend`` of ``size`` ranks that meet in ``store``, for the GPU ``device``, or the CPU if -1.

    A backend other than Gloo and NCCL is tested first.

    Raises:
        RuntimeError: the backend cannot be made, or a call that connecting nodes requires fails.
    """
    known: dict[str, Callable[..., Backend]] = {"gloo": _torch_compat.gloo, "nccl": _torch_compat.nccl}
    if backend in known:
        return known[backend](name, store, rank, size, timeout)
    made: Any = _torch_compat.backend(backend, name, store, rank, size, timeout)
    where = torch.device("cpu") if device < 0 else torch.device("cuda", device)
    if isinstance(made, dist.ProcessGroup):
        # A plug-in may wrap its backend in a process group.
        try:
            made = _torch_compat.backend_of(made, where)
        except RuntimeError:
            message = f"backend {backend!r} is a ProcessGroup without a Backend, which cannot connect nodes"
            raise RuntimeError(message) from None
    if made is None:
        raise RuntimeError(f"backend {backend!r} was made on other ranks only")
    _try_out(made, backend, rank, size, timeout, where)
    return cast("Backend", made)


def _try_out(made: Any, backend: str, rank: int, size: int, timeout: timedelta, where: torch.device) -> None:
    """Makes every call that connecting nodes requires. All ranks make these calls, in the same order."""

    def own(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.uint8, device=where)

    c10d: Any = torch._C._distributed_c10d
    everybody, before, after = list(range(size)), (rank - 1) % size, (rank + 1) % size
    # A rank sends a different length to each rank.
    sent = own(*(to for to in everybody for _ in range(rank + to)))
    taken = own(*(255 for source in everybody for _ in range(rank + source)))
    gathered, cast = own(*everybody).zero_(), own(rank)
    # On the CPU, a receive may have more room than the message needs.
    got = own(255, 255) if where.type == "cpu" else own(255)
    copy, broadcast = own(rank), c10d.BroadcastOptions()
    broadcast.rootRank = size - 1
    calls: list[tuple[str, Callable[[], list[Any]], Callable[[], bool]]] = [
        (
            "all_gather into one tensor",
            lambda: [made._allgather_base(gathered, own(rank), c10d.AllgatherOptions())],
            lambda: gathered.tolist() == everybody,
        ),
        (
            "all_to_all of one tensor with uneven parts",
            lambda: [
                made.alltoall_base(
                    taken,
                    sent,
                    [rank + source for source in everybody],
                    [rank + to for to in everybody],
                    c10d.AllToAllOptions(),
                )
            ],
            lambda: bool((taken == rank).all()),
        ),
        ("broadcast", lambda: [made.broadcast([cast], broadcast)], lambda: cast.item() == size - 1),
        (
            "send and recv",
            lambda: [made.send([copy], after, 1), made.recv([got], before, 1)],
            lambda: got[0].item() == before,
        ),
    ]
    for call, begin, is_right in calls:
        try:
            for work in begin():
                if work is not None:
                    work.wait(timeout)
            right = is_right()
        except Exception as error:
            why = str(error).partition("\n")[0]
            raise RuntimeError(f"backend {backend!r} cannot connect nodes: {call}: {why}") from error
        if not right:
            raise RuntimeError(f"backend {backend!r} cannot connect nodes: {call} brings other bytes than were sent")

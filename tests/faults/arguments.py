"""Unusual tensors and arguments, the same on all ranks unless the name says otherwise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .case import RIGHT, WRONG, Case, Promise, Saw, add
from .processes import WORLD, Stage, play

ROW = "38 odd arguments (strided, expanded, indivisible, freed storage, wrong device, fp8, one rank only, …)"
TARGET = (
    "right, or refused by name within 100 ms on all ranks; no byte beside the tensor written "
    "(lazily negated and meta tensors: torch itself answers; where it refuses None on one rank, the others hear after "
    "the timeout)"
)
TIMEOUT_S = 2.0
REFUSED = ("ValueError", "TypeError", "NotImplementedError", "RuntimeError")
#: Exceptions that the ranks may see if the call of only one was rejected.
REPORTED = (*REFUSED, "SymmMismatchError", "SymmPeerError", "DistBackendError", "SymmTimeoutError")
#: Exceptions if torch itself rejected it.
UNTOLD = ("TypeError", "SymmTimeoutError")

Body = Callable[[int], object]
ARGUMENTS: dict[str, tuple[Body, tuple[str, ...]]] = {}


def served(name: str) -> Callable[[Body], Body]:
    """The call must be correct: the body returns true if it was."""
    return partial(_note, name, (RIGHT,))


def refused(name: str) -> Callable[[Body], Body]:
    """The call cannot be correct: it must raise, and RuntimeError only for a rejection."""
    return partial(_note, name, REFUSED)


def either(name: str) -> Callable[[Body], Body]:
    """The call must be correct or rejected."""
    return partial(_note, name, (RIGHT, *REFUSED))


def torch_alone(name: str) -> Callable[[Body], Body]:
    """torch answers without calling a backend, so no promise is possible."""
    return partial(_note, name, (RIGHT, WRONG, *REFUSED))


def one_rank(name: str) -> Callable[[Body], Body]:
    """Only rank 1 is wrong: its call is rejected, and the others are notified."""
    return partial(_note, name, REPORTED)


def torch_refuses_one(name: str) -> Callable[[Body], Body]:
    """torch rejects rank 1's arguments before it calls a backend: the others are not notified, and wait for it."""
    return partial(_note, name, UNTOLD)


def _note(name: str, sees: tuple[str, ...], body: Body) -> Body:
    ARGUMENTS[name] = (body, sees)
    return body


def reduced(tensor: torch.Tensor, expected: Any, op: Any = dist.ReduceOp.SUM) -> bool:
    dist.all_reduce(tensor, op)
    return bool((tensor.detach().to(torch.complex128) == expected).all())


@served("strided slice")
def _(rank: int) -> bool:
    whole = torch.ones(64)
    right = reduced(whole[::2], WORLD)
    return right and bool((whole[1::2] == 1).all())


@served("columns of a matrix")
def _(rank: int) -> bool:
    whole = torch.full((16, 9), -1.0)
    whole[:, 2:5] = rank + 1
    right = reduced(whole[:, 2:5], sum(range(1, WORLD + 1)))
    return right and bool((whole[:, :2] == -1).all()) and bool((whole[:, 5:] == -1).all())


@served("transposed")
def _(rank: int) -> bool:
    tensor = torch.arange(12.0).view(3, 4).t() * (rank == 0)
    dist.broadcast(tensor, 0)
    return torch.equal(tensor, torch.arange(12.0).view(3, 4).t())


@served("channels last")
def _(rank: int) -> bool:
    return reduced(torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), WORLD)


@served("one element in from the start")
def _(rank: int) -> bool:
    whole = torch.ones(34)
    return reduced(whole[1:33], WORLD) and float(whole[0]) == 1 and float(whole[33]) == 1


@served("at an odd address")
def _(rank: int) -> bool:
    tensor = torch.frombuffer(bytearray(41), dtype=torch.float32, count=10, offset=1)
    tensor.view(torch.uint8)[:] = torch.ones(10).view(torch.uint8)
    dist.all_reduce(tensor)
    return tensor.view(torch.uint8).clone().view(torch.float32).tolist() == [WORLD] * 10


@refused("expanded")
def _(rank: int) -> bool:
    return reduced(torch.ones(1).expand(64), WORLD)


@refused("overlapping windows")
def _(rank: int) -> bool:
    return reduced(torch.ones(10).as_strided((8, 3), (1, 1)), WORLD)


@either("lazily conjugated")
def _(rank: int) -> bool:
    tensor = torch.full((8,), 1 + 2j).conj()
    return reduced(tensor, WORLD * (1 - 2j))


@torch_alone("lazily negated")
def _(rank: int) -> bool:
    return reduced(torch.full((8,), 1 + 2j).conj().imag, -2 * WORLD)


@refused("freed storage")
def _(rank: int) -> bool:
    tensor = torch.ones(1 << 20)
    tensor.untyped_storage().resize_(0)
    dist.all_reduce(tensor)
    return False


@torch_alone("meta tensor")
def _(rank: int) -> bool:
    dist.all_reduce(torch.ones(8, device="meta"))
    return False


@either("sparse COO")
def _(rank: int) -> bool:
    tensor = torch.eye(4).to_sparse()
    dist.all_reduce(tensor)
    return torch.equal(tensor.to_dense(), WORLD * torch.eye(4))


@refused("sparse CSR")
def _(rank: int) -> bool:
    dist.all_reduce(torch.eye(4).to_sparse_csr())
    return False


@refused("quantized")
def _(rank: int) -> bool:
    dist.all_reduce(torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.quint8))
    return False


@refused("MKL-DNN layout")
def _(rank: int) -> bool:
    dist.all_reduce(torch.ones(8, 8).to_mkldnn())
    return False


@served("no elements")
def _(rank: int) -> bool:
    tensor = torch.ones(0)
    dist.all_reduce(tensor)
    return tensor.numel() == 0


@served("no dimensions")
def _(rank: int) -> bool:
    return reduced(torch.tensor(1.0), WORLD)


@served("complex64")
def _(rank: int) -> bool:
    return reduced(torch.full((8,), 1 + 2j), WORLD * (1 + 2j))


@served("bool")
def _(rank: int) -> bool:
    return reduced(torch.tensor([rank == 0, False]), torch.tensor([True, False]))


@either("leaf that requires a gradient")
def _(rank: int) -> bool:
    return reduced(torch.ones(8, requires_grad=True), WORLD)


@either("uint16")
def _(rank: int) -> bool:
    return reduced(torch.ones(8, dtype=torch.int32).to(torch.uint16), WORLD)


@either("float8_e4m3fn")
def _(rank: int) -> bool:
    tensor = torch.ones(8).to(torch.float8_e4m3fn)
    dist.all_reduce(tensor)
    return tensor.float().tolist() == [WORLD] * 8


@served("bfloat16")
def _(rank: int) -> bool:
    return reduced(torch.ones(8, dtype=torch.bfloat16), WORLD)


@either("AVG")
def _(rank: int) -> bool:
    return reduced(torch.full((8,), float(rank)), (WORLD - 1) / 2, dist.ReduceOp.AVG)


@refused("BAND of floats")
def _(rank: int) -> bool:
    return reduced(torch.ones(8), 1, dist.ReduceOp.BAND)


@refused("PREMUL_SUM without a factor")
def _(rank: int) -> bool:
    return reduced(torch.ones(8), WORLD, dist.ReduceOp.PREMUL_SUM)


@refused("output too short")
def _(rank: int) -> bool:
    dist.all_gather_into_tensor(torch.ones(4 * WORLD - 1), torch.ones(4))
    return False


@refused("list too short")
def _(rank: int) -> bool:
    dist.all_gather([torch.ones(4) for _ in range(WORLD - 1)], torch.ones(4))
    return False


@refused("input that ranks do not divide")
def _(rank: int) -> bool:
    dist.all_to_all_single(torch.ones(4 * WORLD + 1), torch.ones(4 * WORLD + 1))
    return False


@refused("negative split")
def _(rank: int) -> bool:
    dist.all_to_all_single(torch.ones(4), torch.ones(4), [2, -1, 2, 1], [2, -1, 2, 1])
    return False


@refused("splits that do not add up")
def _(rank: int) -> bool:
    dist.all_to_all_single(torch.ones(4), torch.ones(4), [1] * WORLD, [1, 1, 1, 2])
    return False


@refused("output of another dtype")
def _(rank: int) -> bool:
    dist.all_gather_into_tensor(torch.ones(4 * WORLD, dtype=torch.float64), torch.ones(4))
    return False


@refused("a root that does not exist")
def _(rank: int) -> bool:
    dist.broadcast(torch.ones(4), WORLD + 5)
    return False


@refused("no tensor at all")
def _(rank: int) -> bool:
    dist.all_reduce(None)
    return False


@either("input that lies in the output")
def _(rank: int) -> bool:
    whole = torch.zeros(4 * WORLD)
    part = whole[4:8]
    part.fill_(rank + 1)
    dist.all_gather_into_tensor(whole, part)
    return whole.view(WORLD, 4)[:, 0].tolist() == [r + 1.0 for r in range(WORLD)]


@torch_refuses_one("None among the list, on one rank")
def _(rank: int) -> bool:
    pieces = [torch.ones(4) for _ in range(WORLD)]
    dist.all_gather([*pieces[:-1], None] if rank == 1 else pieces, torch.ones(4))
    return False


@one_rank("output too short on one rank")
def _(rank: int) -> bool:
    dist.all_gather_into_tensor(torch.ones(4 * WORLD - (rank == 1)), torch.ones(4))
    return False


def give(stage: Stage, rank: int, name: str) -> Saw:
    """Makes the call once; a rank whose call was rejected stays until all have answered."""
    body, sees = ARGUMENTS[name]
    dist.barrier()
    saw = stage.observe(lambda: body(rank))
    if saw.raised and sees is REFUSED:
        # All were rejected before anything was exchanged: the group must still work.
        dist.all_reduce(tensor := torch.ones(3))
        if not bool((tensor == WORLD).all()):
            saw.kind = "wrong"
    stage.meet("seen", rank, range(stage.world), stage.timeout + 1)
    return saw


for _name, (_body, _sees) in ARGUMENTS.items():
    add(
        Case(
            f"argument: {_name}",
            ROW,
            partial(play, partial(give, name=_name), timeout=TIMEOUT_S, limit=3 * TIMEOUT_S + 4),
            Promise(sees=_sees, within=TIMEOUT_S + 0.1 if _sees is UNTOLD else 0.1),
            TARGET,
            f"group timeout {TIMEOUT_S:g} s",
        )
    )

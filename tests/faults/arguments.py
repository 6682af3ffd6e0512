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
#: Exceptions if torch itself rejects the call of one rank: of this rank, and of the others.
UNTOLD = ("TypeError", "SymmTimeoutError")

Body = Callable[[int], object]
#: Results if the call must be right.
SERVED = (RIGHT,)
#: Results if the call must be right or rejected.
EITHER = (RIGHT, *REFUSED)
#: Results if torch answers without a call of any backend, so that symm can promise nothing.
BY_TORCH = (RIGHT, WRONG, *REFUSED)


def reduced(tensor: torch.Tensor, expected: Any, op: Any = dist.ReduceOp.SUM) -> bool:
    dist.all_reduce(tensor, op)
    return bool((tensor.detach().to(torch.complex128) == expected).all())


def strided(rank: int) -> bool:
    whole = torch.ones(64)
    return reduced(whole[::2], WORLD) and bool((whole[1::2] == 1).all())


def columns(rank: int) -> bool:
    whole = torch.full((16, 9), -1.0)
    whole[:, 2:5] = rank + 1
    right = reduced(whole[:, 2:5], sum(range(1, WORLD + 1)))
    return right and bool((whole[:, :2] == -1).all()) and bool((whole[:, 5:] == -1).all())


def transposed(rank: int) -> bool:
    tensor = torch.arange(12.0).view(3, 4).t() * (rank == 0)
    dist.broadcast(tensor, 0)
    return torch.equal(tensor, torch.arange(12.0).view(3, 4).t())


def one_in(rank: int) -> bool:
    whole = torch.ones(34)
    return reduced(whole[1:33], WORLD) and float(whole[0]) == 1 and float(whole[33]) == 1


def misaligned(rank: int) -> bool:
    tensor = torch.frombuffer(bytearray(41), dtype=torch.float32, count=10, offset=1)
    tensor.view(torch.uint8)[:] = torch.ones(10).view(torch.uint8)
    dist.all_reduce(tensor)
    return tensor.view(torch.uint8).clone().view(torch.float32).tolist() == [WORLD] * 10


def freed(rank: int) -> None:
    tensor = torch.ones(1 << 20)
    tensor.untyped_storage().resize_(0)
    dist.all_reduce(tensor)


def sparse(rank: int) -> bool:
    tensor = torch.eye(4).to_sparse()
    dist.all_reduce(tensor)
    return torch.equal(tensor.to_dense(), WORLD * torch.eye(4))


def small_float(rank: int) -> bool:
    tensor = torch.ones(8).to(torch.float8_e4m3fn)
    dist.all_reduce(tensor)
    return tensor.float().tolist() == [WORLD] * 8


def within_output(rank: int) -> bool:
    whole = torch.zeros(4 * WORLD)
    part = whole[4:8]
    part.fill_(rank + 1)
    dist.all_gather_into_tensor(whole, part)
    return whole.view(WORLD, 4)[:, 0].tolist() == [r + 1.0 for r in range(WORLD)]


def without_one(rank: int) -> None:
    pieces = [torch.ones(4) for _ in range(WORLD)]
    dist.all_gather([*pieces[:-1], None] if rank == 1 else pieces, torch.ones(4))


def gathered(out: int, dtype: torch.dtype = torch.float32) -> None:
    dist.all_gather_into_tensor(torch.ones(out, dtype=dtype), torch.ones(4))


def exchanged(elements: int, *splits: list[int]) -> None:
    dist.all_to_all_single(torch.ones(elements), torch.ones(elements), *splits)


#: For each argument, the call, which returns true if its result is right, and the results that ranks may see. A call
#: that cannot be right returns something else, so it must raise.
ARGUMENTS: dict[str, tuple[Body, tuple[str, ...]]] = {
    "strided slice": (strided, SERVED),
    "columns of a matrix": (columns, SERVED),
    "transposed": (transposed, SERVED),
    "channels last": (
        lambda _: reduced(torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), WORLD),
        SERVED,
    ),
    "one element in from the start": (one_in, SERVED),
    "at an odd address": (misaligned, SERVED),
    "expanded": (lambda _: reduced(torch.ones(1).expand(64), WORLD), REFUSED),
    "overlapping windows": (lambda _: reduced(torch.ones(10).as_strided((8, 3), (1, 1)), WORLD), REFUSED),
    "lazily conjugated": (lambda _: reduced(torch.full((8,), 1 + 2j).conj(), WORLD * (1 - 2j)), EITHER),
    "lazily negated": (lambda _: reduced(torch.full((8,), 1 + 2j).conj().imag, -2 * WORLD), BY_TORCH),
    "freed storage": (freed, REFUSED),
    "meta tensor": (lambda _: dist.all_reduce(torch.ones(8, device="meta")), BY_TORCH),
    "sparse COO": (sparse, EITHER),
    "sparse CSR": (lambda _: dist.all_reduce(torch.eye(4).to_sparse_csr()), REFUSED),
    "quantized": (lambda _: dist.all_reduce(torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.quint8)), REFUSED),
    "MKL-DNN layout": (lambda _: dist.all_reduce(torch.ones(8, 8).to_mkldnn()), REFUSED),
    "no elements": (lambda _: reduced(torch.ones(0), 0), SERVED),
    "no dimensions": (lambda _: reduced(torch.tensor(1.0), WORLD), SERVED),
    "complex64": (lambda _: reduced(torch.full((8,), 1 + 2j), WORLD * (1 + 2j)), SERVED),
    "bool": (lambda rank: reduced(torch.tensor([rank == 0, False]), torch.tensor([True, False])), SERVED),
    "leaf that requires a gradient": (lambda _: reduced(torch.ones(8, requires_grad=True), WORLD), EITHER),
    "uint16": (lambda _: reduced(torch.ones(8, dtype=torch.int32).to(torch.uint16), WORLD), EITHER),
    "float8_e4m3fn": (small_float, EITHER),
    "bfloat16": (lambda _: reduced(torch.ones(8, dtype=torch.bfloat16), WORLD), SERVED),
    "AVG": (lambda rank: reduced(torch.full((8,), float(rank)), (WORLD - 1) / 2, dist.ReduceOp.AVG), EITHER),
    "BAND of floats": (lambda _: reduced(torch.ones(8), 1, dist.ReduceOp.BAND), REFUSED),
    "PREMUL_SUM without a factor": (lambda _: reduced(torch.ones(8), WORLD, dist.ReduceOp.PREMUL_SUM), REFUSED),
    "output too short": (lambda _: gathered(4 * WORLD - 1), REFUSED),
    "list too short": (lambda _: dist.all_gather([torch.ones(4) for _ in range(WORLD - 1)], torch.ones(4)), REFUSED),
    "input that ranks do not divide": (lambda _: exchanged(4 * WORLD + 1), REFUSED),
    "negative split": (lambda _: exchanged(4, [2, -1, 2, 1], [2, -1, 2, 1]), REFUSED),
    "splits that do not add up": (lambda _: exchanged(4, [1] * WORLD, [1, 1, 1, 2]), REFUSED),
    "output of another dtype": (lambda _: gathered(4 * WORLD, torch.float64), REFUSED),
    "a root that does not exist": (lambda _: dist.broadcast(torch.ones(4), WORLD + 5), REFUSED),
    "no tensor at all": (lambda _: dist.all_reduce(None), REFUSED),
    "input that lies in the output": (within_output, EITHER),
    # torch rejects rank 1's arguments before it calls a backend: the others are not notified, and wait for rank 1.
    "None among the list, on one rank": (without_one, UNTOLD),
    # Only rank 1 is wrong: its call is rejected, and the others are notified.
    "output too short on one rank": (lambda rank: gathered(4 * WORLD - (rank == 1)), REPORTED),
}


def give(stage: Stage, rank: int, name: str) -> Saw:
    """Makes the call once; a rank whose call was rejected stays until all have answered."""
    body, sees = ARGUMENTS[name]
    dist.barrier()
    saw = stage.observe(lambda: body(rank) is True)
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

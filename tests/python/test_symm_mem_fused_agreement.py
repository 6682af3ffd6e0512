"""Calls of the fused operators on which the ranks do not agree, and calls that one rank rejects; CPU tensors."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_symm
import torch_symm.symm_mem as symm_mem
from ranks import init, meet, run_ranks


def name_of() -> str:
    return str(dist.group.WORLD.group_name)


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape).to(dtype)


def gathered(rows: int = 3, dtype: torch.dtype = torch.float32, dim: int = 0, count: int = 1) -> object:
    depth = 4 * (dist.get_world_size() if dim == 1 else 1)
    Bs = [ones(depth, 2, dtype=dtype)] * count
    return symm_mem.fused_all_gather_matmul(ones(rows, 4, dtype=dtype), Bs, dim, name_of())


def scattered(
    rows: int = 2, columns: int = 4, dtype: torch.dtype = torch.float32, op: str = "sum", dim: int = 0
) -> object:
    A, B = ones(rows * dist.get_world_size(), 4, dtype=dtype), ones(4, columns, dtype=dtype)
    return symm_mem.fused_matmul_reduce_scatter(A, B, op, dim, name_of())


#: The shapes of scales of ``A`` and ``B`` that make one product.
Scales = tuple[tuple[int, ...], tuple[int, ...]]
WHOLE: Scales = ((1,), (1,))


def scaled_gathered(rows: int = 16, scales: Scales = WHOLE, bias: torch.Tensor | None = None) -> object:
    A, B = ones(rows, 16, dtype=torch.float8_e4m3fn), ones(16, 16, dtype=torch.float8_e4m3fn).t()
    of_A, of_B = (ones(*shape) for shape in scales)
    lists: tuple[list[Any], ...] = ([bias], [None], [None], [False])
    return symm_mem.fused_all_gather_scaled_matmul(A, [B], of_A, [of_B], 0, name_of(), *lists)


def scaled_scattered(dtype: torch.dtype = torch.float32, op: str = "sum", scales: Scales = WHOLE) -> object:
    rows = 16 * dist.get_world_size()
    A, B = ones(rows, 16, dtype=torch.float8_e4m3fn), ones(16, 16, dtype=torch.float8_e4m3fn).t()
    args = (A, B, ones(*scales[0]), ones(*scales[1]), op, 0, 0, name_of(), None, None, None, dtype)
    return symm_mem.fused_scaled_matmul_reduce_scatter(*args)


def by_row_on_cpu() -> bool:
    """Returns true if this torch multiplies on the CPU with one scale for each row; older ones do not."""
    try:
        A = ones(16, 16, dtype=torch.float8_e4m3fn)
        torch._scaled_mm(A, A.t(), ones(16, 1), ones(1, 16))
    except (RuntimeError, ValueError):
        return False
    return True


def piped(columns: int) -> object:
    whole = torch.empty(2 * dist.get_world_size(), columns)
    return symm_mem._pipelined_all_gather_and_consume(ones(2, columns), lambda part, peer: None, whole, name_of())


def piped_many(columns: int) -> object:
    """A call whose description is longer than ranks exchange, and differs only at its end."""
    shards = [ones(2, 2)] * 20 + [ones(2, columns)]
    wholes = [torch.empty(2 * dist.get_world_size(), shard.shape[1]) for shard in shards]
    return symm_mem._pipelined_multi_all_gather_and_consume(shards, lambda parts, peer: None, wholes, name_of())


def produced(columns: int) -> object:
    whole = torch.empty(2 * dist.get_world_size(), columns)
    return symm_mem._pipelined_produce_and_all2all(lambda peer, out: out.fill_(1), whole, name_of())


F64 = torch.float64
#: The call of rank 0, the call of the other ranks, and parts of the descriptions of both.
DIFFERENT: dict[str, tuple[Callable[[], object], Callable[[], object], tuple[str, str]]] = {
    "rows": (lambda: gathered(3), lambda: gathered(4), ("(3, 4)", "(4, 4)")),
    "rows, in Python": (lambda: gathered(3, F64), lambda: gathered(4, F64), ("(3, 4)", "(4, 4)")),
    "dtype": (lambda: gathered(), lambda: gathered(dtype=torch.bfloat16), ("torch.float32", "torch.bfloat16")),
    "growth": (lambda: gathered(3), lambda: gathered(300_000), ("(3, 4)", "(300000, 4)")),
    "growth, in Python": (lambda: gathered(3, F64), lambda: gathered(3000, F64), ("(3, 4)", "(3000, 4)")),
    "no rows": (lambda: gathered(0), lambda: gathered(4), ("(0, 4)", "(4, 4)")),
    "no products": (lambda: gathered(count=0), lambda: gathered(), ("no products", "dimension 0")),
    "dimension": (lambda: gathered(4, dim=0), lambda: gathered(4, dim=1), ("dimension 0", "dimension 1")),
    "operator": (lambda: gathered(), lambda: scattered(), ("fused_all_gather", "fused_matmul_reduce")),
    "rows of a product": (lambda: scattered(2), lambda: scattered(4), ("product (", "product (")),
    "no columns": (lambda: scattered(columns=0), lambda: scattered(), (", 0)", ", 4)")),
    "columns, in Python": (lambda: scattered(2, 4, F64), lambda: scattered(2, 8, F64), (", 4)", ", 8)")),
    "reduction": (lambda: scattered(op="avg"), lambda: scattered(), ("avg", "sum")),
    "scaled rows": (lambda: scaled_gathered(16), lambda: scaled_gathered(32), ("(16, 16)", "(32, 16)")),
    "scales": (lambda: scaled_gathered(1, ((1, 1), (1,))), lambda: scaled_gathered(1), ("sharded rows", "tensor")),
    "dtype of the result": (
        lambda: scaled_scattered(torch.bfloat16),
        lambda: scaled_scattered(torch.float32),
        ("torch.bfloat16", "torch.float32"),
    ),
    "pipelined gather": (lambda: piped(4), lambda: piped(5), ("(2, 4)", "(2, 5)")),
    "end of a long description": (
        lambda: piped_many(2),
        lambda: piped_many(3),
        ("(2, 2) of torch.float32", "…; they differ in a part that is not shown"),
    ),
    "pipelined exchange": (lambda: produced(4), lambda: produced(5), (", 4)", ", 5)")),
}


@pytest.mark.ranks([2, 3])
def test_p7_calls_that_differ_are_refused_on_all_ranks(rank: int, world_size: int) -> None:
    """No rank reads memory of another with its own shape, and the group and its workspaces work afterwards."""
    for round in range(2):
        for name, (first, others, (one, other)) in DIFFERENT.items():
            with pytest.raises(torch_symm.SymmMismatchError) as error:
                (first if rank == 0 else others)()
            found = re.search(
                r"do not agree: rank 0 \(pid \d+\) called (.*), rank 1 \(.*\) called (.*)", str(error.value)
            )
            assert found and one in found[1] and other in found[2], (name, str(error.value))
        # The next round starts with workspaces.
        for dtype in (torch.float32, F64):
            assert bool((gathered(5, dtype)[1][0] == 4).all()), round  # type: ignore[index]
            assert bool((scattered(5, 4, dtype) == 4 * world_size).all()), round  # type: ignore[attr-defined]


#: The action of rank 1 while rank 0 calls a fused operator, the error on rank 0, and its text.
UNANSWERED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "nothing": (
        lambda: meet("waited", 1, 2), torch_symm.SymmTimeoutError, r"in fused_all_gather_matmul\(\(3, 4\).* compared by"
    ),
    "exit": (
        dist.destroy_process_group, torch_symm.SymmPeerError, r"in fused_all_gather_matmul\(\(3, 4\).* compared by"
    ),
    "collective": (
        lambda: dist.all_reduce(ones(4)),
        torch_symm.SymmMismatchError,
        r"rank 0 \(pid \d+\) called fused_all_gather_matmul\(\(3, 4\).*; rank 1 \(pid \d+\) called all_reduce\(4 ×",
    ),
    "all_gather of the same length": (
        lambda: dist.all_gather_into_tensor(ones(1024, dtype=torch.uint8), ones(512, dtype=torch.uint8)),
        torch_symm.SymmMismatchError,
        r"rank 0 \(pid \d+\) called fused_all_gather_matmul\(\(3, 4\).*; rank 1 \(pid \d+\) called all_gather\(1024 ×",
    ),
}  # fmt: skip


def unanswered(rank: int, world: int) -> None:
    for name, (other, kind, text) in UNANSWERED.items():
        init(rank, world, name=name, timeout=0.5 if name == "nothing" else 20)
        if rank == 0:
            with pytest.raises(kind, match=text) as error:
                gathered()
            assert "all_gather(1024" not in str(error.value).partition("; rank 1")[0], name
            if name == "nothing":
                meet("waited", rank, world)
        elif kind is torch_symm.SymmMismatchError:
            with pytest.raises(kind, match=text):
                other()
        else:
            other()
        meet(f"ended {name}", rank, world)
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.timed
def test_errors_of_the_comparison_name_the_operator() -> None:
    run_ranks(unanswered, 2, backend=None)


@pytest.mark.ranks(2)
def test_what_no_peer_reads_may_differ(rank: int, world_size: int) -> None:
    """Each rank has factors of its own, and a product may be split unevenly over its inner dimension."""
    for dtype in (torch.float32, F64):
        factors = [ones(4, 3 + 5 * rank, dtype=dtype)]
        _, (product,) = symm_mem.fused_all_gather_matmul(ones(3, 4, dtype=dtype), factors, 0, name_of())
        assert torch.equal(product, ones(3 * world_size, 3 + 5 * rank, dtype=dtype) * 4)
        left, right = ones(4, 2 + rank, dtype=dtype), ones(2 + rank, 6, dtype=dtype)
        found = symm_mem.fused_matmul_reduce_scatter(left, right, "sum", 0, name_of())
        assert torch.equal(found, ones(4 // world_size, 6, dtype=dtype) * 5)


#: The call that rank 1 rejects, the call of the other ranks, and the error.
REJECTED: dict[str, tuple[Callable[[], object], Callable[[], object], str]] = {
    "factor": (
        lambda: symm_mem.fused_all_gather_matmul(ones(3, 4), [ones(5, 2)], 0, name_of()),
        gathered,
        "A has 4 columns",
    ),
    "dtype of the factor": (
        lambda: symm_mem.fused_all_gather_matmul(ones(3, 4), [ones(4, 2, dtype=F64)], 0, name_of()),
        lambda: gathered(dtype=F64),
        "A is torch.float32, but B is torch.float64",
    ),
    "device": (
        lambda: symm_mem.fused_all_gather_matmul(ones(3, 4), [torch.ones(4, 2, device="meta")], 0, name_of()),
        gathered,
        "B.* is on meta",
    ),
    "rows": (
        lambda: symm_mem.fused_matmul_reduce_scatter(ones(3, 4), ones(4, 4), "sum", 0, name_of()),
        scattered,
        "2 ranks do not divide the 3 elements",
    ),
    "reduction": (lambda: scattered(op="max"), scattered, 'reduce_op="max" is not one of "sum", "avg"'),
    "scale": (lambda: scaled_gathered(16, ((5, 1), (1,))), scaled_gathered, "Invalid scale shape"),
    "scaled reduction": (lambda: scaled_scattered(op="max"), scaled_scattered, 'reduce_op="max" is not one of'),
    "bias": (lambda: scaled_gathered(bias=ones(3)), scaled_gathered, "Bias must be size 16 but got 3"),
    "native factor": (
        lambda: torch.ops.symm._all_gather_matmul(ones(4, 4), [ones(3, 4)], name_of(), True),
        gathered,
        "A_shard has 4 columns, B has 3 rows",
    ),
    "native rows": (
        lambda: torch.ops.symm._matmul_reduce_scatter(ones(5, 4), ones(4, 4), False, name_of()),
        scattered,
        "the 5 rows of A cannot be divided among 2 ranks",
    ),
    "scales of rows, gathered": (
        lambda: scaled_gathered(16, ((16, 1), (1,))),
        lambda: scaled_gathered(16, ((16, 1), (1, 16))),
        "Invalid scaling configuration",
    ),
    "scales of rows, scattered": (
        lambda: scaled_scattered(scales=((32, 1), (1,))),
        lambda: scaled_scattered(scales=((32, 1), (1, 16))),
        "Invalid scaling configuration",
    ),
}


def rejected_on_rank_1(rank: int, world: int) -> None:
    by_row = by_row_on_cpu()
    for name, (wrong, right, refusal) in REJECTED.items():
        if "scales of rows" in name and not by_row:
            continue
        init(rank, world, name=name)
        scattered()
        refusals = (ValueError, RuntimeError) if rank == 1 else torch_symm.SymmMismatchError
        with pytest.raises(refusals, match=refusal) as error:
            (wrong if rank == 1 else right)()
        assert rank == 1 or ("rank 1 (pid" in str(error.value) and "rejected a call" in str(error.value)), name
        meet(f"rejected {name}", rank, world)
        dist.destroy_process_group()


def test_p9_a_rejected_call_is_told_to_the_ranks_that_wait_for_it() -> None:
    run_ranks(rejected_on_rank_1, 2, backend=None)


@pytest.mark.ranks(2)
def test_a_rejected_call_that_is_repeated_rightly_disturbs_no_rank(rank: int) -> None:
    for _ in range(3):
        if rank == 1:
            with pytest.raises(ValueError, match="reduce_op"):
                scattered(op="max")
        # The product takes longer than the report of a rejection.
        symm_mem._pipelined_all_gather_and_consume(
            ones(2, 2), lambda part, peer: time.sleep(0.1 * rank), torch.empty(4, 2), name_of()
        )

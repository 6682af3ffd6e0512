"""``order="tree"`` on GPUs, and ``torch-symm check --invariance`` compared with NCCL.

With SYMM_ALLOW_SHARED_GPUS=1 and SYMM_TEST_WORLDS=4 or 8, several ranks share a GPU, so that trees differ from rank
order.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch_symm
from cases import Case
from collectives import run
from expected import COMPLEX, assert_same_bits, in_halves, name
from norm_reference import numbers, reference
from pool import WORLDS, Pool, device, needs_ranks, needs_unshared_gpus
from test_cuda_reduce_ops import on_gpu
from torch_symm import __main__ as entry
from torch_symm.tools.check.invariance import COLUMNS, LEAVES, tree, values

pytestmark = needs_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.int32)


def of_tree(world: int) -> dist.ProcessGroup:
    group = dist.new_group(list(range(world)), pg_options=torch_symm.Options(order="tree"))
    assert group is not None
    return group


def reductions(rank: int, world: int) -> int:
    group, reference = of_tree(world), partial(on_gpu, reduce=in_halves)
    return run(
        (
            form,
            Case(rank, world, dtype, count, op=op, reference=reference, root=world - 1, device=device(), group=group),
        )
        for dtype in DTYPES
        for op in ("SUM", "AVG", "PREMUL_SUM", "MAX")
        if (dtype.is_floating_point or op != "PREMUL_SUM") and (dtype not in COMPLEX or op in ("SUM", "AVG"))
        # Lengths for every algorithm.
        for count in (5, 1_003, 40_007, 300_001, 1_500_001)
        for form in ("all_reduce", "reduce", "reduce_scatter_tensor")
        if form != "reduce_scatter_tensor" or dtype not in COMPLEX
    )


def with_leaves(rank: int, world: int) -> None:
    if LEAVES % world:
        return
    group, leaves, each = of_tree(world), values(torch.float32, LEAVES), LEAVES // world
    own = tree(leaves[rank * each : (rank + 1) * each]).to(device())
    dist.all_reduce(own, group=group)
    assert_same_bits(own.cpu(), tree(leaves), f"{world} ranks")


def normed(rank: int, world: int) -> None:
    group, ops = of_tree(world), torch.ops.symm
    # Shapes for a single kernel, and for an all-reduce followed by a kernel for the rows.
    for shape in ((1, 1024), (7, 4096), (333, 8192)):
        inputs = [numbers(other, *shape, dtype=torch.bfloat16) for other in range(world)]
        residual, weight = (numbers(100 + i, *size, dtype=torch.bfloat16) for i, size in enumerate((shape, shape[1:])))
        given = [each.to(device()) for each in (inputs[rank], residual, weight)]
        got = ops.all_reduce_add_rms_norm(*given, 1e-5, group.group_name)
        wanted = reference([in_halves("SUM", inputs)], residual, weight, 1e-5)
        for one, other in zip(got, wanted, strict=True):
            assert_same_bits(one.cpu(), other, str(shape))


@pytest.mark.parametrize("body", (reductions, with_leaves, normed))
@pytest.mark.parametrize("world", WORLDS)
def test_trees(pool: Pool, world: int, body: Callable[..., object]) -> None:
    pool.run(body, world)


@needs_unshared_gpus
def test_a_check_of_invariance(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["check", "--invariance", "--device", "cuda", "--ranks", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and not found["broken"] and not found["errors"]
    rows = {(row["side"], row["dtype"]): row["differ"] for row in found["rows"]}
    assert {side for side, _ in rows} >= {"symm", "symm, tree", "nccl"}
    for side in ("symm", "symm, tree"):
        for dtype in (name(torch.float32), name(torch.bfloat16)):
            assert all(rows[side, dtype][each] == 0 for each in COLUMNS[:-1])

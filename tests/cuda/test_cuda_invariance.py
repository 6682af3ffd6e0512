"""``order="tree"`` on GPUs, and ``torch-symm check --invariance`` compared with NCCL.

With SYMM_ALLOW_SHARED_GPUS=1 and SYMM_TEST_WORLDS=4 or 8, several ranks share a GPU, so that trees differ from rank
order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import test_invariance
import torch
import torch.distributed as dist
from cases import Case
from collectives import run
from expected import COMPLEX, assert_same_bits, in_halves
from pool import WORLDS, Pool, device, needs_ranks, needs_unshared_gpus
from test_cuda_reduce_ops import on_gpu
from test_invariance import checked, of_order
from torch_symm.tools.check.invariance import LEAVES, tree, values

pytestmark = needs_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.int32)


def reductions(rank: int, world: int) -> int:
    group, reference = of_order("tree"), partial(on_gpu, reduce=in_halves)
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
    group, leaves, each = of_order("tree"), values(torch.float32, LEAVES), LEAVES // world
    own = tree(leaves[rank * each : (rank + 1) * each]).to(device())
    dist.all_reduce(own, group=group)
    assert_same_bits(own.cpu(), tree(leaves), f"{world} ranks")


def normed(rank: int, world: int) -> None:
    # Shapes for a single kernel, and for an all-reduce followed by a kernel for the rows.
    shapes = ((1, 1024), (7, 4096), (333, 8192))
    test_invariance.normed(rank, world, of_order("tree"), shapes, device())


@pytest.mark.parametrize("body", (reductions, with_leaves, normed))
@pytest.mark.parametrize("world", WORLDS)
def test_trees(pool: Pool, world: int, body: Callable[..., object]) -> None:
    pool.run(body, world)


@needs_unshared_gpus
def test_a_check_of_invariance(capsys: pytest.CaptureFixture[str]) -> None:
    assert {side for side, *_ in checked(capsys, "2", "--device", "cuda")} >= {"symm", "symm, tree", "nccl"}

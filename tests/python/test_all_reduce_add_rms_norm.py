"""torch.ops.symm.all_reduce_add_rms_norm and its other forms: bits, rejections, its order among other calls."""

from __future__ import annotations

import itertools
import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch_symm
from norm_reference import DTYPES, EPS, Rows, batches, every_form, ops, same_bits
from ranks import run_ranks

#: Shapes of inline calls, one-shot calls of one chunk and of several, and, with more than two ranks, two-shot calls.
SHAPES = ((1, 8), (1, 1024), (1, 4096), (3, 1032), (5, 8192), (2, 16384), (97, 1024))


@pytest.mark.ranks([1, 2, 3, 8])
def test_bits_are_those_of_separate_steps(rank: int, world_size: int) -> None:
    name = dist.group.WORLD.group_name
    for dtype, (seed, shape) in itertools.product(DTYPES, enumerate(SHAPES)):
        every_form(Rows(rank, world_size, shape, dtype, seed), name)
    # The separate steps give the same bits.
    rows = Rows(rank, world_size, (3, 2048), torch.bfloat16)
    summed = rows.own.clone()
    dist.all_reduce(summed)
    normed, total = ops.all_reduce_add_rms_norm(*rows.tensors(), EPS, name)
    assert same_bits(total, summed + rows.residual) and same_bits(normed, rows.wanted()[0])
    # torch's own norm adds the squares in another order.
    assert torch.allclose(normed, torch.nn.functional.rms_norm(total, (2048,), rows.weight, EPS), rtol=0.01)


@pytest.mark.ranks([2, 3])
def test_a_row_has_the_same_bits_in_every_batch(rank: int, world_size: int) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        batches(rank, world_size, dist.group.WORLD.group_name, 1024, dtype)


@pytest.mark.ranks(2)
def test_strides_dimensions_and_no_rows(rank: int, world_size: int) -> None:
    name = dist.group.WORLD.group_name
    rows = Rows(rank, world_size, (6, 64), torch.float32)
    wanted, added = rows.wanted()
    wide = torch.zeros(6, 128)
    wide[:, ::2] = rows.own
    strided = rows.residual.t().contiguous().t()
    normed, total = ops.all_reduce_add_rms_norm(wide[:, ::2], strided, rows.weight, EPS, name)
    assert same_bits(normed, wanted) and same_bits(total, added)
    assert normed.is_contiguous() and total.is_contiguous()
    residual = torch.zeros(6, 100)
    residual[:, :64] = rows.residual
    ops.all_reduce_add_rms_norm_(wide[:, ::2], residual[:, :64], rows.weight, EPS, name)
    assert same_bits(wide[:, ::2], wanted) and same_bits(residual[:, :64], added)
    assert not wide[:, 1::2].any() and not residual[:, 64:].any()
    own, residual = (tensor.view(2, 3, 64) for tensor in (rows.own, rows.residual))
    shaped = ops.all_reduce_add_rms_norm_dynamic_fp8(own, residual, rows.weight, EPS, name)
    assert [tuple(tensor.shape) for tensor in shaped] == [(2, 3, 64), (2, 3, 64), (2, 3, 1)]
    assert same_bits(shaped[1].view(6, 64), added)
    nothing = torch.zeros(0, 64)
    empty = ops.all_reduce_add_rms_norm_dynamic_fp8(nothing, nothing, rows.weight, EPS, name)
    assert [tuple(tensor.shape) for tensor in empty] == [(0, 64), (0, 64), (0, 1)]
    # The input is also the residual, whose value before the call counts.
    own = rows.own.clone()
    _, total = ops.all_reduce_add_rms_norm(own, own, rows.weight, EPS, name)
    assert same_bits(total, sum(rows.all[1:], rows.all[0]) + own)


@pytest.mark.ranks(4)
def test_it_takes_its_place_among_other_calls(rank: int, world_size: int) -> None:
    """Norms in subgroups, after asynchronous calls, and in the trace."""
    pairs = [dist.new_group([first, first + 1]) for first in (0, 2)]
    pair, place = pairs[rank // 2], rank % 2
    rows = Rows(place, 2, (4, 512), torch.bfloat16, seed=rank // 2)
    pending = torch.ones(100_000)
    work = dist.all_reduce(pending, group=pair, async_op=True)
    every_form(rows, pair.group_name)
    work.wait()
    assert bool((pending == 2).all())
    every_form(Rows(rank, world_size, (4, 512), torch.bfloat16), dist.group.WORLD.group_name)
    called = [call for call in torch_symm.trace()["calls"] if call["op"] == "all_reduce_add_rms_norm"]
    assert len(called) == 8 and all(call["state"] == "completed" for call in called)


@pytest.mark.ranks(2)
def test_ranks_that_disagree_hear_of_it(rank: int) -> None:
    for what in ("hidden", "rows", "dtype", "eps", "form", "call"):
        name = (group := dist.new_group()).group_name
        shape, dtype, eps = (4, 64), torch.float32, EPS
        if rank == 1:
            shape = {"hidden": (2, 128), "rows": (3, 64)}.get(what, shape)
            dtype, eps = (torch.bfloat16 if what == "dtype" else dtype), (1e-6 if what == "eps" else eps)
        tensors = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype), torch.ones(shape[-1], dtype=dtype)
        with pytest.raises(
            torch_symm.SymmMismatchError, match=r"rank 0.*all_reduce_add_rms_norm\(4 × 64 × float32, eps 1e-5\)"
        ):
            if rank == 1 and what == "form":
                ops.all_reduce_add_rms_norm_dynamic_fp8(*tensors, eps, name)
            elif rank == 1 and what == "call":
                dist.all_reduce(tensors[0], group=group)
            else:
                ops.all_reduce_add_rms_norm(*tensors, eps, name)


@pytest.mark.ranks(2)
def test_what_is_not_served_is_refused_by_name() -> None:
    name = dist.group.WORLD.group_name
    ones = torch.ones(2, 64)
    weight = torch.ones(64)
    scale = torch.ones(1)
    norm, fp8 = ops.all_reduce_add_rms_norm, ops.all_reduce_add_rms_norm_fp8
    wanting, wide, long = weight.clone().requires_grad_(), (ones.double(), weight.double()), torch.ones(1, 16392)
    for error, text, call in (
        (NotImplementedError, "not differentiable, and weight requires", lambda: norm(ones, ones, wanting, EPS, name)),
        (NotImplementedError, "float64 is not served", lambda: norm(wide[0], *wide, EPS, name)),
        (ValueError, "rows of 12 elements are not served", lambda: norm(*[ones[:, :12]] * 2, weight[:12], EPS, name)),
        (ValueError, "rows of 16392 elements", lambda: norm(long, long, long[0], EPS, name)),
        (ValueError, "residual is of sizes", lambda: norm(ones, ones[:1], weight, EPS, name)),
        (ValueError, "weight is of sizes", lambda: norm(ones, ones, weight[:8], EPS, name)),
        (TypeError, "weight is of Half", lambda: norm(ones, ones, weight.half(), EPS, name)),
        (TypeError, "scale is of Double", lambda: fp8(ones, ones, weight, EPS, scale.double(), name)),
        (ValueError, "scale has 64 elements", lambda: fp8(ones, ones, weight, EPS, weight, name)),
        (ValueError, "eps is -1", lambda: norm(ones, ones, weight, -1.0, name)),
        (ValueError, "has no dimension", lambda: norm(scale[0], scale[0], weight, EPS, name)),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            call()
    with torch.no_grad():
        norm(ones, ones, wanting, EPS, name)
    gloo = dist.new_group(backend="gloo")
    with pytest.raises(ValueError, match="has backend gloo for cpu, not symm"):
        norm(ones, ones, weight, EPS, gloo.group_name)


def late_then_killed(rank: int, world: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=0.5)).group_name
    rows, weight = torch.ones(4, 1024), torch.ones(1024)
    if rank == 0:
        with pytest.raises(torch_symm.SymmTimeoutError, match=r"all_reduce_add_rms_norm.*rank 1"):
            ops.all_reduce_add_rms_norm(rows, rows, weight, EPS, group)
    call = (rows, rows, weight, EPS, dist.group.WORLD.group_name)
    ops.all_reduce_add_rms_norm(*call)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(
        torch_symm.SymmPeerError, match=r"rank 1 .*all_reduce_add_rms_norm\(4 × 1024|all_reduce_add_rms_norm.*rank 1"
    ):
        ops.all_reduce_add_rms_norm(*call)


@pytest.mark.timed
def test_a_dead_peer_and_a_late_one_are_named() -> None:
    run_ranks(late_then_killed, 2, expect_killed=(1,))


@pytest.mark.ranks(2)
def test_shapes_on_meta_and_a_whole_graph(rank: int, world_size: int) -> None:
    name = dist.group.WORLD.group_name
    empty, weight = (torch.empty(size, dtype=torch.bfloat16, device="meta") for size in ((3, 64), (64,)))
    normed, total, scales = ops.all_reduce_add_rms_norm_dynamic_fp8(empty, empty, weight, EPS, name)
    assert (normed.dtype, total.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.bfloat16, torch.float32)
    assert (normed.shape, scales.shape, normed.device.type) == ((3, 64), (3, 1), "meta")
    with pytest.raises(ValueError, match="weight is of sizes"):
        ops.all_reduce_add_rms_norm(empty, empty, weight[:8], EPS, name)
    sizes = {"input": (3, 64), "residual": (3, 64), "weight": (64,), "scale": (1,)}
    here = {each: torch.ones(size) for each, size in sizes.items()}
    for form in ("", "_", "_fp8", "_dynamic_fp8"):
        call = getattr(ops, f"all_reduce_add_rms_norm{form}")
        scaled = ("scale",) if form == "_fp8" else ()
        for odd in ("input", "residual", "weight", *scaled):
            given = {**here, odd: here[odd].to("meta")}
            rest = [given[each] for each in scaled]
            with pytest.raises(ValueError, match=r" is on (cpu|meta), input on (cpu|meta)"):
                call(given["input"], given["residual"], given["weight"], EPS, *rest, name)

    def layer(own: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        normed, total = ops.all_reduce_add_rms_norm(own * 2, residual, weight, EPS, name)
        again, kept = normed * 0.5, total.clone()
        ops.all_reduce_add_rms_norm_(again, kept, weight, EPS, name)
        return again, kept, *ops.all_reduce_add_rms_norm_dynamic_fp8(own, residual, weight, EPS, name)

    fast = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for batch in (2, 3, 5):
            given = Rows(rank, world_size, (batch, 64), torch.bfloat16, seed=batch).tensors()
            assert all(same_bits(*pair) for pair in zip(fast(*given), layer(*given), strict=True)), batch


@pytest.mark.ranks(2, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
def test_a_backend_that_torch_wraps(rank: int, world_size: int) -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    name = dist.new_group([0, 1]).group_name
    every_form(Rows(rank, world_size, (5, 1024), torch.bfloat16), name)

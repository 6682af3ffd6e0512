"""torch_symm.symm_mem on GPUs: fused operators of any dimensions, workspaces, signals with data; eager and in graphs.

Also runs on CPU tensors (SYMM_TEST_DEVICE=cpu), except for tests that need streams.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch_symm.symm_mem as symm_mem
from pool import WORLDS, Pool, device, needs_gpus, needs_ranks, settle
from torch_symm.symm_mem import _test_mode

pytestmark = needs_ranks


def name() -> str:
    return dist.group.WORLD.group_name


def whole_numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Integers so small that their products are exact in any order of summation."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=generator).to(dtype).to(device())


def same(got: torch.Tensor, wanted: torch.Tensor, where: object) -> None:
    assert (got.shape, got.stride(), got.dtype) == (wanted.shape, wanted.stride(), wanted.dtype), where
    assert torch.equal(got, wanted), where


def fused(rank: int, world: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((8 * world, 16), (4 * world, 8 * world, 24), (256 * world, 128)):
            A = whole_numbers(shape, dtype, rank)
            for given in (A, A.transpose(0, 1).contiguous().transpose(0, 1)):
                for dim in range(len(shape)):
                    depth = shape[-1] * (world if dim == len(shape) - 1 else 1)
                    Bs = [whole_numbers((depth, width), dtype, 100 + width) for width in (8, 40)]
                    B = whole_numbers((shape[-1], 8 * world), dtype, 200 + rank)
                    whole, products = symm_mem.fused_all_gather_matmul(given, Bs, dim, name())
                    again = symm_mem.fused_all_gather_matmul(given, Bs, dim, name(), return_A=False)[1]
                    piece = symm_mem.fused_matmul_reduce_scatter(given, B, "sum", dim, name())
                    with _test_mode():
                        wanted_whole, wanted = symm_mem.fused_all_gather_matmul(given, Bs, dim, name())
                        wanted_piece = symm_mem.fused_matmul_reduce_scatter(given, B, "sum", dim, name())
                    where = (dtype, shape, dim, given.stride())
                    assert whole is not None and wanted_whole is not None
                    same(whole, wanted_whole, where)
                    for one, two, three in zip(products, again, wanted, strict=True):
                        same(one, three, where)
                        same(two, three, where)
                    same(piece, wanted_piece, where)


def torchs_own(rank: int, world: int) -> None:
    """torch's operators of the same names run through this package's windows, and match plain collectives."""
    import torch.distributed._symmetric_memory as torchs

    # This call has no effect any more, but programs for earlier versions of torch still make it.
    torchs.enable_symm_mem_for_group(name())
    ops = torch.ops.symm_mem
    for dim, shape in ((0, (64 * world, 32)), (1, (4, 16 * world, 32))):
        A, B = whole_numbers(shape, torch.bfloat16, rank), whole_numbers((32, 48), torch.bfloat16, 7)
        parts = [whole_numbers(shape, torch.bfloat16, each) for each in range(world)]
        gathered = torch.cat(parts, dim)
        given = torchs.restride_A_shard_for_fused_all_gather_matmul(A, dim)
        whole, products = ops.fused_all_gather_matmul(given, [B, B], dim, name())
        assert torch.equal(whole, gathered), dim
        for product in products:
            assert torch.equal(product, gathered @ B), dim
        given = torchs.restride_A_for_fused_matmul_reduce_scatter(A, dim)
        piece = ops.fused_matmul_reduce_scatter(given, B, "sum", dim, name())
        total = sum((part.float() @ B.float() for part in parts), torch.zeros((), device=device()))
        assert torch.equal(piece.float(), total.chunk(world, dim)[rank]), dim
    settle()


def scaled(rank: int, world: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    A = torch.randn(32 * world, 64, generator=generator).to(torch.float8_e4m3fn).to(device())
    B = torch.randn(32, 64, generator=generator).to(torch.float8_e4m3fn).to(device()).t()
    one = torch.tensor(0.5, device=device())
    rows = [(one, one)]
    if device().type == "cuda":
        rows.append((torch.rand(32 * world, 1, generator=generator).to(device()), torch.ones(1, 32, device=device())))
    for A_scale, B_scale in rows:
        options = ([None], [None], [torch.bfloat16], [False])
        gather = (A, [B], A_scale, [B_scale], 0, name(), *options)
        scatter = (A, B, A_scale, B_scale, "avg", 0, 0, name(), [32 * world, 32], None, None, torch.bfloat16)
        whole, (product,) = symm_mem.fused_all_gather_scaled_matmul(*gather)
        piece = symm_mem.fused_scaled_matmul_reduce_scatter(*scatter)
        with _test_mode():
            wanted_whole, (wanted,) = symm_mem.fused_all_gather_scaled_matmul(*gather)
            wanted_piece = symm_mem.fused_scaled_matmul_reduce_scatter(*scatter)
        assert torch.equal(whole.float(), wanted_whole.float())
        torch.testing.assert_close(product, wanted, atol=0.1, rtol=0.02)
        torch.testing.assert_close(piece, wanted_piece, atol=0.1, rtol=0.02)


def overtaking(rank: int, world: int) -> None:
    """Data changes from call to call, without waits in between."""
    B = torch.eye(256, device=device())
    found = []
    for call in range(50):
        A = torch.full((128, 256), float(1000 * call + rank), device=device())
        # The pipeline splits the last dimension on every device.
        gathered = symm_mem.fused_all_gather_matmul(A[:, : 256 // world].contiguous(), [B], 1, name())[1][0]
        summed = symm_mem.fused_matmul_reduce_scatter(A, B, "avg", 1, name())
        found.append((gathered, summed))
    settle()
    for call, (gathered, summed) in enumerate(found):
        for peer, part in enumerate(gathered[:, : 256 // world * world].chunk(world, 1)):
            assert bool((part == 1000 * call + peer).all()), (call, peer)
        assert bool((summed == 1000 * call + (world - 1) / 2).all()), call


def captured(rank: int, world: int) -> None:
    A, B = torch.zeros(64 * world, 64, device=device()), torch.eye(64, device=device())

    def step() -> tuple[torch.Tensor, ...]:
        whole, _ = symm_mem.fused_all_gather_matmul(A, [B], 0, name())
        wide = symm_mem.fused_all_gather_matmul(A, [torch.ones(64 * world, 8, device=device())], 1, name())[1][0]
        assert whole is not None
        return whole, wide, *(symm_mem.fused_matmul_reduce_scatter(A, B, "sum", dim, name()) for dim in (0, 1))

    step()
    with (
        pytest.raises(RuntimeError, match="cannot grow during graph capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        symm_mem.get_symm_mem_workspace(name(), 1 << 30)
    settle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    total = world * (world - 1) / 2
    for turn in range(20):
        A.fill_(turn * world + rank)
        graph.replay()
        whole, wide, rows, columns = (result.clone() for result in results)
        assert whole[:: 64 * world, 0].tolist() == [turn * world + peer for peer in range(world)]
        assert bool((wide == 64 * (turn * world * world + total)).all())
        assert bool((rows == turn * world * world + total).all()) and torch.equal(
            rows[:, : columns.shape[1]][:1], columns[:1]
        )
        if turn % 5 == 0:
            for one, other in zip(step(), (whole, wide, rows, columns), strict=True):
                assert torch.equal(one, other), turn


@pytest.mark.parametrize("body", (fused, pytest.param(torchs_own, marks=needs_gpus), scaled))
@pytest.mark.parametrize("world", WORLDS)
def test_operators_are_their_fallbacks(pool: Pool, world: int, body: Callable[..., None]) -> None:
    pool.run(body, world)


@pytest.mark.parametrize("body", (overtaking, pytest.param(captured, marks=needs_gpus)))
@pytest.mark.parametrize("world", [world for world in WORLDS if world in (2, 4, 8)])
def test_many_calls(pool: Pool, world: int, body: Callable[..., None]) -> None:
    pool.run(body, world)

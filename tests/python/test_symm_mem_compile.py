"""Fused matmuls under torch.compile, in place of torch's operators, and as Inductor's async tensor parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed._symmetric_memory as torchs
import torch_symm.symm_mem as symm_mem
from programs import needs_compiler
from torch_symm.symm_mem import _test_mode


@pytest.mark.ranks(2)
def test_shapes_and_strides_on_meta(world_size: int) -> None:
    name = dist.group.WORLD.group_name
    A, B = torch.empty(4, 8, 3, device="meta"), torch.empty(3, 5, device="meta")
    for dim in range(2):
        whole, (product,) = symm_mem.fused_all_gather_matmul(A, [B], dim, name)
        shape = [4, 8, 3]
        shape[dim] *= world_size
        assert whole is not None and list(whole.shape) == shape and list(product.shape) == [*shape[:-1], 5]
        assert whole.movedim(dim, 0).is_contiguous() and product.movedim(dim, 0).is_contiguous()
    whole, (product,) = symm_mem.fused_all_gather_matmul(A, [torch.empty(3 * world_size, 5, device="meta")], 2, name)
    assert whole is not None and whole.shape == (4, 8, 3 * world_size) and whole.is_contiguous()
    assert symm_mem.fused_all_gather_matmul(A, [B], 0, name, return_A=False)[0] is None
    wide = torch.empty(3, 8, device="meta")
    for dim, shape in enumerate(((4 // world_size, 8, 8), (4, 8 // world_size, 8), (4, 8, 8 // world_size))):
        piece = symm_mem.fused_matmul_reduce_scatter(A, wide, "avg", dim, name)
        assert piece.shape == shape and piece.is_contiguous()
    with pytest.raises(ValueError, match="Invalid gather_dim"):
        symm_mem.fused_matmul_reduce_scatter(A, wide, "avg", 3, name)


def layer(tokens: torch.Tensor, up: torch.Tensor, down: torch.Tensor, name: str) -> torch.Tensor:
    _, (hidden,) = symm_mem.fused_all_gather_matmul(tokens, [up], 0, name, return_A=False)
    return symm_mem.fused_matmul_reduce_scatter(torch.relu(hidden), down, "sum", 0, name) * 2


@pytest.mark.parametrize("backend", ("aot_eager", pytest.param("inductor", marks=(needs_compiler, pytest.mark.slow))))
@pytest.mark.usefixtures("inductor")
@pytest.mark.ranks(2, timeout=200)
def test_operators_compile_without_a_graph_break(rank: int, backend: str) -> None:
    name = dist.group.WORLD.group_name
    torch.manual_seed(rank)
    tokens, up, down = torch.randn(4, 8), torch.randn(8, 6), torch.randn(6, 8)
    wanted = layer(tokens, up, down, name)
    with _test_mode():
        unfused = layer(tokens, up, down, name)
    assert torch.allclose(wanted, unfused, atol=1e-4)
    fast = torch.compile(layer, backend=backend, fullgraph=True)
    for _ in range(3):
        assert torch.allclose(fast(tokens, up, down, name), wanted, atol=1e-4)
    longer = torch.randn(6, 8)
    assert torch.allclose(fast(longer, up, down, name), layer(longer, up, down, name), atol=1e-4)


@pytest.mark.ranks(2)
def test_install_serves_symm_groups_and_uninstall_undoes_it(rank: int, world_size: int) -> None:
    ops = torch.ops.symm_mem
    world_name, gloo = dist.group.WORLD.group_name, dist.new_group(backend="gloo")
    A, B = torch.full((2 * world_size, 3), float(rank + 1)), torch.ones(3, 4)

    def everything(name: str) -> list[torch.Tensor]:
        whole, (product,) = ops.fused_all_gather_matmul(A, [B], 0, name)
        return [whole, product, ops.fused_matmul_reduce_scatter(A, B, "sum", 0, name)]

    with pytest.raises(NotImplementedError):
        everything(world_name)
    before = (torchs.is_symm_mem_enabled_for_group, torch.compiler.config.cache_key_tag)
    assert not torchs.is_symm_mem_enabled_for_group(world_name)
    for _ in range(2):
        symm_mem.enable_fused_ops()
        symm_mem.enable_fused_ops()
        wanted = [symm_mem.fused_all_gather_matmul(A, [B], 0, world_name)[0], *everything(world_name)[1:]]
        for got in (everything(world_name), everything(gloo.group_name)):
            assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
        total = 3.0 * sum(range(1, world_size + 1))
        assert torch.equal(everything(gloo.group_name)[2], torch.full((2, 4), total))
        assert torchs.is_symm_mem_enabled_for_group(world_name)
        assert not torchs.is_symm_mem_enabled_for_group(gloo.group_name)
        assert torch.compiler.config.cache_key_tag != before[1]
        symm_mem.disable_fused_ops()
        symm_mem.disable_fused_ops()
        assert (torchs.is_symm_mem_enabled_for_group, torch.compiler.config.cache_key_tag) == before
        with pytest.raises(NotImplementedError):
            everything(world_name)


def feed_forward(tokens: torch.Tensor, up: torch.Tensor, down: torch.Tensor, group: Any, dim: int) -> torch.Tensor:
    """A tensor-parallel MLP with sequence parallelism, by plain functional collectives."""
    everyone = funcol.all_gather_tensor(tokens, 0, group)
    if dim:  # written out, because Dynamo does not enter torch's own version
        everyone = torch.cat(everyone.chunk(group.size()), dim)
    hidden = torch.nn.functional.silu(everyone @ up)
    return funcol.reduce_scatter_tensor(hidden @ down, "sum", dim, group)


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(not dist.is_nccl_available(), reason="Inductor asks for a torch that was built with NCCL")
@pytest.mark.usefixtures("inductor")
@pytest.mark.ranks(2, timeout=200)
def test_async_tensor_parallelism_of_inductor(rank: int) -> None:
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    symm_mem.enable_fused_ops()
    for dim, shape in enumerate(((8, 16), (3, 8, 16))):
        torch._dynamo.reset()
        torch.manual_seed(rank)
        given = torch.randn(shape), torch.randn(16, 24), torch.randn(24, 16), dist.group.WORLD, dim
        wanted = feed_forward(*given)
        with config.patch(_micro_pipeline_tp=True):
            fast = torch.compile(feed_forward, fullgraph=True)
            got, codes = run_and_get_code(fast, *given)
            for _ in range(3):
                assert torch.allclose(got, wanted, atol=1e-4)
                got = fast(*given)
        assert torch.allclose(got, wanted, atol=1e-4)
        text = "\n".join(codes)
        assert "symm_mem.fused_all_gather_matmul" in text and "symm_mem.fused_matmul_reduce_scatter" in text, text
        assert "all_gather_into_tensor" not in text and "reduce_scatter_tensor" not in text

"""``torch_symm.fsdp`` on GPUs: the same bits, without staging, at the same addresses in every step."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool, device, needs_gpus
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch_symm import fsdp
from zero_copy import unstaged

pytestmark = needs_gpus

#: Layers of 16 MB in float32. Calls of a few MB and more are zero-copy.
WIDTH, LAYERS, STEPS = 2048, 3, 5
POLICIES = {
    "float32": MixedPrecisionPolicy(),
    "bfloat16, reduced as float32": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "bfloat16": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16),
}


def new_model(policy: MixedPrecisionPolicy, shape: tuple[int, ...], factor: float | None) -> nn.Sequential:
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, device=device()) for _ in range(LAYERS)))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if factor is not None and isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(factor)
    return model


def train(model: nn.Module, rank: int) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    numbers = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(64, WIDTH, generator=numbers).to(device())).float().square().mean().backward()
        optimizer.step()
    return [parameter.to_local().detach().cpu() for parameter in model.parameters()]


class Addresses:
    """Records the address of each call's buffer: the output of an all-gather, the input of a reduce-scatter."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.of: dict[str, list[int]] = {"gather": [], "scatter": []}
        for name, kind, buffer in (
            ("gather", fsdp.AllGather, "output_tensor"),
            ("scatter", fsdp.ReduceScatter, "input_tensor"),
        ):
            patch.setattr(kind, "__call__", self._noting(name, buffer, kind.__call__))

    def _noting(self, name: str, buffer: str, own: Any) -> Any:
        def call(comm: object, **named: Any) -> Any:
            self.of[name].append(named[buffer].data_ptr())
            return own(comm, **named)

        return call


def same_bits(rank: int, world: int, policy: str, shape: tuple[int, ...], factor: float | None) -> int:
    usual = train(new_model(POLICIES[policy], shape, factor), rank)
    model = new_model(POLICIES[policy], shape, factor)
    fsdp.use(model)
    torch.cuda.synchronize()
    before = unstaged()
    with pytest.MonkeyPatch.context() as patch:
        addresses = Addresses(patch)
        ours = train(model, rank)
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(usual, ours, strict=True)), "other bits"
    for name, found in addresses.of.items():
        a_step = len(found) // STEPS
        last = found[-a_step:]
        assert a_step and found[a_step : 2 * a_step] == last, f"{name}: addresses change from step to step"
        assert len(set(last)) <= 3, f"{name}: a step uses {len(set(last))} buffers of one size"
    return unstaged() - before


def from_torch(rank: int, world: int) -> None:
    """Either of torch's own two switches also avoids staging; ordinary buffers do not."""
    before = unstaged()
    usual = train(new_model(POLICIES["float32"], (2,), None), rank)
    assert unstaged() == before, "ordinary buffers were not staged"
    for name, value in (("set_allocate_memory_from_process_group_for_comm", True), ("set_symm_mem_for_comm", "SYMM")):
        model = new_model(POLICIES["float32"], (2,), None)
        modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        if not hasattr(model, name):
            continue
        for module in modules:
            getattr(module, name)(value)
        before = unstaged()
        assert all(torch.equal(one, other) for one, other in zip(usual, train(model, rank), strict=True)), name
        assert unstaged() > before, name


def replicated(rank: int, world: int) -> None:
    """Parameters are replicated over all ranks: FSDP2 shards within one rank, and all-reduces the gradients itself."""
    usual = train(new_model(POLICIES["float32"], (2, 1), None), rank)
    model = new_model(POLICIES["float32"], (2, 1), None)
    fsdp.use(model)
    assert all(torch.equal(one, other) for one, other in zip(usual, train(model, rank), strict=True))


def reserved_after(rank: int, *, ours: bool) -> int:
    """Returns the bytes that torch's allocator holds when a model is gone."""
    model = new_model(POLICIES["float32"], (2,), None)
    if ours:
        fsdp.use(model)
    train(model, rank)
    torch.cuda.synchronize()
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved())


def freed(rank: int, world: int) -> None:
    """The pools end with the model."""
    usual = reserved_after(rank, ours=False)
    assert reserved_after(rank, ours=True) <= usual + WIDTH * WIDTH * 4
    dist.barrier()


#: With a gradient divide factor, FSDP2 reduces by PREMUL_SUM.
@pytest.mark.parametrize(
    ("policy", "factor"), [*((policy, None) for policy in POLICIES), ("bfloat16, reduced as float32", 3.0)]
)
def test_same_bits_without_staging(pool: Pool, policy: str, factor: float | None) -> None:
    assert all(calls > 0 for calls in pool.run(same_bits, 2, policy, (2,), factor, timeout=200))


@pytest.mark.parametrize("body", (replicated, from_torch, freed))
def test_meshes_switches_and_memory(pool: Pool, body: Any) -> None:
    pool.run(body, 2, timeout=200)

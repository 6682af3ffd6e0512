"""``torch_symm.fsdp``: the same bits as FSDP2's own communication, and one pool for each size."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch_symm import fsdp

#: Widths of the layers; no number of ranks divides 37 or 5. The root has the parameters of the last layer.
WIDTHS = (16, 37, 5)
BF16, F32, F16 = torch.bfloat16, torch.float32, torch.float16

#: Arguments of fully_shard by case; a string is the name of a setting of the modules.
CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16, reduced as float32": {"mp_policy": MixedPrecisionPolicy(BF16, F32)},
    "bfloat16": {"mp_policy": MixedPrecisionPolicy(BF16, BF16)},
    "float16": {"mp_policy": MixedPrecisionPolicy(F16, F16)},
    "kept": {"reshard_after_forward": False},
    "resharded to pairs": {"reshard_after_forward": 2},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "divide factor": {"set_gradient_divide_factor": 5.0},
    "divided by the ranks": {"set_gradient_divide_factor": 4.0},
    "sums only": {"set_force_sum_reduction_for_comms": True},
    "hybrid": {"mesh": (2, 2)},
    "hybrid, divide factor": {"mesh": (2, 2), "set_gradient_divide_factor": 3.0},
    "unsharded early": {"_set_unshard_async_op": True},
}


def new_model(case: dict[str, Any], world: int) -> nn.Sequential:
    case = dict(case)
    shape = case.pop("mesh", (world,))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    settings = {name: case.pop(name) for name in list(case) if name.startswith(("set_", "_set_"))}
    torch.manual_seed(1)
    first, second, third = WIDTHS
    model = nn.Sequential(nn.Linear(first, second), nn.GELU(), nn.Linear(second, second), nn.Linear(second, third))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, **case)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for name, value in settings.items():
                getattr(module, name)(value)
    return model


def train(model: nn.Module, rank: int) -> list[torch.Tensor]:
    """The losses, gradients and parameters of this rank after three steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    seen: list[torch.Tensor] = []
    for step in range(3):
        optimizer.zero_grad()
        data = torch.randn(8, WIDTHS[0], generator=torch.Generator().manual_seed(100 * step + rank))
        loss = model(data).float().square().mean()
        loss.backward()
        seen += [loss.detach(), *(parameter.grad.to_local().clone() for parameter in model.parameters())]
        optimizer.step()
    return seen + [parameter.to_local().detach() for parameter in model.parameters()]


class Counted:
    """Counts the calls of torch_symm's classes."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {"AllGather": 0, "ReduceScatter": 0}
        for kind in (fsdp.AllGather, fsdp.ReduceScatter):
            kind.__call__ = self._counting(kind.__name__, kind.__call__)  # type: ignore[method-assign]

    def _counting(self, name: str, own: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            self.calls[name] += 1
            return own(*given, **named)

        return call


def same_bits(rank: int, world: int, name: str) -> None:
    usual = train(new_model(CASES[name], world), rank)
    counted = Counted()
    model = new_model(CASES[name], world)
    fsdp.use(model)
    ours = train(model, rank)
    assert len(usual) == len(ours)
    for number, (one, other) in enumerate(zip(usual, ours, strict=True)):
        assert torch.equal(one, other), f"result {number} differs"
    assert any(float(grad.abs().sum()) for grad in ours[1:3])
    # Three modules in three steps. Other modules than the root are gathered again for the backward pass unless they are
    # kept; resharding to pairs includes the root.
    gathers = {"kept": 9, "resharded to pairs": 18}.get(name, 15)
    assert counted.calls == {"AllGather": gathers, "ReduceScatter": 9}, counted.calls


@pytest.mark.parametrize("name", CASES)
def test_same_bits(name: str) -> None:
    run_ranks(same_bits, 4, name)


def rejected(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="no module was passed to fully_shard"):
        fsdp.use(nn.Linear(2, 2))
    group = dist.new_group(backend="gloo")
    mesh = torch.distributed.device_mesh.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("gloo",))
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match="sharded over groups of gloo"):
        fsdp.use(model)
    fully_shard(symm := nn.Linear(4, 4), mesh=init_device_mesh("cpu", (world,)))
    fsdp.use(symm)
    # torch refuses to guess how the buffers of another class are allocated.
    with pytest.raises(AssertionError, match="custom"):
        symm.set_allocate_memory_from_process_group_for_comm(True)


def test_what_is_rejected() -> None:
    run_ranks(rejected, 2)


def alternatives(rank: int, world: int) -> None:
    """torch's own switch asks the group's backend, which has no such memory on CPUs."""
    usual = train(new_model({}, world), rank)
    model = new_model({"set_allocate_memory_from_process_group_for_comm": True}, world)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert not backend.supports_tensor_alloc(torch.device("cpu"))
    assert all(map(torch.equal, usual, train(model, rank)))
    if hasattr(model, "set_symm_mem_for_comm"):
        model = new_model({"set_symm_mem_for_comm": "SYMM"}, world)
        with pytest.raises(RuntimeError, match="did not find backend for device type cpu"):
            train(model, rank)


def test_memory_from_the_group_on_cpu_tensors() -> None:
    run_ranks(alternatives, 2)


def test_each_size_has_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """With doubles of torch's pools, which need a GPU."""
    used: list[object] = []

    @contextmanager
    def use_mem_pool(pool: object, device: int) -> Any:
        used.append(pool)
        yield

    @contextmanager
    def on(index: int) -> Any:
        yield

    class Native:
        def _supports_symm_mem(self, index: int) -> bool:
            return index != 7

    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: object())
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "empty", lambda *size, dtype, device: (size, dtype, device))
    monkeypatch.setattr(fsdp, "mem_allocator", object)
    monkeypatch.setattr(fsdp, "load", Native)
    buffers = fsdp.Buffers()
    gpu, count = torch.device("cuda", 0), fsdp.MIN_BYTES // 4
    assert buffers.allocate((count,), torch.float32, gpu) == ((count,), torch.float32, gpu)
    buffers.allocate((2 * count,), torch.float32, gpu)
    buffers.allocate((4 * count,), torch.bfloat16, gpu)
    buffers.allocate((count,), torch.float32, torch.device("cuda"))
    first, second, third, fourth = used
    assert first is not second and second is third and fourth is first, "a pool for each size in bytes"
    buffers.allocate((count - 1,), torch.float32, gpu)
    buffers.allocate((count,), torch.float32, torch.device("cuda", 7))
    buffers.allocate((count,), torch.float32, torch.device("cpu"))
    assert len(used) == 4, "short tensors, and devices without symmetric memory, use none"
    for more in range(fsdp.MAX_SIZES + 3):
        buffers.allocate((count + 100 + more,), torch.float32, gpu)
    assert len(set(map(id, used))) == fsdp.MAX_SIZES + 1 and used[-1] is used[-2], "the rest share one"
    assert fsdp.AllGather(buffers).allocate((count,), dtype=torch.float32, device=gpu) and used[-1] is first
    assert fsdp.ReduceScatter().allocate((count,), dtype=torch.float32, device=gpu) and used[-1] not in used[:-1]


def test_the_functions_of_torch_that_the_design_names() -> None:
    """docs/design/zero-copy.md explains the copies that this interface leaves in place."""
    for name in ("foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce"):
        assert callable(getattr(collectives, name))
    reducing = "chunk_cat_mixed_dtype" if hasattr(torch.ops.fsdp, "chunk_cat_mixed_dtype") else "chunk_cat"
    for name in ("all_gather_copy_in", "split_with_sizes_copy", reducing):
        assert hasattr(torch.ops.fsdp, name)
    for name in ("alloc_all_gather_outputs", "free_all_gather_outputs"):
        assert callable(getattr(FSDPParam, name))
    assert list(inspect.signature(AllGather.allocate).parameters) == ["self", "size", "dtype", "device"]
    given = ["self", "output_tensor", "input_tensor", "group", "async_op"]
    assert list(inspect.signature(AllGather.__call__).parameters) == given
    assert list(inspect.signature(ReduceScatter.__call__).parameters) == [*given[:4], "op", "async_op"]

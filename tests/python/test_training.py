"""Training with the backend: DDP, FSDP2 with and without ``torch_symm.fsdp``, collectives with gradients, events."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch_symm import fsdp
from torch_symm.testing import init_process_group


def network(seed: int = 1) -> torch.nn.Module:
    torch.manual_seed(seed)
    linear = torch.nn.Linear
    return torch.nn.Sequential(linear(16, 64), torch.nn.ReLU(), linear(64, 64), linear(64, 4))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))


def local_gradients(world: int, model: torch.nn.Module, step: int) -> list[torch.Tensor]:
    """The mean over ranks of the gradients, computed here."""
    total = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for rank in range(world):
        model.zero_grad()
        model(batch(rank, step)).pow(2).mean().backward()
        for sum_, parameter in zip(total, model.parameters(), strict=True):
            sum_ += parameter.grad / world
    return total


@pytest.mark.ranks(3)
def test_ddp_gradients(rank: int, world_size: int) -> None:
    for options in ({}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
        # DDP starts from the parameters of rank 0.
        model, alone = network(seed=rank), network(seed=0)
        wrapped = DistributedDataParallel(model, bucket_cap_mb=0.01, **options)
        for parameter, wanted in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.equal(parameter, wanted)
        for step in range(4):
            wrapped.zero_grad()
            wrapped(batch(rank, step)).pow(2).mean().backward()
            for got, wanted in zip(model.parameters(), local_gradients(world_size, alone, step), strict=True):
                torch.testing.assert_close(got.grad, wanted, msg=lambda text, about=options: f"{about}: {text}")


@pytest.mark.ranks(2)
def test_ddp_hooks(rank: int, world_size: int) -> None:
    for hook in (
        default_hooks.allreduce_hook,
        default_hooks.fp16_compress_hook,
        default_hooks.bf16_compress_hook,
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
    ):
        model = network()
        alone = copy.deepcopy(model)
        wrapped = DistributedDataParallel(model)
        try:
            wrapped.register_comm_hook(dist.group.WORLD, hook)
        except TypeError:
            # torch allows the bf16 hook only in builds with NCCL.
            assert hook is default_hooks.bf16_compress_hook
            continue
        for step in range(2):
            wrapped.zero_grad()
            wrapped(batch(rank, step)).pow(2).mean().backward()
            for got, wanted in zip(model.parameters(), local_gradients(world_size, alone, step), strict=True):
                torch.testing.assert_close(got.grad, wanted, atol=2e-3, rtol=2e-2)
    if torch.cuda.is_available():
        # If CUDA is available, the hook below waits for a GPU, even for CPU tensors.
        return
    state = powerSGD_hook.PowerSGDState(dist.group.WORLD, matrix_approximation_rank=2, start_powerSGD_iter=2)
    wrapped = DistributedDataParallel(network())
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(4):
        wrapped(batch(rank, step)).pow(2).mean().backward()


@pytest.mark.ranks(3)
def test_ddp_join(rank: int) -> None:
    """Join makes ranks with fewer batches take part in the others' collectives."""
    wrapped = DistributedDataParallel(network())
    with wrapped.join():
        for step in range(2 + rank):
            wrapped(batch(rank, step)).pow(2).mean().backward()


@pytest.mark.ranks(4)
def test_fsdp2(rank: int, world_size: int) -> None:
    """ "hybrid": sharded in pairs, replicated between them: all-reduce and reduce-scatter in one training."""
    for case in ("float32", "bfloat16", "divide factor", "clip", "hybrid"):
        shape, names = ((2, 2), ("replicate", "shard")) if case == "hybrid" else ((world_size,), None)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = network()
        alone = copy.deepcopy(model)
        loose = case == "bfloat16"
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16) if loose else MixedPrecisionPolicy()
        near = {"atol": 5e-3, "rtol": 5e-2} if loose else {}
        for layer in (*(each for each in model if isinstance(each, torch.nn.Linear)), model):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
            if case == "divide factor":
                layer.set_gradient_divide_factor(5.0)  # becomes PREMUL_SUM
        factor = world_size / 5.0 if case == "divide factor" else 1.0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        other = torch.optim.SGD(alone.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(rank, step)).pow(2).mean().backward()
            gradients = local_gradients(world_size, alone, step)
            for parameter, gradient in zip(alone.parameters(), gradients, strict=True):
                parameter.grad = gradient * factor
            if case == "clip":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
            optimizer.step()
            other.step()
            for sharded, whole in zip(model.parameters(), alone.parameters(), strict=True):
                assert isinstance(sharded, DTensor)
                for got, wanted in ((sharded, whole), (sharded.grad, whole.grad)):
                    torch.testing.assert_close(got.full_tensor(), wanted, **near, msg=lambda text, c=case: c + text)


@pytest.mark.ranks(3)
def test_differentiable_collectives(rank: int, world_size: int) -> None:
    """torch.distributed.nn: the gradients of each collective."""
    mine = torch.full((3,), float(rank + 1), requires_grad=True)
    outputs = differentiable.all_gather(mine)
    assert [float(output[0].detach()) for output in outputs] == [1.0, 2.0, 3.0]
    sum((index + 1) * output.sum() for index, output in enumerate(outputs)).backward()
    assert bool((mine.grad == world_size * (rank + 1)).all())

    mine = torch.full((3,), float(rank + 1), requires_grad=True)
    differentiable.all_reduce(mine * 2).sum().backward()
    assert bool((mine.grad == 2 * world_size).all())

    mine = torch.full((3 * world_size,), float(rank), requires_grad=True)
    output = differentiable.all_to_all_single(torch.zeros(3 * world_size), mine)
    (output * (rank + 1)).sum().backward()
    assert mine.grad.view(world_size, 3)[:, 0].tolist() == [1.0, 2.0, 3.0]

    mine = torch.full((2,), float(rank), requires_grad=True)
    places = [torch.zeros(2) for _ in range(world_size)]
    outputs = differentiable.all_to_all(places, [mine * (to + 1) for to in range(world_size)])
    sum(output.sum() for output in outputs).backward()
    assert bool((mine.grad == 6).all())

    mine = torch.full((2,), float(rank), requires_grad=True)
    differentiable.reduce_scatter(torch.zeros(2), [mine * 1 for _ in range(world_size)]).sum().backward()
    assert bool((mine.grad == world_size).all())

    mine = torch.full((2,), 1.0, requires_grad=True)
    (differentiable.broadcast(mine, 1) * (rank + 1)).sum().backward()
    assert bool((mine.grad == (6 if rank == 1 else 0)).all())


@pytest.mark.ranks(3)
def test_functional_collectives(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    for count in (4, 90_000):
        mine = torch.full((count,), float(rank))
        assert bool((functional.all_reduce(mine, "sum", group) == 3).all())
        assert bool((functional.all_reduce(mine, "avg", group) == 1).all())
        gathered = functional.all_gather_tensor(mine, 0, group)
        assert gathered.view(world_size, count)[:, 0].tolist() == [0.0, 1.0, 2.0]
        scattered = functional.reduce_scatter_tensor(torch.full((world_size * count,), float(rank)), "sum", 0, group)
        assert scattered.numel() == count and bool((scattered == 3).all())
        assert bool((functional.broadcast(mine, 2, group) == 2).all())
        first, second = functional.all_reduce_coalesced([mine, mine + 1], "sum", group)
        assert bool((first == 3).all()) and bool((second == 6).all())
        splits = [1, 2, 3]
        sent = torch.cat([torch.full((splits[to],), 10.0 * rank + to) for to in range(world_size)])
        received = functional.all_to_all_single(sent, [splits[rank]] * world_size, splits, group)
        assert received.tolist() == [10.0 * giver + rank for giver in range(world_size) for _ in range(splits[rank])]
    assert bool((mine == rank).all()), "a functional call changed its input"


@pytest.mark.ranks(2)
def test_profiler_events(rank: int, world_size: int) -> None:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        dist.all_reduce(torch.ones(10, 3))
        dist.all_reduce(torch.ones(1 << 18), async_op=True).wait()
        dist.broadcast(torch.ones(5), 0)
        dist.all_gather_into_tensor(torch.ones(world_size * 2), torch.ones(2))
        dist.reduce_scatter_tensor(torch.ones(2), torch.ones(world_size * 2))
        dist.all_to_all_single(torch.ones(world_size), torch.ones(world_size))
        dist.gather(torch.ones(2), [torch.ones(2) for _ in range(world_size)] if rank == 0 else None, 0)
        dist.scatter(torch.ones(2), [torch.ones(2) for _ in range(world_size)] if rank == 0 else None, 0)
        dist.reduce(torch.ones(2), 0)
        if rank == 0:
            dist.send(torch.ones(7), 1)
        else:
            dist.recv(torch.ones(7), 0)
        dist.barrier()
    names = [event.name for event in seen.events()]
    calls = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "reduce")
    assert {f"symm:{call}" for call in (*calls, "barrier", "recv" if rank else "send")} <= set(names), names
    reduces = [event for event in seen.events() if event.name == "symm:all_reduce"]
    assert len(reduces) == 2 and all(event.is_async for event in reduces)
    assert [10, 3] in [shape for event in reduces for shape in event.input_shapes], reduces[0].input_shapes
    assert sum(name == "record_param_comms" for name in names) == 11


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


@pytest.mark.parametrize("name", CASES)
@pytest.mark.ranks(4)
def test_same_bits(rank: int, world_size: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = train(new_model(CASES[name], world_size), rank)
    calls = Counter[str]()
    for kind in (fsdp.AllGather, fsdp.ReduceScatter):

        def counted(self: Any, *given: Any, kind: Any = kind, own: Any = kind.__call__, **named: Any) -> Any:
            calls[kind.__name__] += 1
            return own(self, *given, **named)

        monkeypatch.setattr(kind, "__call__", counted)
    model = new_model(CASES[name], world_size)
    fsdp.use(model)
    ours = train(model, rank)
    assert len(usual) == len(ours)
    for number, (one, other) in enumerate(zip(usual, ours, strict=True)):
        assert torch.equal(one, other), f"result {number} differs"
    assert any(float(grad.abs().sum()) for grad in ours[1:3])
    # Three modules in three steps. All modules except the root are gathered again for the backward pass unless they are
    # kept. With resharding to pairs, the root is gathered again, too.
    gathers = {"kept": 9, "resharded to pairs": 18}.get(name, 15)
    assert calls == {"AllGather": gathers, "ReduceScatter": 9}, calls


@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
@pytest.mark.ranks(2, backend=None)
def test_what_is_rejected(world_size: int, debug: str) -> None:
    """Under DETAIL, torch wraps the backends."""
    dist.set_debug_level(getattr(dist.DebugLevel, debug))
    init_process_group()
    with pytest.raises(ValueError, match="no module was passed to fully_shard"):
        fsdp.use(nn.Linear(2, 2))
    group = dist.new_group(backend="gloo")
    mesh = torch.distributed.device_mesh.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("gloo",))
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match="sharded over groups of gloo"):
        fsdp.use(model)
    fully_shard(symm := nn.Linear(4, 4), mesh=init_device_mesh("cpu", (world_size,)))
    fsdp.use(symm)
    # torch refuses to guess how the buffers of another class are allocated.
    with pytest.raises(AssertionError, match="custom"):
        symm.set_allocate_memory_from_process_group_for_comm(True)


@pytest.mark.ranks(2)
def test_memory_from_the_group_on_cpu_tensors(rank: int, world_size: int) -> None:
    """torch's switch asks the group's backend for memory, which the backend does not have for CPU tensors."""
    usual = train(new_model({}, world_size), rank)
    model = new_model({"set_allocate_memory_from_process_group_for_comm": True}, world_size)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert not backend.supports_tensor_alloc(torch.device("cpu"))
    assert all(map(torch.equal, usual, train(model, rank)))
    if hasattr(model, "set_symm_mem_for_comm"):
        model = new_model({"set_symm_mem_for_comm": "SYMM"}, world_size)
        with pytest.raises(RuntimeError, match="did not find backend for device type cpu"):
            train(model, rank)


def test_each_size_has_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """With doubles of torch's pools, which need a GPU."""
    used: list[object] = []

    @contextmanager
    def use_mem_pool(pool: object, device: int) -> Any:
        used.append(pool)
        yield

    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: object())
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "empty", lambda *size, dtype, device: (size, dtype, device))
    monkeypatch.setattr(fsdp, "mem_allocator", object)
    monkeypatch.setattr(fsdp, "load", lambda: SimpleNamespace(_supports_symm_mem=lambda index: index != 7))
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

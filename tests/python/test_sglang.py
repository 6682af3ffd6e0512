"""symm in SGLang: on stand-ins for its classes, and on SGLang's own classes where they can be imported.

SGLang's scheduler and kernels need a GPU; its ``GroupCoordinator`` and ``HookRegistry`` do not.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch_symm
from torch_symm.engines import _common, sglang
from vllm_doubles import put

STATE, HOOKS = sglang._CLASS.rpartition(".")[0], "sglang.srt.plugins.hook_registry"
needs_sglang = pytest.mark.skipif(not importlib.util.find_spec("sglang"), reason="SGLang is not installed")
BOTH = ["stand-in", pytest.param("real", marks=needs_sglang)]


def around(hook: Callable[..., Any], usual: Callable[..., Any]) -> Callable[..., Any]:
    return wraps(usual)(lambda *given, **named: hook(usual, *given, **named))


class Registry:
    """The part of ``HookRegistry`` that the plug-in uses."""

    hooks: ClassVar[dict[str, Callable[..., Any]]] = {}

    @classmethod
    def register(cls, target: str, hook: Callable[..., Any], hook_type: str) -> None:
        assert hook_type == "around"
        cls.hooks[target] = hook

    @classmethod
    def apply_hooks(cls) -> None:
        owner = sys.modules[STATE].GroupCoordinator
        for target, hook in cls.hooks.items():
            name = target.rpartition(".")[2]
            setattr(owner, name, around(hook, getattr(owner, name)))


class GroupCoordinator:
    """The attributes of the group, and the methods that the plug-in replaces, which record their calls here."""

    def __init__(
        self,
        group_ranks: list[list[int]],
        local_rank: int,
        torch_distributed_backend: str,
        use_pynccl: bool,
        use_mscclpp: bool,
        use_custom_allreduce: bool,
        use_torch_symm_mem_all_reduce: bool,
        use_hpu_communicator: bool,
        use_xpu_communicator: bool,
        use_message_queue_broadcaster: bool = False,
        group_name: str | None = None,
        gloo_timeout: timedelta = timedelta(hours=2),
        recovered_rank: bool = False,
        rank_offset: int = 0,
        max_world_size: int | None = None,
    ) -> None:
        self.unique_name = f"{group_name}:0"
        for ranks in group_ranks:
            group = dist.new_group(ranks, backend="gloo")
            if dist.get_rank() in ranks:
                self.ranks, self.world_size = ranks, len(ranks)
                self.rank_in_group = ranks.index(dist.get_rank())
                self.cpu_group = self.device_group = group

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(input_, group=self.device_group)
        return input_

    def _all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:
        dist.all_gather_into_tensor(output, input, group=self.device_group)

    def _reduce_scatter_tensor(self, output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        dist.reduce_scatter_tensor(output, input, group=self.device_group)
        return output

    def destroy(self) -> None:
        dist.destroy_process_group(self.cpu_group)
        self.cpu_group = self.device_group = None


def install(kind: str, monkeypatch: Any = None) -> Any:
    """Returns ``GroupCoordinator``'s class, with the hooks of the plug-in."""
    os.environ["SYMM_SGLANG"] = "1"
    if kind == "stand-in":
        Registry.hooks = {}
        own = type("GroupCoordinator", (GroupCoordinator,), dict(GroupCoordinator.__dict__))
        own.__qualname__ = "GroupCoordinator"
        put(STATE, SimpleNamespace(GroupCoordinator=own), monkeypatch)
        hook_type = SimpleNamespace(AROUND="around")
        put(HOOKS, SimpleNamespace(HookRegistry=Registry, HookType=hook_type), monkeypatch)
    else:
        # Makes SGLang run on the CPU; otherwise its constructor would create communicators on GPUs.
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    sglang.register()
    hooks = importlib.import_module(HOOKS)
    hooks.HookRegistry.apply_hooks()
    return importlib.import_module(STATE).GroupCoordinator


def coordinator(cls: Any, name: str, groups: list[list[int]] | None = None, **more: Any) -> Any:
    switches = ("pynccl", "mscclpp", "custom_allreduce", "torch_symm_mem_all_reduce", "hpu_communicator")
    return cls(
        group_ranks=groups or [list(range(dist.get_world_size()))],
        local_rank=dist.get_rank(),
        torch_distributed_backend="gloo",
        **{f"use_{switch}": False for switch in (*switches, "xpu_communicator")},
        group_name=name,
        **more,
    )


def calls(group: Any, world: int) -> list[int]:
    """Makes every call, checks the results, and returns how many of them symm served."""
    ours = getattr(group, sglang._GROUP)
    rank, counted = group.rank_in_group, []

    def sequence() -> int:
        return ours._get_backend(torch.device("cpu")).get_sequence_number() if ours else 0

    for dtype in (torch.bfloat16, torch.float32, torch.int64):
        before = sequence()
        values = torch.arange(12, dtype=dtype)
        assert torch.equal(group.all_reduce(values.clone()), values * world)
        output = torch.empty(2 * world, dtype=dtype)
        group._all_gather_into_tensor(output, torch.full((2,), rank, dtype=dtype))
        assert output.tolist() == [float(each) for each in range(world) for _ in range(2)]
        shard = torch.empty(3, dtype=dtype)
        group._reduce_scatter_tensor(shard, torch.arange(3 * world, dtype=dtype))
        assert shard.tolist() == [float(world * (3 * rank + i)) for i in range(3)]
        counted.append(sequence() - before)
    return counted


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.ranks([2, 4], backend="gloo")
def test_tensor_parallel_groups_are_served(world_size: int, kind: str) -> None:
    cls, lines = install(kind), list[str]()
    sglang.log.setLevel("INFO")
    sglang.log.addFilter(lambda record: lines.append(record.getMessage()) or False)
    tensor_parallel = coordinator(cls, "tp")
    ours = getattr(tensor_parallel, sglang._GROUP)._get_backend(torch.device("cpu"))
    assert isinstance(ours, torch_symm.ProcessGroupSymm)
    assert calls(tensor_parallel, world_size) == [3, 3, 1]  # it gathers all types and sums floating-point ones
    calls(tensor_parallel, world_size)
    said = "SGLang itself makes calls of group tp:0 with sums of type torch.int64"
    assert lines == [f"symm serves group tp:0 of {world_size} ranks"] * (dist.get_rank() == 0) + [said]
    assert getattr(coordinator(cls, "pp"), sglang._GROUP) is None
    pairs = coordinator(cls, "attention_tp", [[0, 1], [2, 3]]) if world_size == 4 else None
    assert pairs is None or calls(pairs, 2) == [3, 3, 1]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.ranks(2, backend="gloo")
def test_sglang_leaves_the_symm_group_when_it_destroys_its_own(kind: str) -> None:
    cls, known = install(kind), dist.distributed_c10d._world.pg_map
    before = len(known)
    for _ in range(3):
        group = coordinator(cls, "tp")
        assert calls(group, 2) == [3, 3, 1]
        group.destroy()
        assert len(known) == before and getattr(group, sglang._GROUP) is None


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.ranks(3, backend="gloo", env={"SGLANG_ENABLE_DETERMINISTIC_INFERENCE": "1"})
def test_deterministic_mode_keeps_symm_on(rank: int, kind: str) -> None:
    group = coordinator(install(kind), "tp")
    assert calls(group, 3) == [3, 3, 1]
    # A row has the same bits alone and among other rows, and is summed in rank order.
    torch.manual_seed(0)
    parts = torch.randn(3, 64, 32).to(torch.bfloat16)
    whole = group.all_reduce(parts[rank].clone())
    assert torch.equal(group.all_reduce(parts[rank, 5:6].clone()), whole[5:6])
    assert torch.equal(whole, (parts[0].float() + parts[1].float() + parts[2].float()).to(torch.bfloat16))


@pytest.mark.ranks(2, backend="gloo")
def test_groups_that_symm_does_not_serve_stay_with_sglang(rank: int) -> None:
    cls, lines = install("stand-in"), list[str]()
    sglang.log.addFilter(lambda record: lines.append(record.getMessage()) or False)

    def start(*given: Any, **named: Any) -> None:
        raise _common.Declined("no shared memory")

    sglang._common.start = start
    assert calls(coordinator(cls, "tp"), 2) == [0, 0, 0]
    for more in ({"recovered_rank": True}, {"rank_offset": 2}):
        assert calls(coordinator(cls, "tp", **more), 2) == [0, 0, 0]
    reasons = ["no shared memory"] * (rank == 0) + ["its ranks join at different times"] * 2
    assert lines == [f"symm does not serve group tp:0, SGLang does: {reason}" for reason in reasons]


def test_it_is_off_by_default_and_with_another_signature(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SYMM_SGLANG", "1")
    install("stand-in", monkeypatch)
    assert len(Registry.hooks) == 5
    Registry.hooks = {}
    monkeypatch.setenv("SYMM_SGLANG", "0")
    sglang.register()
    monkeypatch.setenv("SYMM_SGLANG", "1")
    monkeypatch.setattr(sys.modules[STATE].GroupCoordinator, "all_reduce", lambda self, tensor, op: tensor)
    sglang.register()
    assert "GroupCoordinator.all_reduce has the parameters (tensor, op), not (input_)" in caplog.text
    monkeypatch.delattr(sys.modules[STATE], "GroupCoordinator")
    sglang.register()
    assert "there is no class GroupCoordinator" in caplog.text and not Registry.hooks

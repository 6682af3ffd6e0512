"""symm in vLLM's CPU workers, on stand-ins for the classes of vLLM 0.25.0 that the plug-in changes."""

from __future__ import annotations

import os
import signal
import types
from typing import Any

import pytest
import torch
import torch._dynamo  # Here once, not in each rank, where it would take seconds.
import torch.distributed as dist
import torch_symm
from ranks import run_ranks
from torch_symm.engines import vllm as engine
from torch_symm.engines import vllm_cpu
from vllm_doubles import put


def module(shm: bool) -> Any:
    """vLLM's ``cpu_communicator``; ``shm`` is true if its build has shared memory for this processor."""
    made: Any = types.ModuleType(vllm_cpu._MODULE)

    class DeviceCommunicatorBase:
        destroyed = False

        def destroy(self) -> None:
            self.destroyed = True

    class CpuCommunicator(DeviceCommunicatorBase):
        def __init__(self, cpu_group: Any, device: Any = None, device_group: Any = None, unique_name: str = "") -> None:
            self.cpu_group, self.device_group, self.unique_name = cpu_group, device_group, unique_name
            self.ranks = dist.get_process_group_ranks(cpu_group)
            self.world_size, self.rank = len(self.ranks), dist.get_rank(cpu_group)
            self.rank_in_group = self.rank
            self.dist_module: Any = dist
            if shm and unique_name.startswith(("tp", "pp")):
                made._CPUSHMDistributed.make_group_name(self)
                self.dist_module = made._CPUSHMDistributed(self)
            self.supports_tensor_dict = isinstance(self.dist_module, made._CPUSHMDistributed)

    class _CPUSHMDistributed:
        def __init__(self, communicator: Any) -> None:
            self.calls: list[str] = []

        @staticmethod
        def make_group_name(communicator: Any) -> str:
            return f"name of {communicator.unique_name}"

        def all_reduce(self, input: torch.Tensor, group: Any = None) -> None:
            self.calls.append("all_reduce")

        def gather(self, input: torch.Tensor, gather_list: Any, dst: int = -1, group: Any = None) -> None:
            self.calls.append("gather")

        def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor, group: Any = None) -> None:
            self.calls.append("all_gather_into_tensor")

        def send_tensor_dict(self, tensor_dict: dict[str, Any], dst: int) -> None:
            self.calls.append("send_tensor_dict")

        def recv_tensor_dict(self, src: int) -> dict[str, Any]:
            self.calls.append("recv_tensor_dict")
            return {}

    made.CpuCommunicator, made._CPUSHMDistributed = CpuCommunicator, _CPUSHMDistributed
    return made


def install(shm: bool) -> Any:
    """Makes the stand-in importable, and registers the plug-in twice."""
    made = module(shm)
    put(vllm_cpu._MODULE, made)
    theirs = made._CPUSHMDistributed
    vllm_cpu.register()
    vllm_cpu.register()
    assert vllm_cpu._theirs is theirs
    return made


def test_vllms_entry_point_leads_here_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[bool] = []
    platforms: Any = types.ModuleType("vllm.platforms")
    platforms.current_platform = types.SimpleNamespace(is_cpu=lambda: True)
    put("vllm.platforms", platforms, monkeypatch)
    monkeypatch.setattr(vllm_cpu, "register", lambda: called.append(True))
    for setting, calls in (("0", 0), ("1", 1)):
        monkeypatch.setenv("SYMM_VLLM", setting)
        engine.register()
        assert len(called) == calls


def communicator(name: str, ranks: list[int] | None = None, *, shm: bool = True) -> Any:
    ranks = ranks or list(range(dist.get_world_size()))
    group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return install(shm).CpuCommunicator(group, torch.device("cpu"), device_group=group, unique_name=name)


@pytest.mark.parametrize("shm", [True, False])
@pytest.mark.ranks([2, 3], backend="gloo")
def test_it_serves_groups_with_and_without_shared_memory_of_vllm(rank: int, world_size: int, shm: bool) -> None:
    made = communicator("tp:0", shm=shm)
    served = made.dist_module
    assert isinstance(served, vllm_cpu.SymmDistributed) and served.served and made.supports_tensor_dict
    assert isinstance(served._group._get_backend(torch.device("cpu")), torch_symm.ProcessGroupSymm)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        whole = torch.arange(24, dtype=dtype).reshape(4, 6)
        for values in (whole.clone(), whole.t().clone().t(), torch.zeros(0, 6, dtype=dtype)):
            expected = values * world_size
            served.all_reduce(values, group=made.device_group)
            assert torch.equal(values, expected)
    own = torch.full((2, 3), float(rank))
    output = torch.empty(2 * world_size, 3)
    served.all_gather_into_tensor(output, own, group=made.device_group)
    assert torch.equal(output, torch.arange(world_size).repeat_interleave(2)[:, None].expand(-1, 3).float())
    parts = [torch.empty(2, 3) for _ in range(world_size)] if rank == 1 else None
    served.gather(own, parts, dst=1, group=made.device_group)
    assert parts is None or [part[0, 0].item() for part in parts] == list(range(world_size))

    @torch.compile(fullgraph=True, backend="eager")
    def traced(values: torch.Tensor) -> torch.Tensor:
        served.all_reduce(values, group=None)
        gathered = torch.empty(world_size * values.shape[0], values.shape[1])
        served.all_gather_into_tensor(gathered, values, group=None)
        return gathered

    assert torch.equal(traced(torch.ones(2, 3)), torch.full((2 * world_size, 3), float(world_size)))
    for kind in ("dp:0", "world"):
        assert not isinstance(communicator(kind, shm=shm).dist_module, vllm_cpu.SymmDistributed)


def dictionaries(rank: int, world: int) -> None:
    made = communicator("pp:0").dist_module
    sent: dict[str, torch.Tensor] = {
        "hidden_states": torch.linspace(-1, 1, 35).reshape(5, 7).to(torch.bfloat16).t(),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3),
        "flags": torch.tensor([True, False]),
    }
    many = {f"a longer name of tensor {i}": torch.full((1,), float(i)) for i in range(200)}
    for tensors in (sent, {}, many):
        if rank == 0:
            made.send_tensor_dict(tensors, 1)
            continue
        received = made.recv_tensor_dict(0)
        assert list(received) == list(tensors)
        for key, value in tensors.items():
            assert torch.equal(received[key], value) and received[key].dtype == value.dtype, key
    if rank == 0:
        with pytest.raises(RuntimeError, match="'number' is of type int"):
            made.send_tensor_dict({"number": 3}, 1)
    values = torch.ones(1000)
    made.all_reduce(values)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(torch_symm.SymmPeerError, match="rank 1"):
        made.all_reduce(values)


def test_it_sends_dictionaries_of_tensors_and_a_killed_worker_is_named() -> None:
    run_ranks(dictionaries, 2, backend="gloo", expect_killed=(1,))


@pytest.mark.ranks(4, backend="gloo")
def test_it_serves_groups_of_some_ranks(rank: int) -> None:
    mine = [0, 1] if rank < 2 else [2, 3]
    made = communicator(f"tp:{rank // 2}", mine).dist_module
    assert made.served
    values = torch.tensor([float(rank)])
    made.all_reduce(values)
    parts = [torch.empty(1) for _ in mine] if rank in (1, 3) else None
    made.gather(torch.tensor([float(rank)]), parts, dst=mine[1])
    assert parts is None or [part.item() for part in parts] == mine
    assert values.item() == (1.0 if rank < 2 else 5.0)


@pytest.mark.parametrize("shm", [True, False])
@pytest.mark.ranks(2, backend="gloo")
def test_vllm_leaves_the_symm_group_when_it_destroys_its_own(shm: bool) -> None:
    known = dist.distributed_c10d._world.pg_map
    made, before = install(shm), len(known)
    for _ in range(3):
        group = dist.new_group(backend="gloo")
        com = made.CpuCommunicator(group, torch.device("cpu"), device_group=group, unique_name="tp:0")
        com.dist_module.all_reduce(torch.ones(4))
        assert com.dist_module.served and len(known) == before + 2
        dist.destroy_process_group(group)  # vLLM destroys its groups before the communicator
        com.destroy()
        assert com.destroyed and not com.dist_module.served and len(known) == before
    other = made.CpuCommunicator(dist.group.WORLD, torch.device("cpu"), unique_name="dp:0")
    other.destroy()
    assert other.destroyed


@pytest.mark.parametrize("shm", [True, False])
@pytest.mark.ranks(2, backend="gloo")
def test_vllm_serves_a_group_that_symm_rejects_on_one_rank(rank: int, shm: bool) -> None:
    taken, lines = dist.new_group, []
    vllm_cpu.log.addFilter(lambda record: lines.append(record.getMessage()) or False)

    def new_group(*given: Any, backend: str = "", **named: Any) -> Any:
        if backend == "symm" and rank == 1:
            taken(*given, backend="gloo", **named)
            raise torch_symm.SymmConfigError("no shared memory")
        return taken(*given, backend="gloo" if backend == "symm" else backend, **named)

    dist.new_group = new_group
    made = communicator("tp:0", shm=shm)
    served = made.dist_module
    assert isinstance(served, vllm_cpu.SymmDistributed) and not served.served
    assert made.supports_tensor_dict is shm
    values = torch.ones(4)
    served.all_reduce(values, group=made.device_group)
    parts = [torch.empty(4) for _ in range(2)] if rank == 0 else None
    served.gather(values, parts, dst=0, group=made.device_group)
    served.all_gather_into_tensor(torch.empty(8), values, group=made.device_group)
    if shm:
        served.send_tensor_dict({}, 0)
        assert served.recv_tensor_dict(0) == {}
        calls = ["all_reduce", "gather", "all_gather_into_tensor", "send_tensor_dict", "recv_tensor_dict"]
        assert served._instead.calls == calls
    else:
        assert (values == 2).all()
    said = "group tp:0, vLLM does: rank 1: SymmConfigError: no shared memory"
    assert len(lines) == (rank == 0) and all(said in line for line in lines)


def test_another_signature_is_refused_and_nothing_is_changed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = module(shm=True)
    theirs, initialize = made._CPUSHMDistributed, made.CpuCommunicator.__init__
    put(vllm_cpu._MODULE, made, monkeypatch)
    monkeypatch.setattr(theirs, "gather", lambda self, input, dst: None)
    vllm_cpu.register()
    assert "symm is off" in caplog.text and "gather has the parameters (input, dst), not (input, gat" in caplog.text
    monkeypatch.delattr(theirs, "gather")
    vllm_cpu.register()
    assert "_CPUSHMDistributed has no method gather" in caplog.text
    assert made._CPUSHMDistributed is theirs and made.CpuCommunicator.__init__ is initialize

"""The sides of the GPU benchmark, with stand-ins: torch's symmetric memory, barriers, vLLM and FlashInfer."""

from __future__ import annotations

import importlib
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch_symm.tools.bench import cuda
from torch_symm.tools.bench.gpu import cell, contenders, engines, torch_calls
from torch_symm.tools.bench.gpu.calls import nccl_barrier
from torch_symm.tools.bench.gpu.contenders import GpuSide, GroupFailed, UnavailableError
from torch_symm.tools.bench.gpu.inputs import Inputs, Place, Setting
from torch_symm.tools.bench.gpu.norm import HIDDEN
from vllm_doubles import put

CPU = torch.device("cpu")
CUSTOM = "vllm.distributed.device_communicators.custom_all_reduce"
ROWS = 3


def test_barriers_do_not_block_the_host_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    stream = SimpleNamespace(synchronize=lambda: done.append("stream"))
    handle = SimpleNamespace(barrier=lambda channel: done.append(f"barrier {channel}"))
    work = SimpleNamespace(synchronize=lambda: done.append("work"), wait=lambda: done.append("wait"))

    def barrier(group: object, device_ids: list[int | None], async_op: bool = False) -> object:
        done.append(("barrier", async_op))
        return work if async_op else None

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(dist, "barrier", barrier)
    pads = torch_calls.signal_pad_barrier(handle)
    for build, capturing, expected in (
        (pads, False, ["barrier 0", "stream"]),
        (pads, True, ["barrier 0"]),
        (nccl_barrier, False, [("barrier", False)]),
        (nccl_barrier, True, [("barrier", True), "work"]),
    ):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        done.clear()
        build(Setting(0, Inputs(2, 8, torch.float32, CPU, seed=0), None, None, None)).run()
        assert done == expected


def test_a_torch_without_low_contention_forms_is_named() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops, "symm_mem", SimpleNamespace(_low_contention_all_gather=print))
        with pytest.raises(UnavailableError, match="has no _low_contention_reduce_scatter"):
            contenders._low_contention(None)
    importlib.import_module("torch.distributed._symmetric_memory")
    assert set(contenders._low_contention(None)) == {"all_gather", "reduce_scatter"}


@pytest.mark.parametrize("answer", ["TIMEOUT", "COMM_ERROR"])
def test_a_group_that_failed_silently_is_noticed(answer: str) -> None:
    error = "SUCCESS"
    backend = SimpleNamespace(get_error=lambda: f"ErrorType.{error}")
    side = GpuSide("x", SimpleNamespace(_get_backend=lambda _device: backend), Place(torch.empty(0), torch.empty(0)))
    side.sound(CPU)
    error = answer
    with pytest.raises(GroupFailed, match=answer):
        side.sound(CPU)


@pytest.mark.ranks(1)
def test_native_groups_answer_as_the_benchmark_reads_it() -> None:
    GpuSide("symm", dist.group.WORLD, Place(torch.empty(0), torch.empty(0))).sound(CPU)
    assert str(dist.group.WORLD._get_backend(CPU).get_error()).endswith("SUCCESS")


class CustomAllreduce:
    """A stand-in for vLLM's class, which reduces over the group that it is given."""

    disabled = False

    def __init__(self, group: dist.ProcessGroup, device: torch.device, max_size: int) -> None:
        self.group, self.max_size, self.captures = group, max_size, 0

    def custom_all_reduce(self, input: torch.Tensor) -> torch.Tensor | None:
        if input.numel() * input.itemsize >= self.max_size:
            return None
        output = input.clone()
        dist.all_reduce(output, group=self.group)
        return output

    @contextmanager
    def capture(self) -> Iterator[None]:
        self.captures += 1
        yield


class Disabled(CustomAllreduce):
    disabled = True


class Flashinfer(types.ModuleType):
    """FlashInfer's functions, which note how they were called."""

    AllReduceFusionPattern = SimpleNamespace(kAllReduce=0, kARResidualRMSNorm=1)

    def __init__(self) -> None:
        super().__init__("flashinfer.comm")
        self.made: list[dict[str, Any]] = []
        self.one_shot: set[bool | None] = set()

    def create_allreduce_fusion_workspace(self, **how: Any) -> dict[str, Any]:
        self.made.append(how)
        return how

    def allreduce_fusion(
        self,
        input: torch.Tensor,
        workspace: dict[str, Any],
        pattern: int,
        launch_with_pdl: bool,
        trigger_completion_at_end: bool,
        use_oneshot: bool | None,
        output: torch.Tensor | None = None,
        norm_out: torch.Tensor | None = None,
        residual_out: torch.Tensor | None = None,
        residual_in: torch.Tensor | None = None,
        rms_gamma: torch.Tensor | None = None,
        rms_eps: float = 0.0,
    ) -> None:
        assert workspace["dtype"] == input.dtype and input.shape[1] == HIDDEN and launch_with_pdl
        self.one_shot.add(use_oneshot)
        summed = input.clone()
        dist.all_reduce(summed, group=workspace["group"])
        if pattern == 0:
            output.copy_(summed)
        else:
            residual_out.copy_(summed + residual_in)
            norm_out.copy_(torch.nn.functional.rms_norm(residual_out, (HIDDEN,), rms_gamma, rms_eps))


def setting(side: GpuSide, dtype: torch.dtype = torch.float32) -> Setting:
    inputs = Inputs(dist.get_world_size(), ROWS * HIDDEN, dtype, CPU, seed=5)
    pristine = torch.empty(inputs.count, dtype=dtype)
    inputs.fill(pristine, dist.get_rank())
    return Setting(dist.get_rank(), inputs, pristine, side.group, side.place)


def checked(side: GpuSide, op: str, at: Setting) -> None:
    """Correct results pass; wrong values and a call that does nothing are detected."""
    call = side.builders[op](at)
    call.reset()
    call.run()
    assert call.check(1) is None
    call.reset()
    assert call.check(1) is not None
    call.run()
    assert call.check(2) is None


@pytest.mark.ranks(2, backend="gloo")
def test_low_contention_forms_are_called_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    waited, wrong = list[torch.Tensor](), 0.0

    def all_gather(source: torch.Tensor, name: str) -> torch.Tensor:
        assert name == dist.group.WORLD.group_name
        output = torch.empty(2 * source.numel())
        dist.all_gather_into_tensor(output, source)
        output[-1] += wrong
        return output

    def reduce_scatter(source: torch.Tensor, op: str, name: str) -> torch.Tensor:
        assert (op, name) == ("sum", dist.group.WORLD.group_name)
        output = torch.empty(source.numel() // 2)
        dist.reduce_scatter_tensor(output, source.clone())
        output[-1] += wrong
        return output

    monkeypatch.setattr(torch.ops._c10d_functional, "wait_tensor", lambda tensor: waited.append(tensor) or tensor)
    place = Place(*(torch.zeros(ROWS * HIDDEN * 4, dtype=torch.uint8) for _ in range(2)))
    for function in (all_gather, reduce_scatter):
        op = function.__name__
        monkeypatch.setattr(torch.ops.symm_mem, f"_low_contention_{op}", function, raising=False)
        side = GpuSide(op, dist.group.WORLD, place, builders={op: getattr(torch_calls, f"low_contention_{op}")})
        checked(side, op, setting(side))
        call, wrong = side.builders[op](setting(side)), 1.0
        call.reset()
        call.run()
        assert "1 elements wrong" in call.check(1)
        wrong = 0.0
    assert len(waited) == 6


@pytest.mark.ranks(2, backend="gloo")
def test_vllms_all_reduce_is_called_and_checked() -> None:
    module: Any = types.ModuleType(CUSTOM)
    module.CustomAllreduce = CustomAllreduce
    put(CUSTOM, module)
    size = ROWS * HIDDEN * 4
    side = engines.vllm(CPU, size)
    assert side.limit == size and side.builder("all_gather", 16) is None and not side.is_plain
    at = setting(side)
    checked(side, "all_reduce", at)
    with pytest.raises(NotImplementedError, match="int32"):
        side.builders["all_reduce"](replace(at, inputs=Inputs(2, at.inputs.count, torch.int32, CPU, seed=5)))
    (comm,) = side.keep
    assert isinstance(comm, CustomAllreduce)
    comm.max_size = 16
    with pytest.raises(NotImplementedError, match=f"does not take {size} bytes"):
        side.builders["all_reduce"](at).run()
    with side.capturing():
        assert comm.captures == 1
    module.CustomAllreduce = Disabled
    with pytest.raises(UnavailableError, match="disables itself"):
        engines.vllm(CPU, size)


@pytest.mark.ranks(2, backend="gloo")
def test_flashinfers_kernels_are_called_and_checked(rank: int) -> None:
    module = Flashinfer()
    put("flashinfer.comm", module)
    usual = engines.new_group
    engines.new_group = lambda backend, timeout: usual(backend="gloo", timeout=timeout)
    for name, one_shot in (("flashinfer", None), ("flashinfer one-shot", True)):
        module.one_shot.clear()
        side = engines.all_sides()[name](CPU, ROWS * HIDDEN * 4)
        for dtype in (torch.float32, torch.bfloat16):
            for op in ("all_reduce", "all_reduce_add_rms_norm"):
                checked(side, op, setting(side, dtype))
        assert module.one_shot == {one_shot}
    assert [how["dtype"] for how in module.made] == [torch.float32, torch.bfloat16] * 2
    assert {(how["rank"], how["world_size"], how["hidden_dim"]) for how in module.made} == {(rank, 2, HIDDEN)}
    odd = Inputs(2, HIDDEN + 8, torch.float32, CPU, seed=5)
    with pytest.raises(NotImplementedError, match="8200 elements are not rows of 8192"):
        side.builders["all_reduce"](Setting(rank, odd, torch.zeros(odd.count), side.group, side.place)).run()


@pytest.mark.parametrize(
    ("name", "module", "package"), [("vllm", CUSTOM, "vllm"), ("flashinfer", "flashinfer.comm", "flashinfer-python")]
)
def test_what_is_not_installed_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, name: str, module: str, package: str
) -> None:
    assert set(engines.all_sides()) >= set(cuda.AGAINST[name])
    make = engines.all_sides()[name]

    def missing(_: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    with monkeypatch.context() as patch:
        patch.setattr(engines, "import_module", missing)
        with pytest.raises(UnavailableError, match=f"^{package} is not installed$"):
            make(CPU, 1024)
    put(module, None, monkeypatch)
    with pytest.raises(UnavailableError, match=f"^{package} cannot be imported: .*{module}"):
        make(CPU, 1024)
    put(module, types.ModuleType(module), monkeypatch)
    with pytest.raises(UnavailableError, match=rf"^this version of {package} has no {module}\.\w+$"):
        make(CPU, 1024)


def test_graphs_are_captured_in_the_context_of_the_side() -> None:
    done: list[str] = []

    @contextmanager
    def capturing() -> Iterator[None]:
        done.append("begin")
        yield
        done.append("end")

    def capture(run: Any, calls: int) -> Any:
        done.append("capture")
        return SimpleNamespace(replay=lambda: done.append("replay"))

    bench: Any = cell.CellBench.__new__(cell.CellBench)
    bench._process = SimpleNamespace(
        sides={0: SimpleNamespace(capturing=capturing)},
        together=lambda number, body: body(),
        settle=lambda side: None,
        task=SimpleNamespace(checks=0),
    )
    bench._clock, bench._calls = SimpleNamespace(has_graphs=True, capture=capture), 20
    bench._captured(0, SimpleNamespace(run=None, reset=lambda: None))
    assert done == ["begin", "capture", "end", "replay"]

"""vLLM's and FlashInfer's all-reduces in the GPU benchmark, with stand-ins for both on CPU tensors."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch_symm.tools.bench import command, cuda
from torch_symm.tools.bench.gpu import cell, engines
from torch_symm.tools.bench.gpu.contenders import Side, UnavailableError
from torch_symm.tools.bench.gpu.inputs import Inputs, Setting
from torch_symm.tools.bench.gpu.norm import HIDDEN

CPU = torch.device("cpu")
CUSTOM = "vllm.distributed.device_communicators.custom_all_reduce"
ROWS = 3


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


def put(name: str, module: Any) -> None:
    """Makes an import of ``name`` return ``module``."""
    for end in range(1, len(name.split("."))):
        parent = ".".join(name.split(".")[:end])
        sys.modules[parent] = types.ModuleType(parent)
    sys.modules[name] = module


def setting(side: Side, dtype: torch.dtype = torch.float32) -> Setting:
    inputs = Inputs(dist.get_world_size(), ROWS * HIDDEN, dtype, CPU, seed=5)
    pristine = torch.empty(inputs.count, dtype=dtype)
    inputs.fill(pristine, dist.get_rank())
    return Setting(dist.get_rank(), inputs, pristine, side.group, side.place)


def checked(side: Side, op: str, at: Setting) -> None:
    """Correct results pass; wrong values and a call that does nothing are detected."""
    call = side.builders[op](at)
    call.reset()
    call.run()
    assert call.check(1) is None
    call.reset()
    assert call.check(1) is not None
    call.run()
    assert call.check(2) is None


def vllm_on_ranks(rank: int, world: int) -> None:
    module: Any = types.ModuleType(CUSTOM)
    module.CustomAllreduce = CustomAllreduce
    put(CUSTOM, module)
    size = ROWS * HIDDEN * 4
    side = engines.vllm(CPU, size)
    assert side.limit == size and side.builder("all_gather", 16) is None and not side.is_plain
    at = setting(side)
    checked(side, "all_reduce", at)
    with pytest.raises(NotImplementedError, match="int32"):
        side.builders["all_reduce"](setting_of(at, torch.int32))
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


def setting_of(at: Setting, dtype: torch.dtype) -> Setting:
    inputs = Inputs(at.world, at.inputs.count, dtype, CPU, seed=5)
    return Setting(at.rank, inputs, at.pristine, at.group, at.place)


def test_vllms_all_reduce_is_called_and_checked() -> None:
    run_ranks(vllm_on_ranks, 2, backend="gloo")


def flashinfer_on_ranks(rank: int, world: int) -> None:
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
    assert {(how["rank"], how["world_size"], how["hidden_dim"]) for how in module.made} == {(rank, world, HIDDEN)}
    odd = Inputs(world, HIDDEN + 8, torch.float32, CPU, seed=5)
    with pytest.raises(NotImplementedError, match="8200 elements are not rows of 8192"):
        side.builders["all_reduce"](Setting(rank, odd, torch.zeros(odd.count), side.group, side.place)).run()


def test_flashinfers_kernels_are_called_and_checked() -> None:
    run_ranks(flashinfer_on_ranks, 2, backend="gloo")


@pytest.mark.parametrize(
    ("name", "module", "package"), [("vllm", CUSTOM, "vllm"), ("flashinfer", "flashinfer.comm", "flashinfer-python")]
)
def test_what_is_not_installed_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, name: str, module: str, package: str
) -> None:
    make = engines.all_sides()[name]

    def missing(_: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    with monkeypatch.context() as patch:
        patch.setattr(engines, "import_module", missing)
        with pytest.raises(UnavailableError, match=f"^{package} is not installed$"):
            make(CPU, 1024)
    for end in range(1, module.count(".") + 1):
        parent = ".".join(module.split(".")[:end])
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UnavailableError, match=f"^{package} cannot be imported: .*{module}"):
        make(CPU, 1024)
    monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    with pytest.raises(UnavailableError, match=rf"^this version of {package} has no {module}\.\w+$"):
        make(CPU, 1024)


@pytest.mark.usefixtures("forked")
def test_they_are_selected_by_name_and_left_out_on_cpu_tensors(capfd: pytest.CaptureFixture[str]) -> None:
    assert set(engines.all_sides()) >= {*cuda.AGAINST["vllm"], *cuda.AGAINST["flashinfer"]}
    made = command.parser()
    given = ["all_reduce", "--device", "cpu", "-b", "8", "-n", "3", "--against", "vllm,flashinfer"]
    assert command.run(made, made.parse_args(given)) == 0
    printed = capfd.readouterr()
    for side in ("vllm", "flashinfer"):
        assert (printed.out + printed.err).count(f"{side}: serves CUDA tensors only") == 1, printed


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

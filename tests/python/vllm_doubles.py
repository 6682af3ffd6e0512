"""Duck types of the parts of vLLM that the plug-in uses, as a package ``vllm``, and its operators on CPU tensors.

``put`` also serves tests with stand-ins of other packages.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

EPS = 1e-5

PLATFORMS = """
class Platform:
    pass_key = "post_grad_custom_post_pass"
    def is_cuda(self):
        return True
    def is_cpu(self):
        return False
    @classmethod
    def get_device_communicator_cls(cls):
        return "vllm.distributed.device_communicators.cuda_communicator.CudaCommunicator"
    @classmethod
    def check_and_update_config(cls, vllm_config):
        vllm_config.updated += 1
class CudaPlatform(Platform):
    pass
current_platform = CudaPlatform()
"""

CONFIG = """
current = None
def get_current_vllm_config_or_none():
    return current
"""

COMMUNICATOR = """
import torch
import torch.distributed as dist
class CudaCommunicator:
    def __init__(self, cpu_group, device=None, device_group=None, unique_name="", global_ranks=None):
        self.cpu_group, self.device, self.device_group, self.unique_name = cpu_group, device, device_group, unique_name
        self.world_size, self.ranks = cpu_group.size(), dist.get_process_group_ranks(cpu_group)
        self.rank_in_group, self.served = cpu_group.rank(), []
    def all_reduce(self, input_):
        self.served.append("all_reduce")
        out = input_.clone()
        dist.all_reduce(out, group=self.device_group)
        return out
    def all_gather(self, input_, dim=-1):
        self.served.append("all_gather")
    def all_gatherv(self, input_, dim=0, sizes=None):
        self.served.append("all_gatherv")
    def reduce_scatter(self, input_, dim=-1):
        self.served.append("reduce_scatter")
    def reduce_scatterv(self, input_, dim=-1, sizes=None):
        self.served.append("reduce_scatterv")
    def destroy(self):
        self.served.append("destroy")
"""

PASSES = """
class InductorPass:
    def __call__(self, graph):
        raise NotImplementedError
    def uuid(self):
        return "theirs"
    def is_applicable_for_range(self, compile_range):
        return True
"""

FILES = {
    "platforms": PLATFORMS,
    "config": CONFIG,
    "distributed/device_communicators/cuda_communicator": COMMUNICATOR,
    "compilation/passes/inductor_pass": PASSES,
}


def put(name: str, module: Any, patch: Any = None) -> None:
    """Makes an import of ``name`` return ``module``, below empty parent packages; permanently if ``patch`` is None."""
    place: Any = patch.setitem if patch else dict.__setitem__
    parts = name.split(".")
    for end in range(1, len(parts)):
        parent = ".".join(parts[:end])
        place(sys.modules, parent, ModuleType(parent))
    place(sys.modules, name, module)


def write(folder: Path, **replaced: str) -> Path:
    """Writes the package into ``folder``. ``replaced``: new text for files by name."""
    for name, text in FILES.items():
        file = folder / "vllm" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(replaced.get(file.stem, text))
    for package in [folder / "vllm", *(path for path in (folder / "vllm").rglob("*") if path.is_dir())]:
        (package / "__init__.py").touch()
    return folder


def use(folder: Path) -> None:
    """Makes ``import vllm`` find the package in ``folder``."""
    sys.path.insert(0, str(folder))


@pytest.fixture
def vllm_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes the package into ``tmp_path``, where ``import vllm`` finds it."""
    monkeypatch.syspath_prepend(write(tmp_path))


def lines() -> list[str]:
    """A list to which each line that the plug-in logs is appended."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("vllm.plugins.symm")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    return found


def config(**changed: Any) -> Any:
    """vLLM's configuration for two tensor-parallel ranks, compiled."""
    compilation = SimpleNamespace(
        mode=3, inductor_compile_config={}, pass_config=SimpleNamespace(fuse_allreduce_rms=True)
    )
    compilation.__dict__.update(changed)
    parallel = SimpleNamespace(tensor_parallel_size=changed.get("ranks", 2))
    model = SimpleNamespace(dtype=torch.float16, is_moe=False, get_hidden_size=lambda: 64)
    return SimpleNamespace(compilation_config=compilation, parallel_config=parallel, model_config=model, updated=0)


def groups(sets: list[list[int]]) -> tuple[Any, Any]:
    """This rank's device group and CPU group of ``sets``, as vLLM makes them: every rank makes every group."""
    own: tuple[Any, Any] | None = None
    for ranks in sets:
        made = dist.new_group(ranks, backend="gloo"), dist.new_group(ranks, backend="gloo")
        if dist.get_rank() in ranks:
            own = made
    assert own is not None
    return own


def communicator(sets: list[list[int]], name: str = "tp:0", made: Any = None) -> Any:
    """This rank's communicator of ``sets``, over the groups ``made`` or new ones."""
    from torch_symm.engines.vllm._communicator import SymmCommunicator

    device_group, cpu_group = made or groups(sets)
    given = {"cpu_group": cpu_group, "device": torch.device("cpu"), "device_group": device_group}
    return SymmCommunicator(**given, unique_name=name)


_libraries: list[torch.library.Library] = []


def operators() -> None:
    """Defines vLLM's operators for CPU tensors; ``all_reduce`` sums over the default group."""
    for space in ("vllm", "vllm_ir", "_C"):
        _libraries.append(torch.library.Library(space, "FRAGMENT"))
    vllm, ir, c = _libraries[-3:]

    def all_reduce(tensor: torch.Tensor, group_name: str) -> torch.Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    def norm(x: Any, x_residual: Any, weight: Any, epsilon: float, variance_size: Any = None) -> Any:
        added = x + x_residual
        wide = added.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        return (wide * weight.float()).to(x.dtype), added

    def static(result: Any, input: Any, scale: Any, group_shape: Any = None) -> None:
        result.copy_((input.float() * scale.reciprocal()).clamp(-448, 448).to(torch.float8_e4m3fn))

    def dynamic(result: Any, input: Any, scale: Any, scale_ub: Any = None) -> None:
        scale.copy_((input.float().abs().amax(-1, keepdim=True) / 448).clamp(min=1 / (448 * 512)))
        result.copy_((input.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn))

    def norm_static(result: Any, input: Any, residual: Any, weight: Any, scale: Any, epsilon: float) -> None:
        normed, added = norm(input, residual, weight, epsilon)
        residual.copy_(added)
        static(result, normed, scale)

    def norm_dynamic(result: Any, input: Any, weight: Any, scale: Any, epsilon: float, ub: Any, residual: Any) -> None:
        normed, added = norm(input, residual, weight, epsilon)
        residual.copy_(added)
        dynamic(result, normed, scale)

    def define(library: torch.library.Library, name: str, schema: str, function: Any, fake: Any = None) -> None:
        library.define(f"{name}{schema}")
        library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{library.ns}::{name}", fake or (lambda *given, **named: None), lib=library)

    define(vllm, "all_reduce", "(Tensor tensor, str group_name) -> Tensor", all_reduce, lambda t, group_name: t.clone())
    schema = "(Tensor x, Tensor x_residual, Tensor? weight, float epsilon, int? variance_size=None) -> (Tensor, Tensor)"
    define(ir, "fused_add_rms_norm", schema, norm, norm)
    schema = "(Tensor! result, Tensor input, Tensor scale, int[]? group_shape=None) -> ()"
    define(c, "static_scaled_fp8_quant", schema, static)
    schema = "(Tensor! result, Tensor input, Tensor! scale, Tensor? scale_ub) -> ()"
    define(c, "dynamic_per_token_scaled_fp8_quant", schema, dynamic)
    schema = "(Tensor! result, Tensor input, Tensor! residual, Tensor weight, Tensor scale, float epsilon) -> ()"
    define(c, "fused_add_rms_norm_static_fp8_quant", schema, norm_static)
    schema = (
        "(Tensor! result, Tensor input, Tensor weight, Tensor! scale, float epsilon, Tensor? scale_ub,"
        " Tensor!? residual) -> ()"
    )
    define(c, "rms_norm_dynamic_per_token_quant", schema, norm_dynamic)

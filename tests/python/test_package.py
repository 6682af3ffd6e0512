"""What is shipped: the extension's symbols, libraries and strings; the wheel; how torch finds the backend.

The wheel is built once per session, in seconds where cargo has built the extension that is tested.
Each question about registration gets a process of its own, since torch registers a backend once per process.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch_symm._autoload import devices

ROOT = Path(__file__).resolve().parents[2]
needs_readelf = pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf (binutils) is not installed")


def python(code: str, **environment: str) -> str:
    """Runs `code` in a fresh interpreter; returns what it printed."""
    full = {**os.environ, **environment}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=full, cwd="/", check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.strip()


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the sources. Only cargo, which knows what changed, takes up what was built before."""
    folder = tmp_path_factory.mktemp("wheel")
    places = folder / "places.cfg"
    places.write_text(f"[build]\nbuild_base = {folder}/build\n[egg_info]\negg_base = {folder}\n")
    out = folder / "out"
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-build-isolation"]
    command += ["--no-deps", f"--wheel-dir={out}", str(ROOT)]
    path = os.environ["PATH"] + os.pathsep + str(Path.home() / ".cargo" / "bin")
    environment = {**os.environ, "DIST_EXTRA_CONFIG": str(places), "PATH": path}
    result = subprocess.run(command, capture_output=True, text=True, timeout=1200, env=environment, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def extension(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The extension out of the wheel."""
    folder = tmp_path_factory.mktemp("content")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".so"))
        return Path(archive.extract(name, folder))


def test_wheel_is_small_and_complete(wheel: Path) -> None:
    assert wheel.stat().st_size < 5_000_000
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (points,) = (archive.read(name).decode() for name in names if name.endswith("entry_points.txt"))
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith("METADATA"))
    assert {"torch_symm/__init__.py", "torch_symm/_autoload.py", "torch_symm/_C.pyi", "torch_symm/py.typed"} <= names
    assert sum(name.endswith(".so") for name in names) == 1
    assert not any(name.startswith(("tests", "examples", "src")) for name in names)
    assert re.sub(r"\s", "", points) == (
        "[torch.backends]symm=torch_symm._autoload:autoload"
        "[torch.distributed.backends]symm=torch_symm._autoload:autoload"
    )
    minor = ".".join(torch.__version__.split(".")[:2])
    assert f"Requires-Dist: torch=={minor}.*" in metadata


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm (binutils) is not installed")
def test_extension_exports_its_initialiser_and_the_allocator_only(extension: Path) -> None:
    command = ["nm", "-D", "--defined-only", str(extension)]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [line.split()[-1] for line in symbols.splitlines()] == ["PyInit__C", "symm_alloc", "symm_free"]


@needs_readelf
def test_extension_needs_no_driver_and_looks_in_torch_only(extension: Path) -> None:
    dynamic = subprocess.run(["readelf", "-dW", extension], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic))
    assert {"libtorch_python.so", "libtorch_cpu.so", "libc10.so"} <= needed
    assert not [name for name in needed if "cuda" in name or "nvidia" in name or "nccl" in name]
    assert re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", dynamic) == ["$ORIGIN/../torch/lib"]


def test_extension_names_no_build_path(extension: Path, wheel: Path) -> None:
    content = extension.read_bytes()
    torch_home = Path(torch.__file__).parent
    places = [ROOT, extension.parents[1], wheel.parent.parent, Path.home(), sys.prefix, sys.base_prefix, torch_home]
    variables = ("CARGO_HOME", "RUSTUP_HOME", "CARGO_TARGET_DIR", "VIRTUAL_ENV", "TMPDIR")
    for place in {str(place) for place in [*places, *map(os.environ.get, variables)] if place} - {"/", "/usr"}:
        assert place.encode() not in content, place
    # Paths of source files are relative, or the names that rustc gives to its library and what that was built from.
    absolute = re.findall(rb"(?<![\w.$-])/(?:[\w.+-]+/)+[\w.+-]+\.(?:rs|cpp|cc|hpp|h|py)\b", content)
    assert not [path for path in absolute if not path.startswith((b"/rustc/", b"/rust/deps/"))]


def test_wheel_imports_without_a_gpu(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = """
import sys
import torch_symm
assert torch_symm.Options.__module__ == "torch_symm._C"
print(sys.modules["torch_symm._C"].__file__)
maps = open("/proc/self/maps").read()
assert "libcuda.so" not in maps and "libnvidia-ml" not in maps
"""
    file = python(code, PYTHONPATH=str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert file.startswith(str(tmp_path))


def test_torch_alone_registers_and_loads_nothing_native() -> None:
    code = """
import sys, torch, torch.distributed as dist
assert "symm" in dist.Backend.backend_list
from torch_symm._autoload import devices
assert dist.Backend.backend_capability["symm"] == devices()
assert "torch_symm._C" not in sys.modules and "torch_symm._native" not in sys.modules
"""
    python(code)


def test_package_may_be_imported_first() -> None:
    code = """
import torch_symm, torch.distributed as dist
assert "symm" in dist.Backend.backend_list
torch_symm.Options()
"""
    python(code)


def test_without_autoload_the_import_registers() -> None:
    code = """
import torch, torch.distributed as dist
assert "symm" not in dist.Backend.backend_list
import torch_symm
assert "symm" in dist.Backend.backend_list
"""
    python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


def test_autoload_takes_less_than_a_millisecond() -> None:
    code = """
import time, torch, torch.distributed as dist
from torch_symm._autoload import autoload
best = float("inf")
for _ in range(10):
    dist.Backend.backend_list.remove("symm")
    dist.Backend._plugins.pop("SYMM")
    start = time.perf_counter()
    autoload()
    best = min(best, time.perf_counter() - start)
    assert "symm" in dist.Backend.backend_list
print(best)
"""
    assert float(python(code)) < 1e-3


def test_autoload_registers_once() -> None:
    code = """
import torch.distributed as dist
from torch_symm._autoload import autoload
plugin = dist.Backend._plugins["SYMM"]
autoload()
autoload()
assert dist.Backend._plugins["SYMM"] is plugin and dist.Backend.backend_list.count("symm") == 1
"""
    python(code)


def test_autoload_warns_and_never_raises() -> None:
    code = """
import warnings, torch.distributed as dist
from torch_symm._autoload import autoload
def refuse(*args, **kwargs): raise RuntimeError("no more backends")
dist.Backend.backend_list.remove("symm")
dist.Backend.register_backend = refuse
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    autoload()
assert "symm" not in dist.Backend.backend_list
assert "no more backends" in str(caught[0].message), caught
with warnings.catch_warnings():
    warnings.simplefilter("error")
    autoload()
"""
    python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


def test_another_torch_gives_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_symm._native import load

    monkeypatch.setattr(torch, "__version__", "2.99.1+cu999")
    with pytest.raises(ImportError) as caught:
        load()
    sentence = str(caught.value)
    assert "2.99.1" in sentence and ".".join(torch.version.__version__.split(".")[:2]) in sentence
    assert "\n" not in sentence


def test_without_a_native_part_one_sentence_says_how_to_build_it(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "python" / "torch_symm", tmp_path / "torch_symm", ignore=shutil.ignore_patterns("*.so"))
    code = """
import torch_symm
try:
    torch_symm.Options
except ImportError as error:
    print(error)
"""
    sentence = python(code, PYTHONPATH=str(tmp_path))
    assert "no native part for Python" in sentence and str(tmp_path) in sentence and "pip install" in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("toolkit", "drivers", "visible", "expected"),
    [
        ("13.0", ["/dev/nvidiactl"], None, ["cpu", "cuda"]),
        ("13.0", ["/dev/dxg"], "1", ["cpu", "cuda"]),
        ("13.0", ["/dev/nvidiactl"], "", ["cpu"]),
        ("13.0", ["/dev/nvidiactl"], "-1", ["cpu"]),
        ("13.0", [], None, ["cpu"]),
        (None, ["/dev/nvidiactl"], None, ["cpu"]),
    ],
)
def test_cuda_is_served_where_a_gpu_can_be_had(
    toolkit: str | None, drivers: list[str], visible: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", toolkit)
    monkeypatch.setattr(os.path, "exists", drivers.__contains__)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices() == expected


def test_the_kernels_compiler_is_found_in_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_symm._native import nvrtc_folders

    old, new = tmp_path / "a/nvidia/cuda_nvrtc/lib", tmp_path / "b/nvidia/cu13/lib"
    for folder, library in ((old, "libnvrtc.so.12"), (new, "libnvrtc.so.13")):
        folder.mkdir(parents=True)
        (folder / library).touch()
        (folder / "libnvrtc-builtins.so.1").touch()
    (tmp_path / "a/nvidia/cudnn/lib").mkdir(parents=True)
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "a"), str(tmp_path / "b")])
    assert nvrtc_folders("13.0") == [new, old]
    assert nvrtc_folders("12.8") == nvrtc_folders(None) == [old, new]
    monkeypatch.setattr(sys, "path", [])
    assert nvrtc_folders("13.0") == []


@pytest.mark.parametrize(
    ("spelling", "cpu", "cuda"),
    [
        ("symm", "symm", "symm" if "cuda" in devices() else None),
        ("cpu:symm", "symm", None),
        ("cpu:symm,cuda:nccl", "symm", "nccl"),
        ("cpu:gloo,cuda:symm", "gloo", "symm"),
        ("cpu:symm,cuda:symm", "symm", "symm"),
    ],
)
def test_spellings_are_understood(spelling: str, cpu: str, cuda: str | None) -> None:
    code = f"""
from torch.distributed.distributed_c10d import BackendConfig, Backend
found = BackendConfig(Backend({spelling!r})).get_device_backend_map()
print(found.get("cpu"), found.get("cuda"))
"""
    assert python(code) == f"{cpu} {cuda}"


@pytest.mark.parametrize("spelling", ["symm", "cpu:symm", "cpu:gloo,cuda:symm", "cpu:symm,cuda:symm"])
def test_spellings_work_on_cpu(spelling: str, tmp_path: Path) -> None:
    code = f"""
import torch, torch.distributed as dist
dist.init_process_group({spelling!r}, init_method="file://{tmp_path}/store", rank=0, world_size=1)
value = torch.arange(3.0)
dist.all_reduce(value)
assert value.tolist() == [0, 1, 2]
dist.destroy_process_group()
"""
    python(code)

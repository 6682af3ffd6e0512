"""The shipped files: symbols, libraries and strings of the native part; the wheel; how torch finds the backend.

The wheel is built once per session, in seconds if the native part under test has already been built. Each question
about registration gets a separate process, since torch registers a backend once per process.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch_symm import _autoload
from torch_symm._autoload import devices
from torch_symm._native import load, nvrtc_folders
from torch_symm._version import TORCH_VERSIONS

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "torch_symm"


def python(code: str, **environment: str) -> str:
    """Runs `code` in a fresh interpreter, which may print no errors or warnings; returns what it printed."""
    full = {**os.environ, **environment}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=full, cwd="/", check=False)
    assert (result.returncode, result.stderr) == (0, ""), result.stdout + result.stderr
    return result.stdout.strip()


def test_a_silent_command_is_heard_of_until_it_ends(tmp_path: Path) -> None:
    """The command ends after two lines, so the test passes on slow machines, too."""
    code = "import runpy, sys; progress = runpy.run_path(sys.argv[1])\n"
    code += "with progress['running']('compiling', 0.05): sys.stdin.read()"
    command = [sys.executable, "-c", code, str(ROOT / "packaging" / "progress.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and process.stdin is not None
        said = [process.stderr.readline() for _ in range(3)]
        process.stdin.close()
        said += process.stderr.readlines()
    assert said[0] == "torch-symm: compiling …\n"
    assert all(re.fullmatch(r"torch-symm: compiling: \d+ s so far\n", line) for line in said[1:3])
    assert said[-1].startswith("torch-symm: compiling took ")
    command = [sys.executable, str(ROOT / "packaging" / "progress.py"), "one", sys.executable, "-c", "exit(3)"]
    assert subprocess.run(command, check=False).returncode == 3


@pytest.mark.parametrize(("cores", "ranks"), [(1, 2), (2, 2), (3, 3), (64, 4)])
def test_the_demo_has_as_many_ranks_as_cores(cores: int, ranks: int, tmp_path: Path) -> None:
    (tmp_path / "nproc").write_text(f"#!/bin/sh\necho {cores}\n")
    (tmp_path / "nproc").chmod(0o700)
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    said = subprocess.run(["make", "-n", "demo"], capture_output=True, text=True, cwd=ROOT, env=env, check=True)
    assert f"--nproc-per-node {ranks} examples/01_ddp_digits.py" in said.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the sources. Only cargo, which knows the changes, reuses earlier builds."""
    folder = tmp_path_factory.mktemp("wheel")
    places = folder / "places.cfg"
    places.write_text(f"[build]\nbuild_base = {folder}/build\n[egg_info]\negg_base = {folder}\n")
    out = folder / "out"
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-build-isolation"]
    command += ["--no-deps", f"--wheel-dir={out}", str(ROOT)]
    path = os.environ["PATH"] + os.pathsep + str(Path.home() / ".cargo" / "bin")
    environment = {**os.environ, "DIST_EXTRA_CONFIG": str(places), "PATH": path, "TORCH_SYMM_PROFILE": "development"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=1200, env=environment, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def content(wheel: Path) -> Path:
    """The content of the wheel."""
    shutil.unpack_archive(wheel, wheel.parent / "content", "zip")
    return wheel.parent / "content" / "torch_symm"


@pytest.fixture(scope="session")
def extension(content: Path) -> Path:
    """The extension for this torch."""
    (file,) = content.glob("_C_torch*.so")
    return file


def test_wheel_is_small_and_complete(wheel: Path) -> None:
    assert wheel.stat().st_size < 5_000_000
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (points,) = (archive.read(name).decode() for name in names if name.endswith("entry_points.txt"))
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith("METADATA"))
    minor = "_".join(torch.__version__.split(".")[:2])
    extension = f"torch_symm/_C_torch{minor}{EXTENSION_SUFFIXES[0]}"
    shipped = [file for kind in ("py", "pyi", "typed", "json") for file in (ROOT / "python").rglob(f"*.{kind}")]
    assert {str(file.relative_to(ROOT / "python")) for file in shipped} <= names
    assert {name for name in names if name.endswith(".so")} == {extension, "torch_symm/libtorch_symm.so"}
    assert not any(name.startswith(("tests", "examples", "src")) for name in names)
    assert re.sub(r"\s", "", points) == (
        "[console_scripts]torch-symm=torch_symm_command:main"
        "[pytest11]torch_symm=torch_symm_pytest"
        "[sglang.srt.plugins]symm=torch_symm.engines.sglang:register"
        "[torch.backends]symm=torch_symm._autoload:autoload"
        "[torch.distributed.backends]symm=torch_symm._autoload:autoload"
        "[vllm.general_plugins]symm=torch_symm.engines.vllm:register"
    )
    oldest, newest = TORCH_VERSIONS[0], TORCH_VERSIONS[-1].split(".")
    assert f"Requires-Dist: torch<{newest[0]}.{int(newest[1]) + 1},>={oldest}" in metadata


def exported(library: Path) -> list[str]:
    command = ["nm", "-D", "-C", "--defined-only", str(library)]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [line.split(maxsplit=2)[2] for line in symbols.splitlines()]


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm (binutils) is not installed")
def test_libraries_export_the_initialiser_the_bridge_and_the_allocator_only(extension: Path) -> None:
    assert exported(extension) == ["PyInit__C"]
    names = exported(extension.parent / "libtorch_symm.so")
    assert {"symm_alloc@@TORCH_SYMM_1", "symm_free@@TORCH_SYMM_1"} <= set(names)
    own = r"(symm_alloc|symm_free|TORCH_SYMM_1|.*\bsymm::.*|.*rust::cxxbridge1::.*|(symm\$)?cxxbridge1\$.*)"
    assert not [name for name in names if not re.fullmatch(own + r"(@@TORCH_SYMM_1)?", name)]
    assert not [name for name in names if name != "TORCH_SYMM_1" and not name.endswith("@@TORCH_SYMM_1")]


@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf (binutils) is not installed")
def test_libraries_need_no_driver_and_look_beside_themselves_and_in_torch_only(extension: Path) -> None:
    needed, paths = dynamic(extension)
    assert {"libtorch_symm.so", "libtorch_python.so", "libtorch_cpu.so", "libc10.so"} <= needed
    assert paths == ["$ORIGIN:$ORIGIN/../torch/lib"]
    core, core_paths = dynamic(extension.parent / "libtorch_symm.so")
    assert not [name for name in needed | core if "cuda" in name or "nvidia" in name or "nccl" in name]
    assert not [name for name in core if "torch" in name or "c10" in name or "python" in name] and core_paths == []


def dynamic(library: Path) -> tuple[set[str], list[str]]:
    """The libraries that a library needs, and the paths where it searches for them."""
    text = subprocess.run(["readelf", "-dW", library], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", text))
    return needed, re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", text)


def test_libraries_name_no_build_path(extension: Path, wheel: Path) -> None:
    content = extension.read_bytes() + (extension.parent / "libtorch_symm.so").read_bytes()
    torch_home = Path(torch.__file__).parent
    places = [ROOT, extension.parents[1], wheel.parent.parent, Path.home(), sys.prefix, sys.base_prefix, torch_home]
    variables = ("CARGO_HOME", "RUSTUP_HOME", "CARGO_TARGET_DIR", "VIRTUAL_ENV", "TMPDIR")
    for place in {str(place) for place in [*places, *map(os.environ.get, variables)] if place} - {"/", "/usr"}:
        assert place.encode() not in content, place
    # Paths of source files are relative, or they are rustc's names for the paths of its libraries.
    absolute = re.findall(rb"(?<![\w.$-])/(?:[\w.+-]+/)+[\w.+-]+\.(?:rs|cpp|cc|hpp|h|py)\b", content)
    assert not [path for path in absolute if not path.startswith((b"/rustc/", b"/rust/deps/"))]


def test_wheel_imports_without_a_gpu_and_without_autoload(content: Path) -> None:
    code = """
import sys, torch, torch.distributed as dist
assert "symm" not in dist.Backend.backend_list
import torch_symm
assert "symm" in dist.Backend.backend_list
assert torch_symm.Options.__module__ == "torch_symm._C"
print(sys.modules["torch_symm._C"].__file__)
maps = open("/proc/self/maps").read()
assert "libcuda.so" not in maps and "libnvidia-ml" not in maps
"""
    file = python(code, PYTHONPATH=str(content.parent), CUDA_VISIBLE_DEVICES="", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert file.startswith(str(content))


def test_torch_alone_registers_and_loads_nothing_native() -> None:
    python(
        """
import sys, torch, torch.distributed as dist
assert "symm" in dist.Backend.backend_list
from torch_symm._autoload import devices
assert dist.Backend.backend_capability["symm"] == devices()
assert dist.is_backend_available("symm") and dist.Backend.SYMM == "symm"
from torch.distributed.rendezvous import _rendezvous_handlers
assert {"symm", "symm+file"} <= _rendezvous_handlers.keys()
# A string for ``devices`` would register 'c', 'p' and 'u'.
assert all(len(device) > 1 for device in dist.Backend.default_device_backend_map)
ours = {name for name in sys.modules if name.partition(".")[0] == "torch_symm"}
assert ours - {"torch_symm._torch_compat"} == {"torch_symm", "torch_symm._autoload"}, ours
assert torch.__version__ < "2.15" or "torch_symm._torch_compat" not in ours, ours
import torch.distributed.tensor._collective_utils as costs
before = costs.redistribute_cost, costs.MeshTopoInfo
import torch_symm.dtensor
assert before == (costs.redistribute_cost, costs.MeshTopoInfo), "torch is untouched without enable_cost_model()"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert type(dist.group.WORLD._get_backend(torch.device("cpu"))) is dist.ProcessGroupGloo
""",
        SYMM_REPLACE_GLOO="0",
    )


def unregister() -> None:
    dist.Backend.backend_list.remove("symm")
    dist.Backend._plugins.pop("SYMM")


def registered(rank: int, world: int) -> float:
    plugin = dist.Backend._plugins["SYMM"]
    for _ in range(2):
        _autoload.autoload()
        assert dist.Backend._plugins["SYMM"] is plugin and dist.Backend.backend_list.count("symm") == 1
    register, refusal = dist.Backend.register_backend, RuntimeError("no more backends")
    unregister()
    dist.Backend.register_backend = Mock(side_effect=refusal)
    _autoload.autoload()
    assert "symm" not in dist.Backend.backend_list and _autoload.failure == "RuntimeError: no more backends"
    dist.Backend.register_backend = register
    _autoload.autoload()
    assert "symm" in dist.Backend.backend_list and _autoload.failure is None
    best = float("inf")
    for _ in range(10):
        unregister()
        start = time.perf_counter()
        _autoload.autoload()
        best = min(best, time.perf_counter() - start)
        assert "symm" in dist.Backend.backend_list
    return best


@pytest.mark.timed
def test_autoload_registers_once_in_less_than_a_millisecond_and_keeps_the_reason_if_it_cannot() -> None:
    results = run_ranks(registered, 1, backend=None)
    assert results[0] < 1e-3 and results.logs == [""]


def test_torch_is_imported_in_silence_whatever_is_broken(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "torch_symm", ignore=shutil.ignore_patterns("__pycache__"))
    code = f"""
import importlib, sys, time, warnings
from importlib.metadata import EntryPoint
from pathlib import Path
import torch
import torch.distributed as dist
warnings.simplefilter("error")
sys.dont_write_bytecode = True
package = Path({str(tmp_path)!r}) / "torch_symm"
tried = 0

def try_it():
    # torch's handling of the entry point when torch is imported.
    global tried
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch_symm"]:
        del sys.modules[name]
    importlib.invalidate_caches()
    if "symm" in dist.Backend.backend_list:
        dist.Backend.backend_list.remove("symm")
        dist.Backend._plugins.pop("SYMM")
    EntryPoint("symm", "torch_symm._autoload:autoload", "torch.backends").load()()
    assert Path(sys.modules["torch_symm"].__file__).parent == package
    assert "symm" in dist.Backend.backend_list
    tried += 1

# Does not count the two names in the entry point itself, without which the package does not exist.
named = (package / "__init__.py", package / "_autoload.py")
for file in [path for path in package.rglob("*") if path.suffix in (".py", ".so") and path not in named]:
    away = file.rename(file.with_name("away"))
    try_it()
    file.write_text("(broken")
    try_it()
    away.rename(file)
package.chmod(0o555)
try_it()
package.chmod(0o755)
time.time = time.monotonic = time.perf_counter = lambda: 0.0
try_it()
assert tried > 100, tried
"""
    assert python(code, PYTHONPATH=str(tmp_path), TORCH_DEVICE_BACKEND_AUTOLOAD="0") == ""


def test_another_torch_gives_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.1+cu999")
    with pytest.raises(ImportError) as caught:
        load()
    sentence = str(caught.value)
    assert "2.99.1" in sentence and ".".join(torch.version.__version__.split(".")[:2]) in sentence
    assert "\n" not in sentence


def test_without_a_native_part_one_sentence_says_how_to_build_it(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "torch_symm", ignore=shutil.ignore_patterns("*.so"))
    code = "import torch_symm\ntry: torch_symm.Options\nexcept ImportError as error: print(error)"
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

"""Builds the native part: Rust by cargo, then libtorch_symm.so and an extension for each torch by CMake.

Builds for the installed torch unless ``TORCH_SYMM_TORCHES`` names others, as ``2.11=FOLDER,2.12=FOLDER``, where
``FOLDER`` holds the headers of that version. ``TORCH_SYMM_PROFILE`` is cargo's profile. ``TORCH_SYMM_LIBRARIES`` has
the linker's flags for the standard libraries. packaging/wheels.py sets all three.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

import setuptools
from setuptools import Distribution, Extension, setup
from setuptools.command.build_ext import build_ext

if int(setuptools.__version__.partition(".")[0]) < 77:
    # Older versions fail on a key of pyproject.toml that they do not know.
    sys.exit(
        f"torch-symm cannot be built with setuptools {setuptools.__version__}: leave out --no-build-isolation, "
        "or first pip install 'setuptools>=77' cmake ninja"
    )

ROOT = Path(__file__).resolve().parent
TORCH_REQUIREMENT = runpy.run_path(str(ROOT / "python" / "torch_symm" / "_version.py"))["TORCH_REQUIREMENT"]
running = runpy.run_path(str(ROOT / "packaging" / "progress.py"))["running"]


def torch_at_hand() -> Path | None:
    """Returns the folder of the installed torch, even if pip hides it from an isolated build."""
    paths = [*sys.path, sysconfig.get_paths()["purelib"], *site.getsitepackages(), site.getusersitepackages()]
    found = (Path(path) / "torch" for path in paths)
    return next(
        (folder for folder in found if (folder / "version.py").exists() and (folder / "include").exists()), None
    )


def torches() -> dict[str, str]:
    """Folders of headers, by the minor version of torch that they belong to."""
    if given := os.environ.get("TORCH_SYMM_TORCHES"):
        return dict(pair.split("=", 1) for pair in given.split(","))
    folder = torch_at_hand()
    if folder is None:
        sys.exit(f"torch-symm needs an installed torch to be built for: pip install '{TORCH_REQUIREMENT}'")
    version = re.search(r"__version__ = '(\d+\.\d+)", (folder / "version.py").read_text())
    assert version, f"{folder}/version.py states no version"
    return {version[1]: str(folder / "include")}


def path_maps() -> dict[Path, str]:
    """Returns the names that replace this machine's directories in messages. The last prefix that matches is used."""
    home = Path.home()
    return {
        home: "home",
        Path(os.environ.get("CARGO_HOME", home / ".cargo")): "cargo",
        Path(os.environ.get("RUSTUP_HOME", home / ".rustup")): "rustup",
        ROOT: "torch-symm",
    }


def tool(name: str, remedy: str) -> str:
    """The path of a program that the build needs."""
    path = os.pathsep.join(
        [os.environ.get("PATH", ""), str(Path.home() / ".cargo" / "bin"), sysconfig.get_path("scripts")]
    )
    found = shutil.which(name, path=path)
    if found is None:
        sys.exit(f"torch-symm cannot be built: {name} is missing; {remedy}")
    return found


def cargo(profile: str, maps: list[str]) -> tuple[Path, Path]:
    """Compiles the core; returns its library and the folder of the bridge's headers."""
    command = [tool("cargo", "install Rust 1.89 or newer from https://rustup.rs"), "rustc", "--lib"]
    command += ["--crate-type=staticlib", "--features=bridge", f"--profile={profile}"]
    command += [f"--manifest-path={ROOT / 'Cargo.toml'}", "--message-format=json-render-diagnostics"]
    # cargo reads only the first of these variables that is set; the caller's flags are kept.
    encoded = os.environ.get("CARGO_ENCODED_RUSTFLAGS")
    flags = encoded.split("\x1f") if encoded else os.environ.get("RUSTFLAGS", "").split()
    flags += [f"--remap-path-prefix={place}={name}" for place, name in path_maps().items()]
    cxxflags = " ".join([os.environ.get("CXXFLAGS", ""), *maps]).strip()
    environment = {**os.environ, "CARGO_ENCODED_RUSTFLAGS": "\x1f".join(flags), "CXXFLAGS": cxxflags}
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    library, bridge = None, None
    for message in map(json.loads, output.splitlines()):
        if message["reason"] == "compiler-artifact" and message["target"]["name"] == "symm":
            library = next((Path(file) for file in message["filenames"] if file.endswith(".a")), library)
        elif message["reason"] == "build-script-executed" and re.search(r"[/#]symm[@#]", message["package_id"]):
            bridge = Path(message["out_dir"]) / "cxxbridge" / "include"
    assert library and bridge, "cargo named neither library nor headers"
    return library, bridge


class Build(build_ext):
    """Runs cargo and CMake in place of a compiler."""

    def run(self) -> None:
        """Puts the libraries into the package; into the sources for an editable install."""
        editable = self.inplace or self.editable_mode
        out = ROOT / "python" / "torch_symm" if editable else Path(self.build_lib).resolve() / "torch_symm"
        profile = os.environ.get("TORCH_SYMM_PROFILE", "development" if editable else "release")
        maps = [f"-ffile-prefix-map={place}={name}" for place, name in path_maps().items()]
        with running(f"compiling the Rust core ({profile})"):
            core, bridge = cargo(profile, maps)
        wanted = torches()
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
        folder = target / "cmake" / f"{profile}{suffix.removesuffix('.so')}-{'-'.join(wanted)}"
        settings = {
            "CMAKE_BUILD_TYPE": "None",
            "CMAKE_CXX_FLAGS": f"-O2 {os.environ.get('CXXFLAGS', '')}".strip(),
            "CMAKE_CXX_STANDARD_LIBRARIES": os.environ.get("TORCH_SYMM_LIBRARIES", "-ldl -lm -lpthread"),
            "SYMM_CORE": core,
            "SYMM_BRIDGE": bridge,
            "SYMM_TORCHES": ";".join(f"{version}={headers}" for version, headers in wanted.items()),
            "SYMM_PYTHON": sysconfig.get_paths()["include"],
            "SYMM_SUFFIX": suffix,
            "SYMM_OUT": out,
            "SYMM_MAPS": ";".join(maps),
        }
        cmake = tool("cmake", "pip install cmake ninja")
        command = [cmake, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja', 'pip install ninja')}"]
        command += [*(f"-D{name}={value}" for name, value in settings.items()), "-S", str(ROOT), "-B", str(folder)]
        with running(f"compiling the extension for torch {', '.join(wanted)}"):
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
            subprocess.run([cmake, "--build", str(folder)], stdout=sys.stderr, check=True)

    def get_outputs(self) -> list[str]:
        """Returns the files that were built; setuptools needs them to list the installed files."""
        return [str(file) for file in (Path(self.build_lib) / "torch_symm").glob("*.so")]

    def get_output_mapping(self) -> dict[str, str]:
        """Returns nothing, because an editable install finds the libraries next to the sources."""
        return {}


class Native(Distribution):
    """A package with a native part, which is not a list of sources."""

    def has_ext_modules(self) -> bool:
        """Returns true, which makes the wheel specific to this platform."""
        return True


setup(
    cmdclass={"build_ext": Build},
    distclass=Native,
    ext_modules=[Extension("torch_symm._C", [])],
    install_requires=[TORCH_REQUIREMENT],
    setup_requires=[] if os.environ.get("TORCH_SYMM_TORCHES") or torch_at_hand() else [TORCH_REQUIREMENT],
)

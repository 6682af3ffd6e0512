"""Compiles torch_backend/ against the headers of several versions of torch; `make headers` runs it.

Downloads one wheel per version (a small one: the headers do not depend on the platform), keeps only its headers under
target/headers, and prints one line per version. Fails if a version that could be had does not compile.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
KEPT = ROOT / "target" / "headers"
VERSIONS = ("2.10", "2.11", "2.12", "2.13", "2.14", "2.15")
# Wheels for macOS have no CUDA: about 100 MB instead of 800 MB.
PLATFORMS = ("macosx_11_0_arm64", "macosx_14_0_arm64")


def download(version: str) -> Path | None:
    """Returns the folder of the headers of torch `version`, or None if no wheel can be had."""
    include = KEPT / version / "torch" / "include"
    if include.exists():
        return include
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", "--python-version=3.11", f"--dest={folder}"]
        command += [f"--platform={platform}" for platform in PLATFORMS]
        result = subprocess.run([*command, f"torch=={version}.*"], capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if not wheels:
            if "No matching distribution" not in result.stderr:
                print(result.stderr.strip(), file=sys.stderr)
            return None
        with zipfile.ZipFile(wheels[0]) as wheel:
            names = [name for name in wheel.namelist() if name.startswith("torch/include/")]
            wheel.extractall(KEPT / f"{version}.partial", names)
    (KEPT / f"{version}.partial").rename(KEPT / version)
    return include


def bridge(given: str | None) -> Path:
    """Returns the folder of the headers that cxx wrote in the newest build."""
    found = [Path(given)] if given else list(TARGET.glob("*/build/symm-*/out/cxxbridge"))
    found = [path / "include" for path in found if (path / "include" / "rust" / "cxx.h").exists()]
    if not found:
        sys.exit("the headers that cxx generates are missing: run 'make build' first")
    return max(found, key=lambda path: (path / "symm" / "src" / "bridge.rs.h").stat().st_mtime)


def errors(source: Path, include: Path, generated: Path) -> list[str]:
    """Compiles one file as build.rs does, without making code; returns the error messages."""
    command = ["c++", "-std=c++20", "-fsyntax-only", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
    command += [f"-I{ROOT / 'cpp'}", f"-I{ROOT / 'torch_backend'}", f"-I{generated}"]
    for system in (include, include / "torch" / "csrc" / "api" / "include", sysconfig.get_paths()["include"]):
        command += ["-isystem", str(system)]
    result = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    found = [line for line in result.stderr.splitlines() if re.search(r"\b(fatal )?error: ", line)]
    return found or ([result.stderr.strip()] if result.returncode else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=VERSIONS, help=f"minor versions (default: {' '.join(VERSIONS)})")
    parser.add_argument("--bridge", help="the folder 'cxxbridge' of a build (default: the newest under target/)")
    parser.add_argument("--jobs", type=int, default=4, help="compilers that run at once")
    arguments = parser.parse_args()
    generated = bridge(arguments.bridge)
    sources = sorted((ROOT / "torch_backend").rglob("*.cpp"))
    bad = 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for version in arguments.versions:
            include = download(version)
            if include is None:
                print(f"torch {version}: not on the index", flush=True)
                continue
            jobs = [pool.submit(errors, source, include, generated) for source in sources]
            found = [message for job in jobs for message in job.result()]
            print(f"torch {version}: {f'{len(found)} errors' if found else 'ok'}", flush=True)
            print(*found, sep="\n", end="\n" if found else "", flush=True)
            bad += bool(found)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

"""Prints where the headers of each supported torch are, in the form of setup.py's ``TORCH_SYMM_TORCHES``.

Downloads one wheel per version, keeps its headers under target/headers, and drops the rest. The wheels are the ones for
macOS: they have no CUDA, so they take 140 MB instead of 800 MB, and the headers that torch_backend/ includes do not
differ (compared with the x86-64 wheel of torch 2.15.0: `ATen/Config.h` and the kernels of each platform do).
"""

from __future__ import annotations

import argparse
import runpy
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "target" / "headers"
PLATFORMS = ("macosx_11_0_arm64", "macosx_14_0_arm64")


def supported() -> list[str]:
    """Returns the minor versions that python/torch_symm/_version.py names."""
    return list(runpy.run_path(str(ROOT / "python" / "torch_symm" / "_version.py"))["TORCH_VERSIONS"])


def headers(version: str) -> Path:
    """Returns the directory of the headers of torch ``version``, such as ``"2.11"``."""
    folder = KEPT / version
    include = folder / "torch" / "include"
    if include.exists():
        return include
    print(f"torch-symm: downloading the headers of torch {version}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", "--python-version=3.11", f"--dest={scratch}", f"torch=={version}.*"]
        subprocess.run([*command, *(f"--platform={platform}" for platform in PLATFORMS)], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        partial = KEPT / f"{version}.partial"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(partial, [name for name in archive.namelist() if name.startswith("torch/include/")])
    partial.rename(folder)
    return include


def main() -> None:
    """Prints pairs of a version and the directory of its headers, as one setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", help="minor versions (default: all that are supported)")
    versions = parser.parse_args().versions or supported()
    print(",".join(f"{version}={headers(version)}" for version in versions))


if __name__ == "__main__":
    main()

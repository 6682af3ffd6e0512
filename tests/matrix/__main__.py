"""Installs the wheels of dist/ with each torch, in fresh environments without compilers, and tests them there.

``python tests/matrix`` tests every supported torch with one Python, and every Python that has a wheel with the newest
torch for it. Prints a table in Markdown; exits with 1 if anything failed. An environment takes 6 GB while it is tested,
and a download of 3 GB.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "target" / "matrix"
sys.path.insert(0, str(ROOT / "packaging"))

import torch_headers  # noqa: E402
import wheels  # noqa: E402

#: Packages needed to test an installed wheel.
TOOLS = ["pytest", "pytest-timeout", "expecttest", "numpy", "scikit-learn", "rich", "torchvision"]
#: Programs that a node without compilers does not have.
COMPILERS = re.compile(r"(.*-)?(c\+\+|g\+\+|gcc|cc|clang|clang\+\+|ld|as|rustc|cargo|cmake|ninja)(-[\d.]+)?")
#: Every collective, symmetric memory, stores and DTensor.
SMOKE = (
    *("test_collectives", "test_point_to_point", "test_groups", "test_work"),
    *("test_faults", "test_symm_mem_ops", "test_symm_mem_without_gpu", "test_symm_mem_fused"),
    *("test_stores", "test_store_objects", "test_dtensor_collectives", "test_dtensor_redistribute"),
)


def path_without_compilers(folder: Path) -> str:
    """A directory of links to the system's programs except compilers."""
    folder.mkdir(parents=True, exist_ok=True)
    for place in ("/usr/bin", "/bin"):
        for program in Path(place).iterdir():
            link = folder / program.name
            if not COMPILERS.fullmatch(program.name) and not link.is_symlink():
                link.symlink_to(program)
    return str(folder)


def environment(python: str, torch: str, wheel: Path) -> Path:
    """Makes a fresh environment with the wheel and a version of torch such as ``"2.15"``, or the newest if empty."""
    folder = WORK / f"{wheels.version_of(python)}-{torch or 'newest'}"
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, f"torch=={torch}.*" if torch else "torch", *TOOLS, str(wheel)], check=True)
    for name in ("tests", "examples"):
        shutil.copytree(ROOT / name, folder / "tried" / name)
    return folder


def run(folder: Path, command: list[str]) -> tuple[bool, str]:
    """Runs a program of the environment without compilers; returns whether it passed, and its last line."""
    dropped = ("PYTHON", "VIRTUAL_ENV", "CXX", "CC")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    path = os.pathsep.join([str(folder / "bin"), path_without_compilers(WORK / "programs")])
    result = subprocess.run(
        [str(folder / "bin" / command[0]), *command[1:]],
        cwd=folder / "tried",
        env={**kept, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    (folder / f"{Path(command[-1]).stem}.log").write_text(result.stdout)
    lines = result.stdout.strip().splitlines() or [""]
    if result.returncode:
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        print("\n".join(failed or lines[-20:]), flush=True)
    return result.returncode == 0, lines[-1]


def tried(folder: Path, complete: bool) -> list[tuple[bool, str]]:
    """Runs the example and the smoke suite; with ``complete`` torch's own tests, too."""
    example = run(folder, ["torchrun", "--standalone", "--nproc-per-node", "2", "examples/01_ddp_digits.py"])
    pytest = ["python", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    # Leaves out tests of compiled code, which need a compiler with any backend.
    smoke = run(folder, [*pytest, "-k", "not compiled", *(f"tests/python/{name}.py" for name in SMOKE)])
    upstream = [run(folder, [*pytest, "-m", "not everything", "tests/torch"])] if complete else []
    return [(example[0], "ok" if example[0] else "failed"), smoke, *upstream]


def main() -> int:
    """Tests all environments and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", help="minor versions of torch, as 2.11,2.15 (default: all that are supported)")
    parser.add_argument("--python", default="3.12", help="the Python for those (default: 3.12)")
    parser.add_argument("--pythons", action="store_true", help="only the other Pythons, with the newest torch")
    parser.add_argument("--keep", action="store_true", help="keep the environments under target/matrix")
    arguments = parser.parse_args()
    versions = arguments.torch.split(",") if arguments.torch else torch_headers.supported()
    found = {wheels.version_of(python): python for python in wheels.pythons()}
    jobs = [] if arguments.pythons else [(arguments.python, version, True) for version in reversed(versions)]
    if not arguments.torch:
        jobs += [(python, "", False) for python in found if python != arguments.python]
    tests = "example 01 | every collective, symmetric memory, stores, DTensor | torch's own tests"
    rows = [f"| Python | torch | {tests} | s |", "|---|---|---|---|---|---|"]
    bad = 0
    for python, version, complete in jobs:
        wheel = next((ROOT / "dist").glob(f"torch_symm-*-cp{python.replace('.', '')}-*.whl"), None)
        if python not in found or wheel is None:
            print(f"Python {python}: no {'wheel in dist/' if python in found else 'interpreter'}", flush=True)
            bad += 1
            continue
        start = time.monotonic()
        folder = environment(found[python], version, wheel)
        print_version = [str(folder / "bin/python"), "-c", "import torch; print(torch.__version__)"]
        exact = subprocess.run(print_version, capture_output=True, text=True, check=True).stdout
        results = tried(folder, complete)
        bad += sum(not good for good, _ in results)
        cells = [text.strip("= ") if good else f"**{text.strip('= ')}**" for good, text in results]
        cells += [""] * (3 - len(cells))
        rows.append(f"| {python} | {exact.strip()} | {' | '.join(cells)} | {time.monotonic() - start:.0f} |")
        print(rows[-1], flush=True)
        if not arguments.keep:
            shutil.rmtree(folder)
    print(f"\n{date.today()}\n\n" + "\n".join(rows))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

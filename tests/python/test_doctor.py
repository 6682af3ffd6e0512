"""``python -m torch_symm doctor``: its output, its exit status, and that it never shows a traceback."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_symm
from ranks import run_ranks
from sandbox import NUMBERS, deny, needs_seccomp
from torch_symm import _native
from torch_symm._version import TORCH_VERSIONS
from torch_symm.launch.messages import sentence
from torch_symm.launch.ranks import Ended, Program, run
from torch_symm.tools.doctor import calls, cgroup, command, devices, gpus, host, library, limits, smoke_test
from torch_symm.tools.doctor.probe_result import Probed, probe
from torch_symm.tools.doctor.report import Problem, Section, as_json, render, verdict

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(torch_symm.__file__).parent


def doctor(*arguments: str, python: Sequence[str] = (), descriptors: int = 0, **environment: str) -> tuple[int, str]:
    """Exit status and output. There is never a traceback, and standard error stays empty."""
    command = [sys.executable, *python, "-m", "torch_symm", "doctor", *arguments]
    if descriptors:
        command = ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh", *command]
    full = {name: value for name, value in os.environ.items() if not name.startswith("SYMM_")}
    full.update(environment)
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=full, cwd="/", check=False)
    assert "Traceback" not in result.stdout + result.stderr
    assert result.stderr == ""
    return result.returncode, result.stdout


def copied(folder: Path) -> str:
    """A copy of the package in `folder`, without its native part."""
    shutil.copytree(PACKAGE, folder / "torch_symm", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return str(folder)


@pytest.mark.timed
def test_all_is_said_and_two_ranks_meet() -> None:
    status, output = doctor("--json", SYMM_LOGS="1", SYMM_BLOCKING_WAIT="1", SYMM_JOB_SECRET="hidden")
    found = json.loads(output)
    assert status == 0 and found["ok"], output
    sections = "system calls versions native cores memory descriptors namespaces traces settings gpus cpu trial_cpu"
    assert {*sections.split(), "problems"} <= set(found)
    assert found["versions"]["torch_symm"] == torch_symm.__version__
    assert found["native"]["file"].startswith(str(PACKAGE))
    assert found["calls"] == {"tried": 17, "refused": {}}
    assert found["trial_cpu"]["ok"] and 0 < found["trial_cpu"]["seconds"] < 60
    assert found["cpu"]["algorithms"]["all_reduce"]["8"] == "inline"
    assert found["settings"]["set"]["SYMM_BLOCKING_WAIT"] == "1" and "hidden" not in output
    (unknown,) = (problem for problem in found["problems"] if "SYMM_LOGS" in problem["text"])
    assert unknown["text"].endswith("did you mean SYMM_LOG?") and unknown["remedy"] and not unknown["fatal"]


@needs_seccomp
@pytest.mark.parametrize("call", sorted({*NUMBERS} - {"process_vm_readv"}))
@pytest.mark.ranks(1, backend=None)
def test_each_system_call_that_is_denied_is_named(call: str) -> None:
    deny(call, errno.EPERM)
    section = calls.calls()
    assert section.found["tried"] == 17
    (problem,) = section.problems
    assert problem.fatal and call in problem.text.partition(" fails: ")[0] and "seccomp" in problem.remedy
    assert "Operation not permitted" in problem.text


def test_the_library_the_doctor_and_the_guide_know_the_same_system_calls() -> None:
    table = (ROOT / "src/sys/required.rs").read_text()
    names = re.findall(r'^    [A-Z]\w+: "(.+)", ".+";$', table, re.MULTILINE)
    assert len(names) == 17 == calls.calls().found["tried"]
    guide = (ROOT / "docs/guide/errors.md").read_text()
    tried = (PACKAGE / "tools/doctor/calls.py").read_text()
    for name in names:
        assert f'"{name}": ' in tried, name
        for call in re.split(", | or ", name):
            assert f"`{call}`" in guide, call


@pytest.mark.parametrize("kind", ["missing", "of another torch", "cut off"])
def test_a_native_part_that_cannot_be_loaded_is_a_sentence(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", copied(tmp_path))
    running = ".".join(torch.__version__.split(".")[:2])
    other = next(version for version in TORCH_VERSIONS if version != running)
    says = "torch_symm has no native part for Python"
    if kind == "of another torch":
        extension = _native.extension(running)
        name = extension.name.replace(running.replace(".", "_"), other.replace(".", "_"))
        (tmp_path / "torch_symm" / name).symlink_to(extension)
        says = f"was built for torch {other} and cannot serve torch"
    elif kind == "cut off":
        for file in PACKAGE.glob("*.so"):
            (tmp_path / "torch_symm" / file.name).write_bytes(file.read_bytes()[:100_000])
        says = "the native part cannot be loaded: "
    found = probe(2)
    (problem,) = library.native(found).problems
    assert problem.fatal and says in problem.text and problem.remedy and not found.works
    assert kind == "cut off" or problem.remedy.startswith("build it with")


@pytest.mark.parametrize("descriptors", [64, 8])
def test_a_missing_torch_and_too_few_descriptors_fail(descriptors: int, tmp_path: Path) -> None:
    # -S leaves out site-packages, so torch is missing; 8 descriptors do not suffice to start a child.
    place = copied(tmp_path)
    status, output = doctor("--ranks", "40", python=["-S"], descriptors=descriptors, PYTHONPATH=place)
    assert status == 1 and f"FAILS: RLIMIT_NOFILE {descriptors} is too low: a group of 40 ranks needs" in output, output
    assert "remedy: ulimit -n 1024" in output
    missing = "FAILS: torch is not installed in this environment\n  remedy: pip install"
    assert descriptors == 8 or missing in output, output


def test_a_child_has_a_deadline_and_its_messages_are_kept() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    (ended,) = run([Program("timeit", ["-n", "1", "-r", "1", "__import__('time').sleep(60)"], environment)], 0.5)
    assert ended.status is None and ended.last_words() == "did not end in time"
    assert Ended([], "first\nlast\n", -9).last_words() == "was killed by SIGKILL: last"
    assert Ended([], "", 3).last_words() == "exited with code 3"
    # Numpy raises an error with many lines of advice and a cause.
    error = ImportError("advice\nmore advice")
    error.__cause__ = OSError("the cause")
    assert sentence(error) == "OSError: the cause"


def probed(*, access: bool = True, copies: bool = True, capability: Sequence[int] = (9, 0), **errors: str) -> Probed:
    """The report of a child on a node with two GPUs."""
    gpu = {"name": "H200", "capability": list(capability), "uuid": "u", "free_bytes": 1 << 37, "total_bytes": 1 << 37}
    pairs = [
        {"from": one, "to": 1 - one, "access": access, "copied": copies, "error": "" if copies else "other values"}
        for one in range(2)
    ]
    found: dict[str, Any] = {
        "torch": {"version": "2", "cuda": "13.0", "distributed": True, "unregistered": None, "found_by_torch": True},
        "native": {"file": "_C.so", "version": torch_symm.__version__, "cache": ""},
        "driver": {"version": "580.1", "cuda": [13, 0]},
        "gpus": {"devices": [gpu, gpu]},
        "nvrtc": {"path": "/lib/libnvrtc.so.13", "version": [13, 0]},
        "links": {"table": "2 GPUs (NVML)\n\n  GPU0  GPU1\n\nNV# = so many NVLinks\n", "nvlinks": [[0, 18], [18, 0]]},
        "peers": {"pairs": pairs},
    }
    return Probed({name: value for name, value in found.items() if name not in errors}, dict(errors))


def texts(section: Section | None) -> list[tuple[bool, str]]:
    """The problems of a section; each must have a remedy."""
    assert section is not None and all(problem.remedy for problem in section.problems)
    return [(problem.fatal, problem.text) for problem in section.problems]


def test_gpus_and_the_native_part_are_judged() -> None:
    good = probed()
    linked = devices.links(good)
    assert linked is not None and linked.lines[-1] == "peer access of 2 of 2 pairs; copies arrived whole: 2"
    assert not any("so many" in line for line in linked.lines)
    assert texts(devices.gpus(good, 2)) == texts(linked) == texts(library.native(good)) == []
    old = "cuda:0 has compute capability 7.5, which is too old"
    assert texts(devices.gpus(probed(capability=(7, 5)), 2))[0] == (True, old)
    assert "3 ranks would share 2 GPUs" in texts(devices.gpus(probed(), 3))[0][1]
    assert texts(devices.gpus(probed(gpus="RuntimeError: no"), 2))[0] == (True, "GPUs cannot be used: RuntimeError: no")
    ((fatal, text),) = texts(devices.links(probed(access=False)))
    assert not fatal and "no peer access between cuda devices 0-1 1-0" in text
    assert texts(devices.links(probed(copies=False)))[0] == (True, "a copy from cuda:0 to cuda:1 fails: other values")
    compiler, cache = texts(devices.kernels(probed(nvrtc="OSError: none")))
    assert compiler == (True, "no CUDA kernel can be compiled: OSError: none")
    assert not cache[0] and "compiled kernels are not kept" in cache[1]
    older = probed()
    older.found["native"]["version"] = "0.0.9"
    text = f"the native part is of torch_symm 0.0.9, the package of {torch_symm.__version__}"
    assert texts(library.native(older)) == [(True, text)]
    older.found["torch"]["found_by_torch"] = False
    ((fatal, text),) = texts(library.versions(older))
    assert not fatal and "torch" in text


def test_a_trial_names_what_failed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends_as(*ended: Ended) -> Section:
        monkeypatch.setattr(smoke_test, "run", lambda children, seconds: list(ended))
        return smoke_test.trial("cpu")

    good = Ended(
        [{"ok": True, "seconds": 0.5}], "[INFO  symm::group rank 0] it reads long messages from the sender's memory", 0
    )
    worked = ends_as(good, good)
    assert worked.found == {"ok": True, "ranks": 2, "seconds": 0.5, "direct_reads": True} and texts(worked) == []
    refused = Ended([{"error": "SymmConfigError: no", "step": "init_process_group"}], "", 1)
    expected = (True, "2 ranks on cpu failed: rank 1: init_process_group: SymmConfigError: no")
    assert texts(ends_as(Ended([], "", -9), refused)) == [expected]
    assert texts(ends_as(good, Ended([], "", None))) == [(True, "2 ranks on cpu failed: rank 1: did not end in time")]
    pieces = Ended([{"ok": True, "seconds": 0.5}], "it receives long messages in pieces", 0)
    ((fatal, text),) = texts(ends_as(pieces, pieces))
    assert not fatal and "process_vm_readv" in text


def test_the_compiler_is_looked_for_where_the_setting_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYMM_NVRTC_PATH", str(tmp_path))
    with pytest.raises(OSError, match=f"is found in SYMM_NVRTC_PATH={tmp_path}"):
        gpus.nvrtc()
    monkeypatch.setenv("SYMM_NVRTC_PATH", str(tmp_path / "libnvrtc.so.13"))
    with pytest.raises(OSError, match=r"libnvrtc\.so\.13"):
        gpus.nvrtc()


def test_memory_is_that_of_the_tightest_group(tmp_path: Path) -> None:
    proc, mount = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (mount / "jobs/one").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 4000 kB\n")
    assert cgroup.memory_free(proc, mount) == (4000 * 1024, "on this machine")
    (proc / "self/cgroup").write_text("0::/jobs/one\n")
    (mount / "jobs/memory.max").write_text("3000000")
    (mount / "jobs/memory.current").write_text("1000000")
    (mount / "jobs/memory.stat").write_text("inactive_file 400000\n")
    (mount / "jobs/one/memory.max").write_text("max")
    (mount / "jobs/one/cpu.max").write_text("max 100000")
    (mount / "jobs/cpu.max").write_text("150000 100000")
    assert cgroup.memory_free(proc, mount) == (2_400_000, f"in the memory cgroup {mount}/jobs")
    assert cgroup.cores_allowed(proc, mount) == 1.5


def test_a_reader_that_goes_is_no_failure_of_the_command(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": copied(tmp_path)}
    command = f"{sys.executable} -S -m torch_symm doctor | true"
    result = subprocess.run(command, shell=True, stderr=subprocess.PIPE, timeout=60, env=environment, check=False)
    assert result.stderr == b""


def test_the_end_of_the_screen_counts() -> None:
    assert verdict([]).strip() == "nothing would fail"
    bad, poor = Problem("a is broken", "mend a", fatal=True), Problem("b is slow", "use c")
    section = Section("part", {"a": 1}, ["one", "two"], [poor, bad])
    assert verdict([bad, poor]).endswith("1 would fail, 1 warning")
    assert render(section) == "part         one\n             two"
    assert as_json([section])["problems"][0] == {"text": "a is broken", "remedy": "mend a", "fatal": True}


def test_traces_go_where_groups_write_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A path that is not absolute is ignored.
    monkeypatch.setenv("SYMM_TRACE_DIR", "relative")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "stats").write_text("")
    found = host.folders()
    assert found.found == {"folder": str(tmp_path / f"torch-symm-{os.geteuid()}"), "writable": True}
    assert found.found["folder"] in found.lines[0] and not found.problems
    written = run_ranks(lambda *_: _native.load()._write_trace(b"", "trace-1-rank0.json", b"{}"), 1, backend=None)
    assert str(Path(written[0]).parent) == found.found["folder"]
    (link := tmp_path / "link").symlink_to(tmp_path)
    (shared := tmp_path / "shared").mkdir()
    shared.chmod(0o777)
    for unfit, why in ((link, "is a symbolic link"), (tmp_path / "stats", "no folder"), (shared, "written by others")):
        monkeypatch.setenv("SYMM_TRACE_DIR", str(unfit))
        found = host.folders()
        (problem,) = found.problems
        assert found.found["folder"] == str(unfit)
        assert why in problem.text and "SYMM_TRACE_DIR" in problem.remedy


def test_an_overloaded_machine_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = os.cpu_count() or 1
    monkeypatch.setattr(os, "getloadavg", lambda: (cores + 1.0, 0.0, 0.0))
    (problem,) = [one for one in host.cores(1).problems if "load average" in one.text]
    assert f"load average {cores + 1}.0 on {cores} cores" in problem.text and not problem.fatal
    monkeypatch.setattr(os, "getloadavg", lambda: (float(cores), 0.0, 0.0))
    assert not host.cores(1).problems


def test_waits_are_announced(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []

    def tried(device: str) -> Section:
        seen.append(capsys.readouterr().out)
        return Section(f"trial_{device}", {}, ["works"])

    found = probed().found
    monkeypatch.setattr(command, "probe", lambda ranks: Probed({name: found[name] for name in ("torch", "native")}))
    monkeypatch.setattr(command, "trial", tried)
    assert command.run(command.parser(), command.parser().parse([])) == 0
    assert seen[0].endswith("             starting 2 ranks on cpu, which end after 60 s at the latest …\n")
    assert "loading torch and the native part …\n" in seen[0]
    assert command.run(command.parser(), command.parser().parse(["--quick"])) == 0 and len(seen) == 1


def test_limits_are_those_of_the_core() -> None:
    def of(path: str) -> str:
        return (ROOT / "src" / path).read_text()

    assert f"MAX_RANKS: usize = {limits.CPU_RANKS};" in of("mem/layout.rs")
    assert f"MAX_RANKS: usize = {limits.GPU_RANKS};" in of("coll/cuda/workspace/layout.rs")
    assert ", ".join(f'"{name}"' for name in gpus.NVRTC) in of("kernels/cuda/nvrtc/find.rs")

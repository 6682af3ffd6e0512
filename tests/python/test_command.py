"""``torch-symm``: its commands' help, their errors, and the suggestion after a misspelt word."""

from __future__ import annotations

import ast
import json
import os
import pydoc
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch_symm
from torch_symm import __main__ as entry
from torch_symm import _torch_compat
from torch_symm._live import files
from torch_symm.testing import init_process_group
from torch_symm.tools.bench.record import read
from torch_symm.tools.topo import plot as topo_plot
from torch_symm.tools.tune import profile

#: Options that take a duration or another positive number, and options that take a count; `ODD` has invalid values.
SECONDS = ("top --interval", "check --seconds", "tune --seconds", "bench --limit", "bench -f")
COUNTS = ("tune --ranks", "tune --redistribution", "doctor --ranks", "bench -n")
#: Options that take the number of ranks of one node.
RANKS = ("bench -g", "topo --ranks")
#: Options that take a count or 0.
WHOLE = ("bench -w", "bench -c", "bench -G", "bench -r")
SIZES = ("bench -b", "tune --largest")
LOAD = "a number of processes up to 9999 nor 'loader'"
ODD = ("0", "-1", "nan", "inf", "-inf", "1e300", "9" * 5000, "x")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", list(entry.COMMANDS))
def test_help_has_examples_that_can_be_parsed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        entry.main([name, "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    # The program that `run` starts prints its own output.
    assert "--json" in said or name == "run"
    command = import_module(f"torch_symm.tools.{entry.COMMANDS[name][0]}")
    lines = [line.partition("#")[0].split() for line in said.partition("examples:")[2].splitlines() if line]
    assert lines
    for line in lines:
        command.parser().parse(line[line.index(name) + 1 :])


def test_all_commands_are_listed_and_others_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["--help"]) == 0
    said = capsys.readouterr().out
    listed = [line.split()[0] for line in said.splitlines() if line.startswith("  ")]
    assert listed[: len(entry.COMMANDS)] == list(entry.COMMANDS)
    with pytest.raises(SystemExit):
        entry.main(["help", "bench"])
    assert "bench all_reduce -b 8 -e 64M -f 4 -g 2" in capsys.readouterr().out
    for typed, says in (
        (["docter"], "there is no command 'docter'; did you mean doctor?"),
        (["xyz"], "commands: hello, run, doctor, "),
        ([], "usage: "),
    ):
        assert entry.main(typed) == 2
        assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("doctor --quik", "there is no option --quik; did you mean --quick?"),
        ("doctor now", "there is no argument now"),
        ("bench al_reduce", "no operation 'al_reduce'; did you mean all_reduce?"),
        ("bench -d f31", "no type 'f31'; did you mean f32?"),
        ("bench -d zzz", "no type 'zzz'; there are "),
        ("bench -o summ", "no reduction 'summ'; did you mean sum?"),
        ("bench -b 8x", "not a size: '8x'"),
        ("bench -b 8 -e 4", "-e 4 is below -b 8"),
        ("bench -b 8 -e 1G -i 8", "more than 200 sizes; try -f 2"),
        ("bench -b 8 -e 16 -f 1", "-f 1 gives no larger size"),
        ("bench -g 1", "a group of one node has 2 to 128"),
        ("bench -r 2", "ranks are 0 to 1"),
        ("bench --against glo", "no side 'glo'; did you mean gloo?"),
        ("bench --device cpu --backend glo", "--backend: no backend 'glo'; did you mean gloo?"),
        ("bench --plot out.gif", "the name ends in one of .png, .svg"),
        ("bench --csv nowhere/out.csv", "there is no folder nowhere"),
        ("bench --csv /proc/x.csv", "/proc/x.csv: cannot be written: "),
        ("bench --json /proc", "/proc is a folder: name a file"),
        ("tune --device cpu --ranks 2 --output /proc/p.json", "/proc/p.json: cannot be written: "),
        ("bench -n 0", "'0' is not a whole number from 1"),
        ("tune --largest 8x", "not a size"),
        ("tune --device cpu --ranks 2 --output nowhere/p.json", "there is no folder nowhere"),
        ("tune --check --device cpu --ranks 2 --json nowhere/p.json", "there is no folder nowhere"),
        ("bench --draw nowhere.json --plot out.svg", "--draw: [Errno 2] No such file"),
        *((f"hello --device cpu --ranks={value}", "must be from 2 to 8") for value in (*ODD, "1", "9", "two")),
        ("check --ops all_reduc", "no collective 'all_reduc'; did you mean all_reduce?"),
        *((f"{option}={value}", f"'{value}' is not a number above 0") for option in SECONDS for value in ODD),
        *((f"{option}={value}", f"'{value}' is not a whole number") for option in COUNTS for value in (*ODD, "1.5")),
        *((f"{option}={value}", f"'{value}' is not a whole number") for option in WHOLE for value in ODD[1:]),
        *(
            (f"{option}={value}", f"'{value}' is not a number of ranks")
            for option in RANKS
            for value in (*ODD, "1", "129")
        ),
        *((f"{option}={value}", "not a size") for option in SIZES for value in ("²", "9999999999G", "K", "1.5M", *ODD)),
        *((f"bench --device cpu --sizes=8,{value}", "not a size") for value in (*ODD, "", "²")),
        *((f"bench --background-load={value}", f"neither {LOAD}") for value in ("10000", "-1", "2.5", "x", "", "²")),
        ("bench --device cpu --background-load matmul", "needs at least two GPUs"),
        ("bench --background-load loaders", f"neither {LOAD}"),
        ("tune --ops sum", "no price for 'sum'"),
        ("tune --largest 1K", "at least 2048 bytes"),
        ("tune --device cpu --ranks 1", "--ranks"),
        ("tune --draw check.json", "say where with --plot"),
        *([] if torch.cuda.device_count() > 1 else [("tune --device cuda", "--device cuda: needs at least 2 GPUs")]),
        ("tune --ranks 129 --device cpu", "at most 128"),
        ("check --ranks 1", "groups of 2 to 8 ranks"),
        ("check --ops=", "no collective ''; there are all_reduce"),
        *(
            (f"check --invariance {option}", f"{option.split()[0]} has no effect")
            for option in ("--faults", "--ops broadcast", "--quick")
        ),
        ("check --ranks two", "'two' are no numbers of ranks"),
    ],
)
def test_errors_say_what_to_type(typed: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        entry.main(typed.split())
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert says in said
    assert f"for example: {entry.PROGRAM} {typed.split()[0]}" in said


def test_the_program_runs_the_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # The oldest supported Python cannot read TOML.
    found = re.search(r'^torch-symm = "(.*):(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert found
    module, function = found.groups()
    monkeypatch.setattr(sys, "argv", ["torch-symm", "--version"])
    assert getattr(import_module(module), function)() == 0
    assert capsys.readouterr().out == f"torch-symm {torch_symm.__version__}\n"


#: Content that is not a run, a check or a profile.
NOT_THAT = ["", "7", "[1]", '{"rows": [', "[" * 100_000, "\xff\xfe", '{"groups": []}', '{"rows": [1], "points": [1]}']


def test_corrupt_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file.json"
    for content in NOT_THAT:
        path.write_text(content, encoding="latin-1")
        with pytest.raises(ValueError, match=r"--draw: .*file\.json holds no run"):
            read(path)
        with pytest.raises(SystemExit):
            entry.main(["tune", "--draw", str(path), "--plot", "out.svg"])
        assert f"--draw: {path} holds no check" in capsys.readouterr().err
        # The next profile replaces a faulty one.
        assert profile.known(path) == profile.inter_node(path) == {}
        assert capsys.readouterr().err.count(f"profile {path} is faulty and will be replaced: ") == 2
    assert profile.known(tmp_path / "none") == {} and capsys.readouterr().err == ""


def test_numbers_of_a_drawn_run_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file.json"
    wanted = {"op": "all_reduce", "dtype": "f32", "redop": "sum", "root": -1, "size": 8, "world": 2}
    figures = dict.fromkeys(("mean_us", "p99_us", "min_us", "iterations"), 1.0)
    rest = dict.fromkeys(("wrong", "limit_us", "staged_us", "other_cores"))
    run = {
        "machine": {"date": "2026-11-27", "cpu": "a CPU", "cores": 2, "torch": "2.15"},
        "rows": [{**wanted, **figures, **rest, "side": "symm", "placement": "in_place", "median_us": 777}],
    }
    point = {"ranks": 2, "op": "all_reduce", "bytes": 8, "algorithm": "inline"}
    check = {"origin": "a profile", "points": [{**point, "measured": 777, "predicted": 1, "links": 1, "torch": 1}]}
    path.write_text(json.dumps(run))
    assert len(read(path)[0]) == 1
    for value in ("NaN", "1e999", "-1", '"1"', "null", "[]", "1" + "0" * 400):
        path.write_text(json.dumps(run).replace("777", value))
        with pytest.raises(ValueError, match="is not a number from 0"):
            read(path)
        path.write_text(json.dumps(check).replace("777", value))
        with pytest.raises(SystemExit):
            entry.main(["tune", "--draw", str(path), "--plot", "out.svg"])
        assert "is not a number from 0" in capsys.readouterr().err


def test_help_shows_every_public_name() -> None:
    said = pydoc.plain(pydoc.render_doc(torch_symm))
    missing = [name for name in torch_symm.__all__ if name != "__version__" and name not in said]
    assert not missing
    assert set(torch_symm.__all__) <= set(dir(torch_symm))


@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
@pytest.mark.ranks(3, backend=None)
def test_a_group_is_described_with_its_algorithms(rank: int, debug: str) -> None:
    """Under DETAIL, torch wraps the backend."""
    dist.set_debug_level(getattr(dist.DebugLevel, debug))
    init_process_group(timeout=50)
    own = _torch_compat.backend_of(dist.group.WORLD, "cpu")
    assert isinstance(own, torch_symm.ProcessGroupSymm)
    pair = dist.new_group([1, 2], backend="symm")
    alone = dist.new_group([rank], backend="symm", use_local_synchronization=True)
    assert torch_symm.describe() == torch_symm.describe(dist.group.WORLD) == torch_symm.describe(own)
    with pytest.raises(ValueError, match="no tensors of this group are served by symm"):
        torch_symm.describe(dist.new_group(backend="gloo"))
    first, device, *rows = torch_symm.describe().splitlines()
    assert first == repr(own) and device == "  cpu:"
    assert first == f"<torch_symm.ProcessGroupSymm 'default': rank {rank} of 3, on cpu, timeout 50 s>"
    table = {row.split()[0]: row.split(maxsplit=1)[1] for row in rows}
    assert set(table) == {"all_gather", "all_reduce", "reduce_scatter", "all_to_all", "broadcast"}
    # The value of INLINE_BYTES in src/mem/layout.rs.
    assert table["all_reduce"].startswith("inline to 8160 bytes, staged to ")
    assert all(row.endswith("staged_streaming") for row in table.values())
    assert torch_symm.describe(alone).endswith("alone: nothing moves")
    if rank:
        assert f"rank {rank - 1} of 2, global ranks [1, 2], on cpu" in torch_symm.describe(pair)


def test_options_show_what_they_are_and_without_a_group_nothing_is_described() -> None:
    options = torch_symm.Options(timeout=5, inter_node_backend="gloo")
    assert repr(options) == "torch_symm.Options(timeout=5, inter_node_backend='gloo')"
    options = torch_symm.Options(5, reduce_dtype="float32", order="tree", cta_policy="zero", max_ctas=8)
    assert repr(options) == (
        "torch_symm.Options(timeout=5, reduce_dtype='float32', order='tree', cta_policy='zero', max_ctas=8)"
    )
    with pytest.raises(ValueError, match="there is no default group"):
        torch_symm.describe()
    with pytest.raises(TypeError, match="a ProcessGroup of torch or torch_symm is expected, not int: 3"):
        torch_symm.describe(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "steps"),
    [
        ([(8, "a")], [("a", None)]),
        ([(8, "a"), (1000, "b"), (1 << 20, "c")], [("a", 992), ("b", (1 << 20) - 8), ("c", None)]),
        ([(8, "a"), (16, "b"), (24, "c")], [("a", 8), ("b", 16), ("c", None)]),
    ],
)
def test_where_one_algorithm_ends_is_found(sizes: list[tuple[int, str]], steps: list[tuple[str, int | None]]) -> None:
    from torch_symm._describe import _bytes, _steps

    assert list(_steps(lambda size: [name for least, name in sizes if least <= size][-1])) == steps
    assert [_bytes(count) for count in (8160, 8192, 3 << 19)] == ["8160 bytes", "8 KiB", "1.5 MiB"]


@pytest.mark.parametrize("typed", ["tune --ops x --json", "tune --largest 8x --json --check", "doctor --json --quik"])
def test_errors_are_json_where_all_is(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        entry.main(typed.split())
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert ended.value.code == 2 and found["error"] in said.err
    assert found["example"].startswith(f"{entry.PROGRAM} {typed.split()[0]}")


def test_a_measurement_that_fails_is_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch_symm.tools.tune import command

    def fails(*_: object) -> dict[str, object]:
        print("what people read")
        raise command.Unmeasured("nothing was measured")

    monkeypatch.setattr(command, "_check", fails)
    assert entry.main(["tune", "--check", "--device", "cpu", "--ranks", "2", "--json"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out) == {"device": "cpu", "ranks": 2, "error": "nothing was measured"}
    assert "what people read\nnothing was measured" in said.err
    path = tmp_path / "out.json"
    monkeypatch.setattr(command, "_check", lambda *_: {"points": []})
    assert entry.main(["tune", "--check", "--device", "cpu", "--ranks", "2", "--json", str(path)]) == 0
    assert json.loads(path.read_text())["points"] == []
    assert capsys.readouterr().out == f"written to {path}\n"


def test_other_failures_are_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "traces"
    place.mkdir(mode=0o700)
    stats = place / files.name(os.getpid())
    stats.write_text("7")
    stats.chmod(0o600)
    with monkeypatch.context() as changes:
        changes.setattr("importlib.util.find_spec", lambda *_: True)
        changes.setattr(topo_plot, "draw", fails)
        assert entry.main(["topo", "--json", "--plot", str(tmp_path / "host.svg")]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["error"] == "failed: the disk is full" and found["processor"]
    for status, typed in (
        (2, ["trace", str(tmp_path / "none"), "--json"]),
        (2, ["trace", str(place), "--json"]),
        (2, ["trace", str(stats), "--torch", str(tmp_path), "--json"]),
        (2, ["top", str(os.getpid()), "--dir", str(place), "--json"]),
    ):
        assert entry.main(typed) == status, typed
        said = capsys.readouterr()
        assert json.loads(said.out) == {"error": said.err.strip()}, typed
    for typed in (["bench", "--draw", str(stats), "--plot", "x.svg", "--json"], ["top", "1", "--dir", "/", "--json"]):
        with pytest.raises(SystemExit):
            entry.main(typed)
        said = capsys.readouterr()
        assert json.loads(said.out)["error"] in said.err, typed


def fails(*_: object) -> None:
    raise OSError("the disk is full")


def test_an_interrupt_while_a_command_is_imported_is_quiet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(entry, "import_module", interrupted)
    assert entry.main(["hello"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    # The console script imports this package, and with it torch.
    (tmp_path / "torch_symm").mkdir()
    (tmp_path / "torch_symm" / "__init__.py").write_text("raise KeyboardInterrupt")
    path = os.pathsep.join([str(tmp_path), str(ROOT / "python")])
    program = "import sys, torch_symm_command; sys.exit(torch_symm_command.main())"
    command, environment = [sys.executable, "-c", program], {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_a_full_output_is_reported_in_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "torch_symm", "top", "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "cannot write to standard output: No space left on device\n")


def session(leader: int) -> dict[int, str]:
    """Returns the states of the processes in the session of ``leader``."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            found[int(name)] = fields[0]
    return found


ONLY_STOPPED = """
import sys
import tempfile
from torch_symm import __main__ as entry
from torch_symm.tools.check import faults
faults.FAULTS = tuple(fault for fault in faults.FAULTS if fault.name == "stopped")
sys.exit(entry.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("typed", "state", "number"),
    [
        ("hello --device cpu --ranks 2", "SRD", 3),
        ("bench all_reduce -g 2 -b 8 -e 64M --device cpu", "SRD", 3),
        ("tune --device cpu --ranks 2 --seconds 60 --output profile.json", "SRD", 3),
        ("check --faults --quick --ranks 2 --ops barrier", "T", 1),
    ],
)
def test_a_terminated_command_leaves_nothing(typed: str, state: str, number: int, tmp_path: Path) -> None:
    # A socket's path has at most 107 bytes.
    scratch = Path(tempfile.mkdtemp(prefix="symm", dir="/tmp"))
    path = os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])
    command = subprocess.Popen(
        [sys.executable, "-c", ONLY_STOPPED, *typed.split()],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(scratch), "PYTHONPATH": path},
        cwd=tmp_path,
    )
    try:
        while sum(each in state for each in session(command.pid).values()) < number or not list(
            scratch.glob("torch-symm-*")
        ):
            assert command.poll() is None
            time.sleep(0.02)
        command.terminate()
        assert command.wait() == 128 + signal.SIGTERM
        while session(command.pid):
            time.sleep(0.02)
        assert os.listdir(scratch) == []
    finally:
        for pid in session(command.pid):
            os.kill(pid, signal.SIGKILL)
        command.wait()
        shutil.rmtree(scratch)


def test_warnings_have_categories_of_their_own() -> None:
    assert issubclass(torch_symm.SymmFallbackWarning, torch_symm.SymmWarning)
    assert issubclass(torch_symm.SymmWarning, UserWarning)
    given = [
        (path.name, ast.unparse(node.args[1] if len(node.args) > 1 else node.args[0]))
        for path in (ROOT / "python/torch_symm").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn"
    ]
    own_or_pytest = re.compile(r"Symm\w*Warning\b|pytest\.Pytest\w+Warning\(")
    assert given and all(own_or_pytest.match(category) for _, category in given), given

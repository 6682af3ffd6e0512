"""``torch-symm``: its commands' help, their errors, and that a misspelt word is told what to type instead."""

from __future__ import annotations

import ast
import json
import pydoc
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch_symm
from ranks import run_ranks
from torch_symm import __main__ as entry
from torch_symm._command import Parser, closest, named
from torch_symm._trace import command as trace

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", list(entry.COMMANDS))
def test_help_has_examples_that_can_be_parsed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        entry.main([name, "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert "--json" in said
    command = import_module(f"torch_symm.{entry.COMMANDS[name][0]}")
    lines = [line.partition("#")[0].split() for line in said.partition("examples:")[2].splitlines() if line]
    assert lines
    for line in lines:
        command.parser().parse(line[line.index(name) + 1 :])


def test_all_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines() if line.startswith("  ")][: len(entry.COMMANDS)] == list(
        entry.COMMANDS
    )


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["docter"], "there is no command 'docter'; did you mean doctor?"),
        (["xyz"], "commands: doctor, "),
        ([], "usage: "),
    ],
)
def test_other_commands_are_refused(typed: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(typed) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("doctor --quik", "there is no option --quik; did you mean --quick?"),
        ("doctor now", "there is no argument now"),
        ("bench al_reduce", "no operation 'al_reduce'; did you mean all_reduce?"),
        ("bench -d f31", "no type 'f31'; did you mean f32?"),
        ("bench -o summ", "no reduction 'summ'; did you mean sum?"),
        ("bench -b 8x", "not a size: '8x'"),
        ("bench -b 8 -e 4", "-e 4 is below -b 8"),
        ("bench -b 8 -e 1G -i 8", "more than 200 sizes; try -f 2"),
        ("bench -b 8 -e 16 -f 1", "-f 1 gives no larger size"),
        ("bench -g 1", "at least 2 ranks"),
        ("bench -r 2", "ranks are 0 to 1"),
        ("bench --against glo", "no side 'glo'; did you mean gloo?"),
        ("bench --plot out.gif", "the name ends in one of .png, .svg"),
        ("bench --csv nowhere/out.csv", "there is no folder nowhere"),
        ("bench -n 0", "-n is at least 1"),
        ("tune --largest 8x", "not a size"),
        ("check --ops all_reduc", "no collective 'all_reduc'; did you mean all_reduce?"),
        ("check --ranks 1", "groups of 2 to 8 ranks"),
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


def test_names_are_matched() -> None:
    assert closest("all_reduc", ["all_reduce", "barrier"]) == "; did you mean all_reduce?"
    assert closest("zzz", ["all_reduce"]) == ""
    assert named("side", "gloo", ["gloo"]) == "gloo"
    with pytest.raises(ValueError, match="no side 'x'; there are gloo, nccl"):
        named("side", "x", ["gloo", "nccl"])


def test_the_program_is_this_module() -> None:
    # The oldest Python that is served reads no TOML.
    found = re.search(r'^torch-symm = "(.*):(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert found
    module, function = found.groups()
    assert getattr(import_module(module), function) is entry.main


def test_a_parser_keeps_its_options() -> None:
    parser = Parser("doctor", "Text.", [("", "all")])
    parser.add_argument("--quick", action="store_true")
    assert parser.parse(["--quick"]).quick


def test_traces_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = torch_symm.dump_trace(tmp_path / "trace-1-rank0.json")
    parser = trace.parser()
    assert trace.run(parser, parser.parse(["--json", path])) == 0
    assert "groups" in json.loads(capsys.readouterr().out)


def test_help_shows_every_public_name() -> None:
    said = pydoc.plain(pydoc.render_doc(torch_symm))
    missing = [name for name in torch_symm.__all__ if name != "__version__" and name not in said]
    assert not missing
    assert set(torch_symm.__all__) <= set(dir(torch_symm))


def described(rank: int, world: int) -> tuple[str, str, str, str]:
    own = dist.group.WORLD._get_backend(torch.device("cpu"))
    pair = dist.new_group([0, 1], backend="symm")
    alone = dist.new_group([rank], backend="symm", use_local_synchronization=True)
    assert torch_symm.describe() == torch_symm.describe(dist.group.WORLD) == torch_symm.describe(own)
    with pytest.raises(ValueError, match="no tensors of this group are served by symm"):
        torch_symm.describe(dist.new_group(backend="gloo"))
    # Gloo's connections end with a rank: not before all have theirs.
    dist.barrier()
    return torch_symm.describe(), repr(own), torch_symm.describe(pair) if rank < 2 else "", torch_symm.describe(alone)


def test_a_group_is_described_with_its_algorithms() -> None:
    results = run_ranks(described, 3)
    for rank in range(3):
        whole, own, pair, alone = results[rank]
        first, device, *rows = whole.splitlines()
        assert first == own and device == "  cpu:"
        table = {row.split()[0]: row.split(maxsplit=1)[1] for row in rows}
        assert set(table) == {"all_gather", "all_reduce", "reduce_scatter", "all_to_all", "broadcast"}
        # INLINE_BYTES of src/mem/layout.rs.
        assert table["all_reduce"].startswith("inline to 8160 bytes, staged to ")
        assert all(row.endswith("staged_streaming") for row in table.values())
        assert alone.endswith("alone: nothing moves")
        assert "of 2" in pair if rank < 2 else pair == ""
    with pytest.raises(ValueError, match="there is no default group"):
        torch_symm.describe()


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
    from torch_symm.tune import command

    def fails(*_: object) -> dict[str, object]:
        print("what people read")
        raise command.Unmeasured("nothing was measured")

    monkeypatch.setattr(command, "_check", fails)
    assert entry.main(["tune", "--check", "--device", "cpu", "--ranks", "2", "--json"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out) == {"device": "cpu", "ranks": 2, "error": "nothing was measured"}
    assert "what people read\nnothing was measured" in said.err
    path = tmp_path / "new" / "out.json"
    monkeypatch.setattr(command, "_check", lambda *_: {"points": []})
    assert entry.main(["tune", "--check", "--device", "cpu", "--ranks", "2", "--json", str(path)]) == 0
    assert json.loads(path.read_text())["points"] == []
    assert capsys.readouterr().out == f"written to {path}\n"


def test_warnings_have_categories_of_their_own() -> None:
    assert issubclass(torch_symm.SymmFallbackWarning, torch_symm.SymmWarning)
    assert issubclass(torch_symm.SymmWarning, UserWarning)
    given = [
        (path.name, ast.unparse(node.args[1]) if len(node.args) > 1 else "")
        for path in (ROOT / "python/torch_symm").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn"
    ]
    assert given and all(re.fullmatch(r"Symm\w*Warning", category) for _, category in given), given


def shown(rank: int, world: int) -> list[str]:
    groups = [dist.group.WORLD, dist.new_group([1, 2], backend="symm")]
    return [repr(group._get_backend(torch.device("cpu"))) for group in groups if isinstance(group, dist.ProcessGroup)]


def test_groups_and_options_show_what_they_are() -> None:
    results = run_ranks(shown, 3)
    assert len(results[0]) == 1 and len(results[2]) == 2
    assert "ProcessGroupSymm" in results[0][0] and "rank 0 of 3, on cpu, timeout 60 s" in results[0][0]
    assert "rank 1 of 2, global ranks [1, 2], on cpu" in results[2][1]
    assert repr(torch_symm.Options(timeout=5, between_hosts="gloo")) == (
        "torch_symm.Options(timeout=5, between_hosts='gloo')"
    )

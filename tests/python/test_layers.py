"""The modules of the Python package have a direction, like those of Rust in `tests/layers.rs`: no cyclic imports."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2] / "python"
#: Starts the commands; its implementation is where ``python -m torch_symm`` expects it.
ENTRY = "torch_symm.__main__"
TOOLS = "torch_symm.tools"


def modules() -> dict[str, Path]:
    """All modules by name; a package is its ``__init__``."""
    files = sorted((ROOT / "torch_symm").rglob("*.py"))
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def named(module: str, is_package: bool, nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yields the names that the code imports when it is loaded or run, anywhere in it, but not for its types."""
    for node in nodes:
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: None if is_package and node.level == 1 else is_package - node.level]
            base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and "import_module" in (
            getattr(node.func, name, "") for name in ("id", "attr")
        ):
            yield from (argument.value for argument in node.args if isinstance(argument, ast.Constant))
        yield from named(module, is_package, ast.iter_child_nodes(node))


@cache
def imports() -> dict[str, set[str]]:
    """The modules that each module imports; a package is left out if a module in it is imported, too."""
    found, files = dict[str, set[str]](), modules()
    for module, file in files.items():
        names = set(named(module, file.name == "__init__.py", ast.parse(file.read_text()).body)) & files.keys()
        found[module] = {name for name in names if not any(other.startswith(f"{name}.") for other in names)} - {module}
    return found


def circles(found: dict[str, set[str]]) -> dict[str, set[str]]:
    """Returns the modules on cycles: repeatedly drops modules that import no other, or that no other imports."""
    left = {module: set(names) for module, names in found.items()}
    while True:
        used = set().union(*left.values()) if left else set()
        kept = {module: names & left.keys() for module, names in left.items() if names & left.keys() and module in used}
        if kept == left:
            return left
        left = kept


def test_modules_import_each_other_in_one_direction() -> None:
    found = imports()
    assert sum(map(len, found.values())) > len(found) > 100
    assert circles(found) == {}


def test_a_circle_is_found() -> None:
    found = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a"}}
    assert circles(found) == {"b": {"c"}, "c": {"b"}}
    code = "from . import x\nfrom ..y import z\ndef f():\n    import_module('torch_symm.w')\n"
    code += "if TYPE_CHECKING:\n    import v"
    names = set(named("torch_symm.a.b", False, ast.parse(code).body))
    assert {"torch_symm.a.x", "torch_symm.y.z", "torch_symm.w"} <= names and "v" not in names


def test_the_backend_imports_nothing_of_the_tools() -> None:
    for module, names in imports().items():
        if module != ENTRY and not module.startswith(TOOLS):
            assert not [name for name in names if name.startswith(TOOLS)], module
    assert any(name.startswith(TOOLS) for name in imports()[ENTRY])

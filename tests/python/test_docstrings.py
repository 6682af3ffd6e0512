"""Docstrings of everything public, read as text: parameters, what comes back, what is raised, and units."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "python/torch_symm"
#: Packages whose ``__all__`` is public, and where their objects are written.
PUBLIC = {"": ("_*.py", "_*.pyi", "_trace/*.py"), "tensor": ("*.py",), "symm_mem": ("*.py",), "testing": ("*.py",)}
#: torch's own, and values.
OTHERS = {"__version__", "_test_mode", "skip_if_lt_x_gpu"}
#: What the text must say of a parameter of this name, or of one that ends so.
UNITS = {
    "timeout": r"second|timedelta| s\b|milliseconds",
    "timeout_ms": r"millisecond|_ms",
    "bytes": r"byte",
    "size": r"byte|length|size of|sizes|ranks|processes|number",
    "seconds": r"second",
    "wire": r"GB/s",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _all(package: str) -> list[str]:
    tree = ast.parse((PACKAGE / package / "__init__.py").read_text())
    (names,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__"
    ]
    found: list[str] = names
    return found


def _defined(package: str) -> dict[str, Function | ast.ClassDef]:
    found: dict[str, Function | ast.ClassDef] = {}
    for pattern in PUBLIC[package]:
        for path in (PACKAGE / package).glob(pattern):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, (Function, ast.ClassDef)):
                    found.setdefault(node.name, node)
    return found


def _functions() -> Iterator[tuple[str, Function, str]]:
    """Name, function, and the text that describes it: of a constructor that of its class."""
    for package in PUBLIC:
        defined = _defined(package)
        for name in _all(package):
            node = defined.get(name)
            if isinstance(node, Function):
                yield f"{package}.{name}".strip("."), node, ast.get_docstring(node) or ""
            elif node is not None:
                own = ast.get_docstring(node) or ""
                for part in node.body:
                    if isinstance(part, Function) and part.name == "__init__":
                        yield f"{package}.{name}".strip("."), part, own + (ast.get_docstring(part) or "")
                    elif isinstance(part, Function) and not part.name.startswith("_") and not _is_property(part):
                        text = ast.get_docstring(part) or ""
                        yield f"{package}.{name}.{part.name}".strip("."), part, text if text else own


def _is_property(node: Function) -> bool:
    return any("property" in ast.unparse(one) or ".setter" in ast.unparse(one) for one in node.decorator_list)


def _own_statements(node: ast.AST) -> Iterator[ast.AST]:
    """Without those of functions within."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (Function, ast.Lambda, ast.ClassDef)):
            yield child
            yield from _own_statements(child)


FUNCTIONS = list(_functions())


def test_every_public_name_is_found_and_described() -> None:
    for package in PUBLIC:
        defined = _defined(package)
        for name in set(_all(package)) - OTHERS:
            assert name in defined, f"{package}.{name} is written nowhere"
            text = ast.get_docstring(defined[name]) or ""
            # The native exceptions' texts stand in C++.
            if name.startswith("Symm") and "Warning" not in name:
                bound = (PACKAGE.parents[1] / "torch_backend/bind/bind.cpp").read_text()
                text = "".join(re.findall(rf'"{name}", "([^"]*)"', bound))
            assert re.match(r"(?:[A-Z`\"]|torch's ).*[.:;]", text, re.DOTALL), (
                f"{package}.{name}: {text!r} is no sentence"
            )
    assert len(FUNCTIONS) > 60


@pytest.mark.parametrize(("name", "node", "text"), FUNCTIONS, ids=[name for name, _, _ in FUNCTIONS])
def test_a_docstring_says_what_goes_in_and_comes_out(name: str, node: Function, text: str) -> None:
    assert text, f"{name} has no docstring"
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    missing = [
        one.arg
        for one in arguments
        if one.arg not in ("self", "cls")
        and not re.search(rf"``{one.arg}\b[^`]*``|^ *(\w+, )*{one.arg}(, \w+)*: ", text, re.M)
    ]
    assert not missing, f"{name}: its text does not say what {', '.join(missing)} means"
    returns = ast.unparse(node.returns) if node.returns else "None"
    if returns not in ("None", "NoReturn", "Self") and node.name != "__init__":
        says = re.search(r"\b[Rr]eturns?\b|\bYields\b|^(Whether|The|What|How|A|An|Microseconds|Bytes)\b", text)
        assert says, f"{name}: its text does not say what it returns"


@pytest.mark.parametrize(("name", "node", "text"), FUNCTIONS, ids=[name for name, _, _ in FUNCTIONS])
def test_a_docstring_says_what_is_raised_and_in_which_unit(name: str, node: Function, text: str) -> None:
    for statement in _own_statements(node):
        if isinstance(statement, ast.Raise) and isinstance(statement.exc, ast.Call):
            raised = ast.unparse(statement.exc.func).rpartition(".")[2]
            section = text.partition("Raises:")[2]
            assert raised in section, f"{name} raises {raised}, which its text does not say under Raises:"
    for argument in [*node.args.args, *node.args.kwonlyargs]:
        for word, unit in UNITS.items():
            if argument.arg == word or argument.arg.endswith(f"_{word}"):
                assert re.search(unit, text), f"{name}: in which unit is {argument.arg}?"


def test_formulas_name_their_source() -> None:
    """Prices and bandwidths are formulas of somebody's."""
    for name, _, text in FUNCTIONS:
        if name.endswith("_cost") or "busbw" in text:
            assert re.search(r"docs/|doc/|nccl-tests|torch's", text), f"{name}: whose formula is it?"

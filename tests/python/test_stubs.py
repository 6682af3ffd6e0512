"""The stub of the native module matches the module."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch_symm._native import load

ROOT = Path(__file__).parents[2]
STUB = ROOT / "python/torch_symm/_C.pyi"
#: Members that the stub inherits from torch's classes, and members that pybind11 adds to each class.
ADDED = {"__new__", "__module__", "__doc__", "__init__", "__weakref__", "__qualname__", "__static_attributes__"}

Function = ast.FunctionDef
Described = dict[str, dict[str, list[list[str]]]]


def _stub() -> tuple[dict[str, list[list[str]]], Described]:
    """Parameters of each function and of each method of a class, by overload; properties have no parameters."""
    functions: dict[str, list[list[str]]] = {}
    classes: Described = {}
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, Function):
            functions.setdefault(node.name, []).append(_parameters(node))
        elif isinstance(node, ast.ClassDef):
            members: dict[str, list[list[str]]] = classes.setdefault(node.name, {})
            for part in node.body:
                if isinstance(part, Function):
                    is_property = any("property" in ast.unparse(one) for one in part.decorator_list)
                    setter = any(".setter" in ast.unparse(one) for one in part.decorator_list)
                    if not setter:
                        members.setdefault(part.name, []).append([] if is_property else _parameters(part))
                elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                    members[part.target.id] = []
    return functions, classes


def _parameters(node: Function) -> list[str]:
    return [one.arg for one in (*node.args.args, *node.args.kwonlyargs) if one.arg != "self"]


def _signatures(function: Any) -> list[list[str]]:
    """The signatures that pybind11 writes into the docstring: names of the parameters of each overload."""
    text = function.__doc__ or ""
    lines = [line for line in text.splitlines() if re.match(r"(\d+\. )?\w+\(.*\)( -> .*)?$", line)]
    if any(line.startswith("1. ") for line in lines):
        lines = [line.split(". ", 1)[1] for line in lines if line[0].isdigit()]
    # A default value without a literal is written as <C object>.
    code = "\n".join(f"def {re.sub('<[^<>]*>', 'None', line)}: ..." for line in lines)
    return [_parameters(node) for node in ast.parse(code).body if isinstance(node, Function)]


def test_the_stub_has_every_name_of_the_native_module_and_no_other() -> None:
    native, (functions, classes) = load(), _stub()
    names = {name for name in vars(native) if not (name.startswith("__") and name != "__version__")}
    assert names == {*functions, *classes, "__version__"}
    for name, described in functions.items():
        assert _signatures(getattr(native, name)) == described, name


@pytest.mark.parametrize("name", sorted(_stub()[1]))
def test_the_stub_has_the_members_of_each_class(name: str) -> None:
    native, described = getattr(load(), name), _stub()[1][name]
    if issubclass(native, dist.DistBackendError):
        assert described == {} and native.__bases__ == (dist.DistBackendError,)
        return
    for member, parameters in described.items():
        assert hasattr(native, member), f"{name}.{member} is in the stub alone"
        found = inspect.getattr_static(native, member)
        if parameters != [[]] or not isinstance(found, property):
            signatures = _signatures(getattr(native, member))
            # Members that Python adds have no signature from pybind11.
            if parameters and signatures:
                assert sorted(map(_plain, signatures)) == sorted(map(_plain, parameters)), f"{name}.{member}"
    own = {member for member in vars(native) if not member.startswith("_pybind")} - ADDED - {"__repr__", "__hash__"}
    own -= {"__getstate__", "__setstate__", "__reduce__", "__eq__", "__ne__"}
    # Leaves out members of torch's class, which torch's stub describes.
    own = {member for member in own if vars(native)[member] is not getattr(dist.ProcessGroupGloo, member, None)}
    inherited = {member for base in native.__mro__[1:] for member in vars(base)}
    assert own - set(described) - inherited == set(), f"{name} has more than its stub says"


@pytest.mark.parametrize("name", ["Options", "ProcessGroupSymm", "TCPStore", "FileStore", "MemoryStore"])
def test_help_has_the_texts_of_the_stub(name: str) -> None:
    (node,) = [one for one in ast.parse(STUB.read_text()).body if isinstance(one, ast.ClassDef) and one.name == name]
    assert getattr(load(), name).__doc__ == ast.get_docstring(node)
    assert "Raises:" in (ast.get_docstring(node) or "") or name == "MemoryStore"


def _plain(names: list[str]) -> list[str]:
    """pybind11 names unnamed parameters ``arg0`` and so on."""
    return [name for name in names if not re.fullmatch(r"arg\d+", name)]

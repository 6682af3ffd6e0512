"""docs/design/reliability.md: every promise has a proof, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROMISES = [f"P{number}" for number in range(1, 25)]


def rows() -> dict[str, list[str]]:
    """The cells of each promise's row: sentence, CPU, CUDA."""
    text = (ROOT / "docs" / "design" / "reliability.md").read_text()
    table = text.partition("## Promises")[2].partition("\n## ")[0]
    found = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if re.fullmatch(r"P\d+", cells[0]):
            assert cells[0] not in found, f"{cells[0]} stands twice"
            found[cells[0]] = cells[1:]
    return found


def proofs(cell: str) -> list[tuple[str, str]]:
    """Files and tests that a cell names."""
    return [(file, test) for file, _, test in (name.partition("::") for name in re.findall(r"`([^`]+::[^`]+)`", cell))]


@cache
def names_in(file: str) -> set[str]:
    """Names of the tests in a file, as the table spells it."""
    if file.endswith(".rs"):
        text = (ROOT / file).read_text()
        # Attributes may be in between; proptest! names its tests in the same way.
        return set(re.findall(r"#\[test\]\s*(?:#\[[^\n]*\]\s*)*(?:async\s+)?fn\s+(\w+)", text))
    places = (ROOT / "tests" / place / file for place in ("python", "internode", "cuda"))
    path = next((path for path in places if path.exists()), None)
    assert path is not None, f"there is no {file}"
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_promise_stands_once_in_order() -> None:
    assert list(rows()) == PROMISES
    assert all(len(cells) == 3 and cells[0] for cells in rows().values())


@pytest.mark.parametrize("promise", PROMISES)
def test_its_proofs_exist(promise: str) -> None:
    _, cpu, cuda = rows()[promise]
    named = proofs(cpu) + proofs(cuda)
    missing = [f"{file}::{test}" for file, test in named if test not in names_in(file)]
    assert not missing, f"{promise} names tests that do not exist: {missing}"
    assert proofs(cpu), f"{promise} has no proof on CPU"


def test_the_fault_matrix_has_its_place() -> None:
    text = (ROOT / "docs" / "measurements" / "multi-node.md").read_text()
    begin, end = "<!-- fault matrix: begin -->", "<!-- fault matrix: end -->"
    assert text.count(begin) == text.count(end) == 1 and text.index(begin) < text.index(end)

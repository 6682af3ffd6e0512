"""The tests that prove the promises of docs/design/reliability.md. Run as a program, it writes both pages anew.

A test proves the promises with which its name starts (``test_p2_p21_a_rank_killed``), and those that a comment above it
names: ``# proves P2, P21``, in Rust ``// proves P2, P21``. Tests of CUDA tensors are recognised by their path, or by
``on CUDA`` at the end of the comment.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "design" / "reliability.md"
LIST = ROOT / "docs" / "design" / "promises.md"
DEVICES = ("CPU", "CUDA")
ON_CUDA = ("tests/cuda/", "tests/emulated/", "tests/gpu/", "src/coll/cuda/", "src/internode/cuda/")
MARK = re.compile(r"\s*(?:#|//) proves (P\d+(?:, P\d+)*)( on CUDA)?")
NAME = re.compile(r"\s*(?:async )?(?:def (?=test_)|fn )((?:test_)?((?:p\d+_)*)\w+)\(")
ROW = re.compile(r"^\| P(\d+) \| (.*) \| [^|]* \| [^|]* \|$", re.MULTILINE)
HEAD = """# Tests of the promises

`python tests/python/promises.py` writes this page and the numbers in [reliability](reliability.md#promises)."""

Proof = tuple[int, str, str, str]


def proofs_in(path: str, text: str) -> Iterator[Proof]:
    """Yields promise, device, path and test for every promise that a test of the file proves."""
    marked, device, is_test = set[int](), "", path.endswith(".py")
    for line in text.splitlines():
        if mark := MARK.fullmatch(line):
            assert not marked, f"{path}: {line!r} follows another mark, and no test is between them"
            marked, device = {int(number[1:]) for number in mark[1].split(", ")}, "CUDA" if mark[2] else ""
        elif line.strip() == "#[test]":
            is_test = True
        elif is_test and (found := NAME.match(line)):
            for promise in marked | {int(number[1:]) for number in found[2].split("_")[:-1]}:
                yield promise, device or DEVICES[path.startswith(ON_CUDA)], path, found[1]
            marked, device, is_test = set(), "", path.endswith(".py")
    assert not marked, f"{path}: no test follows the last mark"


def proofs() -> list[Proof]:
    """Returns the proofs that the tests of this tree claim, in order of promise, device, path and test."""
    files = [*(ROOT / "src").rglob("*.rs"), *(ROOT / "tests").rglob("*.rs"), *(ROOT / "tests").rglob("test_*.py")]
    return sorted(proof for file in files for proof in proofs_in(str(file.relative_to(ROOT)), file.read_text()))


def pages(found: list[Proof]) -> dict[Path, str]:
    """Returns the text of both pages."""

    def row(match: re.Match[str]) -> str:
        count = [sum(proof[:2] == (int(match[1]), device) for proof in found) for device in DEVICES]
        cells = (f"[{number}](promises.md#p{match[1]})" if number else "" for number in count)
        return f"| P{match[1]} | {match[2]} | {' | '.join(cells)} |"

    lines = [HEAD]
    for promise, of_promise in groupby(found, lambda proof: proof[0]):
        lines.append(f"\n## P{promise}")
        for (device, path), tests in groupby(of_promise, lambda proof: proof[1:3]):
            named = f"- {device}, `{path}`: {', '.join(f'`{test}`' for *_, test in tests)}"
            lines += textwrap.wrap(named, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return {TABLE: ROW.sub(row, TABLE.read_text()), LIST: "\n".join(lines) + "\n"}


if __name__ == "__main__":
    for page, text in pages(proofs()).items():
        page.write_text(text)

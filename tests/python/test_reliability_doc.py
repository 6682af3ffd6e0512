"""docs/design/reliability.md: every promise is proven, and the pages name the tests that prove it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import promises
import pytest

PROMISES = list(range(1, 25))


def test_every_promise_is_listed_once_in_order_in_a_few_words() -> None:
    rows = promises.ROW.findall(promises.TABLE.read_text())
    assert [int(number) for number, _ in rows] == PROMISES
    assert not [text for _, text in rows if not text or len(text) > 240]


def test_the_pages_are_current() -> None:
    found = promises.proofs()
    assert {promise for promise, device, *_ in found if device == "CPU"} == set(PROMISES), "promises without a CPU test"
    assert {promise for promise, *_ in found} == set(PROMISES), "tests name promises that the table does not have"
    stale = [page.name for page, text in promises.pages(found).items() if page.read_text() != text]
    assert not stale, f"{stale} are not current: run python tests/python/promises.py"


def test_marks_and_names_of_tests_are_found() -> None:
    python = (
        "# proves P2, P30\n@pytest.mark.slow\ndef test_one():\n    def p4_no(): pass\n\ndef test_p7_p8_two(): pass\n"
    )
    rust = (
        "    // proves P3 on CUDA\n    #[test]\n    fn one() {}\n    fn p4_no() {}\n    #[test]\n    fn p5_two() {}\n"
    )
    both = [*promises.proofs_in("a.py", python), *promises.proofs_in("b.rs", rust)]
    assert Counter(proof[::3] for proof in both) == Counter(
        {(2, "test_one"), (30, "test_one"), (7, "test_p7_p8_two"), (8, "test_p7_p8_two"), (3, "one"), (5, "p5_two")}
    )
    assert {proof[1] for proof in both if proof[0] == 3} == {"CUDA"} and {proof[1] for proof in both} == {"CPU", "CUDA"}
    for text in ("# proves P2\n", "# proves P2\n# proves P3\ndef test_one(): pass\n"):
        with pytest.raises(AssertionError, match="mark"):
            list(promises.proofs_in("a.py", text))


def test_the_fault_matrix_has_its_place() -> None:
    text = (Path(promises.ROOT) / "docs" / "measurements" / "multi-node.md").read_text()
    begin, end = "<!-- fault matrix: begin -->", "<!-- fault matrix: end -->"
    assert text.count(begin) == text.count(end) == 1 and text.index(begin) < text.index(end)

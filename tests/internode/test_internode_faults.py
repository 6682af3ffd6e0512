"""The fault matrix on several nodes (`python tests/faults --nodes`), only for symm: observations match promises.

The limits for an idle machine are multiplied by 2.5, because other tests may run at the same time. The slow part, which
runs some single-node cases on two nodes, multiplies them by ten.
"""

from __future__ import annotations

import pytest
from faults import processes
from faults.case import broken
from faults.cases import every_case
from faults.nodes import over_nodes
from faults.runner import guarded

CASES = {case.name: case for case in over_nodes(list(every_case().values()))}


def kept(name: str, patience: float) -> None:
    """Runs a case and fails unless every promise was kept."""
    found = broken(CASES[name].promise, guarded(CASES[name], "symm", 60), patience)
    assert not found, "\n".join(found)


def rows(*titles: str) -> pytest.MarkDecorator:
    """All multi-node cases whose row starts with one of these."""
    names = [case.name for case in CASES.values() if case.where == "nodes" and case.row.startswith(titles)]
    assert names, titles
    return pytest.mark.parametrize("name", names)


@pytest.mark.timed
@rows("SIGKILL of a rank of several nodes", "all ranks of a node")
def test_p2_p3_p4_a_death_is_heard_of_on_all_nodes(name: str) -> None:
    kept(name, 1 if "stopped" in name else 2.5)


@pytest.mark.timed
@rows("a collective that ranks of one node refuse", "a message that a rank of another node refuses")
def test_p9_what_is_refused_is_told_to_other_nodes(name: str) -> None:
    kept(name, 4)


@pytest.mark.timed
@rows("refusals that disturb")
def test_p9_what_is_repeated_rightly_or_refused_by_all_disturbs_no_node(name: str) -> None:
    kept(name, 4)


@pytest.mark.timed
@rows("abort ")
def test_p10_an_abort_releases_calls_on_all_nodes(name: str) -> None:
    kept(name, 2.5)


@pytest.mark.timed
@rows("SIGSTOP", "a rank that calls nothing", "ranks of other nodes leave")
def test_p1_p5_p6_a_rank_that_is_late_or_leaves_is_not_a_dead_one(name: str) -> None:
    kept(name, 10)


@rows("a rank of several nodes that calls after half the timeout")
def test_a_rank_that_is_late_for_other_nodes_is_named_in_a_warning(name: str) -> None:
    kept(name, 10)


@rows("SIGKILL of a rank whose node connects")
def test_p11_a_death_while_nodes_connect_leaves_no_thread(name: str) -> None:
    kept(name, 10)


@pytest.mark.timed
@rows("mismatches between")
def test_p7_lengths_or_calls_that_differ_are_a_mismatch_on_all_nodes(name: str) -> None:
    kept(name, 10)


@rows("a rank of several nodes never makes")
def test_p6_p15_all_name_the_rank_that_never_makes_a_group(name: str) -> None:
    kept(name, 10)


@pytest.mark.timed
@rows("new_group with a rank of several nodes that is known to be dead")
def test_p15_a_new_group_fails_at_once_on_all_nodes_if_a_member_is_dead(name: str) -> None:
    kept(name, 4)


@pytest.mark.slow
@rows("a rank of other nodes never makes")
def test_p6_p15_so_do_all_in_other_layouts(name: str) -> None:
    kept(name, 10)


@rows("a send that is refused", "100 ×")
@pytest.mark.slow
@pytest.mark.timed
def test_p9_p11_what_nodes_do_of_their_own(name: str) -> None:
    kept(name, 10)


@pytest.mark.timed
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    (
        "killed rank 0",
        "segmentation fault",
        "stopped, short timeout",
        "mismatch: dtype of the same width",
        "mismatch: one call left out",
        "argument: freed storage",
        "argument: output too short on one rank",
        "abort from a second thread",
    ),
)
def test_what_was_seen_on_two_nodes_is_what_was_promised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "NODES", 2)
    kept(name, 10)

"""The fault matrix (`tests/faults`), only for symm: the observations match the promises.

`make faults` runs all of it, also on Gloo, with time limits for an idle node. In these tests, limits are ten times as
long unless a test says otherwise, because other tests may run at the same time.
"""

from __future__ import annotations

import os

import pytest
from faults.case import broken
from faults.cases import every_case
from faults.runner import guarded

CASES = {name: case for name, case in every_case().items() if "symm" in case.sides and case.where != "nodes"}
PATIENCE = 10.0


def kept(name: str, patience: float = PATIENCE, limit: float = 60) -> None:
    """Runs a case and fails unless every promise was kept."""
    case = CASES[name]
    outcome = guarded(case, "symm", limit)
    if any(saw.kind == "PermissionError" for saw in outcome.saw.values()):
        pytest.skip("this process may not mount a file system of its own")
    found = broken(case.promise, outcome, patience)
    assert not found, "\n".join(found)


def rows(*titles: str) -> pytest.MarkDecorator:
    """All cases whose row or name starts with one of these."""
    names = [name for name, case in CASES.items() if name.startswith(titles) or case.row.startswith(titles)]
    assert names, titles
    return pytest.mark.parametrize("name", names)


@pytest.mark.timed
@rows(
    "SIGKILL of rank 1 inside a 64", "SIGKILL inside 4 KB", "SIGKILL of rank 1 while", "SIGKILL of rank 1 inside an all"
)
def test_p2_p3_p13_p23_a_death_is_named_in_every_wait_and_survivors_go_on(name: str) -> None:
    kept(name)


@pytest.mark.timed
def test_p2_sixteen_ranks_notice_within_seconds() -> None:
    kept("killed among 16 ranks", 3)


@pytest.mark.timed
@rows("SIGKILL of the other of two ranks")
def test_p2_a_death_is_heard_within_100_ms(name: str) -> None:
    kept(name)


@pytest.mark.timed
@rows("SIGKILL of rank 1, whose last message", "a message of 256 MB")
def test_p2_what_had_come_whole_is_delivered_and_nothing_else(name: str) -> None:
    kept(name)


@pytest.mark.timed
def test_p3_torchrun_and_its_error_files_say_why() -> None:
    kept("killed under torchrun")


@pytest.mark.timed
def test_p4_children_of_the_dead_do_not_hide_it() -> None:
    kept("killed, child lives")


@pytest.mark.timed
@rows("SIGSTOP of rank 1", "a rank that calls")
def test_p1_p5_p6_a_rank_that_is_late_is_named_with_what_it_does(name: str) -> None:
    kept(name)


@pytest.mark.timed
@rows("mismatch")
def test_p7_p13_p23_disagreement_is_told_to_all_and_writes_nothing(name: str) -> None:
    kept(name)


@pytest.mark.timed
@pytest.mark.parametrize("name", ("columns of a matrix", "expanded", "freed storage", "input that ranks do not divide"))
def test_p8_odd_tensors_are_served_or_refused_and_neighbours_untouched(name: str) -> None:
    kept(f"argument: {name}")


@pytest.mark.timed
@rows("a collective that rank 1 refuses", "a message that rank 1 refuses")
def test_p9_what_a_rank_refuses_is_told_to_the_ranks_that_wait_for_it(name: str) -> None:
    kept(name)


@pytest.mark.timed
@rows("refusals that disturb")
def test_p9_what_is_repeated_rightly_or_refused_by_all_disturbs_no_rank(name: str) -> None:
    kept(name)


@pytest.mark.timed
@rows("abort / destroy from a second thread", "_abort_process_group")
def test_p10_a_second_thread_releases_a_blocked_call(name: str) -> None:
    kept(name)


@pytest.mark.timed
def test_p11_destroying_with_work_outstanding_waits_for_the_timeout_at_most() -> None:
    kept("destroy with work outstanding", 5)


@pytest.mark.timed
def test_p11_p14_programs_end_quickly_and_quietly_and_say_why() -> None:
    # If ranks take turns on a core, each one is later in proportion to the number of ranks.
    kept("programs end", 4 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)), 200)


@rows("a process of multiprocessing")
def test_so_does_a_process_of_multiprocessing(name: str) -> None:
    # Spawned ranks import torch again, which takes longer on a busy node.
    kept(name, limit=150)


def test_a_rank_that_has_left_ends_only_messages_with_itself() -> None:
    kept("leaves while others send")


def test_p12_nothing_is_left_when_all_are_killed() -> None:
    kept("all ranks killed")


@pytest.mark.timed
def test_p15_a_new_group_with_a_rank_that_is_known_to_be_dead_fails_at_once() -> None:
    kept("new group with a dead rank")


@rows(
    *("a rank that never joins", "a file:// left", "a fifth process", "the rendezvous port", "file:// in a missing"),
    "RLIMIT_NOFILE",
)
def test_p15_what_keeps_a_group_from_forming_is_named(name: str) -> None:
    kept(name)


@pytest.mark.timed
@rows("rank 0 fails twice", "a rank that joins 0.5 s")
def test_p13_p15_ranks_that_come_late_or_again_join(name: str) -> None:
    kept(name)


@pytest.mark.timed
@pytest.mark.parametrize("name", ("garbage and mutants", "no descriptors left", "100 answers unread"))
def test_p18_hostile_peers_and_bad_clients_cost_the_others_nothing(name: str) -> None:
    kept(f"store: {name}")


@pytest.mark.parametrize("name", ("outsider", "address"))
def test_p18_outsiders_are_refused_and_the_address_is_the_one_told(name: str) -> None:
    kept(f"store: {name}")


@rows("memory that rank 0 cannot have", "RLIMIT_AS")
def test_p16_memory_that_cannot_be_had_is_an_error_with_its_size(name: str) -> None:
    kept(name)


@rows("/dev/shm full")
def test_p15_p16_p19_a_bad_dev_shm_or_temporary_folder_has_no_effect(name: str) -> None:
    kept(name)


@pytest.mark.timed
def test_more_ranks_than_cores_take_turns() -> None:
    kept("16 ranks on 4 cores")


@pytest.mark.timed
def test_p11_p17_two_hundred_groups_cost_little() -> None:
    kept("200 groups")


@pytest.mark.timed
def test_p11_p17_a_thousand_groups_one_after_another_leave_nothing() -> None:
    kept("1000 cycles", limit=100)

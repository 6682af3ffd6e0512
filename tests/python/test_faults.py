"""A part of the fault matrix (`tests/faults`), for symm alone: what was seen is what was promised.

`make faults` plays all of it, with Gloo beside it. Limits of time are those of an idle machine there and ten times as
long here, where other tests may run beside this one.
"""

from __future__ import annotations

import re
import resource
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import file_store, meet, run_ranks

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults.case import broken
from faults.cases import all_cases
from faults.runner import guarded

CASES = {case.name: case for case in all_cases()}
PATIENCE = 10.0


def kept(*names: str) -> None:
    """Plays these cases and fails unless every promise was kept."""
    for name in names:
        case = CASES[name]
        found = broken(case.promise, guarded(case, "symm", 60), PATIENCE)
        assert not found, f"{name}: " + "\n".join(found)


@pytest.mark.timed
def test_p2_p3_a_rank_killed_inside_a_large_call_is_named_by_all_and_survivors_go_on() -> None:
    kept("killed in 64 MB")


@pytest.mark.timed
def test_p2_p3_every_way_to_end_is_noticed() -> None:
    kept("killed rank 0", "uncaught exception", "segmentation fault")


def test_p2_sixteen_ranks_notice_within_a_second() -> None:
    kept("killed among 16 ranks")


def test_p3_torchrun_and_its_error_files_say_why() -> None:
    kept("killed under torchrun")


@pytest.mark.timed
def test_p4_children_of_the_dead_do_not_hide_it() -> None:
    kept("killed, child lives")


def test_p5_p6_a_stopped_rank_is_late_and_called_stopped() -> None:
    kept("stopped, short timeout")


@pytest.mark.timed
@pytest.mark.parametrize(
    "name", ("dtype of the same width", "20 MB among 16 MB", "all_to_all splits", "one call left out")
)
def test_p7_disagreement_is_told_to_all_and_writes_nothing(name: str) -> None:
    kept(f"mismatch: {name}")


@pytest.mark.timed
@pytest.mark.parametrize("name", ("columns of a matrix", "expanded", "freed storage", "input that ranks do not divide"))
def test_p8_odd_tensors_are_served_or_refused_and_neighbours_untouched(name: str) -> None:
    kept(f"argument: {name}")


@pytest.mark.timed
@pytest.mark.parametrize("way", ("abort", "destroy"))
def test_p10_a_second_thread_releases_a_blocked_call(way: str) -> None:
    kept(f"{way} from a second thread")


@pytest.mark.parametrize(
    "name",
    (
        "rank missing, by port",
        "rank 0 missing, by port",
        "file of a killed run",
        "duplicate rank while forming",
        "duplicate rank after forming",
        "silent process on the port",
        "file in a missing folder",
        "RLIMIT_NOFILE 5 above what is open",
    ),
)
def test_p15_what_keeps_a_group_from_forming_is_named(name: str) -> None:
    kept(name)


@pytest.mark.timed
@pytest.mark.parametrize("name", ("garbage and mutants", "no descriptors left", "100 answers unread"))
def test_p18_hostile_peers_and_bad_clients_cost_the_others_nothing(name: str) -> None:
    kept(f"store: {name}")


def test_p18_outsiders_are_refused_and_the_address_is_the_one_told() -> None:
    kept("store: outsider", "store: address")


def with_little_memory(rank: int, world: int) -> str:
    """Rank 0's files, of which shared memory is one, may not be longer than 1 MiB."""
    store = file_store("default", world)
    # Else rank 0 may have come and gone before the others open the store, who then begin a new run in it.
    meet("open", rank, world)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    with pytest.raises(dist.DistBackendError) as error:
        dist.init_process_group("symm", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=3))
    return str(error.value)


def test_p16_memory_that_cannot_be_had_is_an_error_with_its_size() -> None:
    for rank, message in enumerate(run_ranks(with_little_memory, 3, backend=None)):
        assert re.search(r"\brank 0 \(pid \d+\)", message), message
        if rank == 0:
            assert re.search(r"size of shared memory: .*; \d+ bytes are needed", message), message


@pytest.mark.parametrize("state", ("full", "read-only"))
def test_p16_a_full_or_read_only_dev_shm_has_no_effect(state: str) -> None:
    case = CASES[f"/dev/shm {state}"]
    outcome = guarded(case, "symm", 60)
    if any(saw.kind == "PermissionError" for saw in outcome.saw.values()):
        pytest.skip("this process may not mount a file system of its own")
    assert not broken(case.promise, outcome, PATIENCE)


@pytest.mark.timed
def test_p17_two_hundred_groups_cost_little() -> None:
    kept("200 groups")

"""The cases with ranks on several nodes, all of which are this machine (``SYMM_TEST_NODE``).

Half of symm's ranks are on each of two nodes; Gloo has no concept of nodes. The promises differ only in their times,
and where ranks of different nodes know less of each other than ranks of one node.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from .case import Case, Promise, Saw
from .deaths import KILLED, TIMEOUT_S
from .destroy import churn
from .processes import WORLD, Stage, scene

#: Seconds until all nodes notice an exit, and a disagreement.
DEATH_S, DISAGREEMENT_S = 0.2, 0.1

#: Prefixes of the names of cases that do not concern nodes, because they use another rendezvous, or test torchrun or
#: stores.
LEFT_OUT = (
    "store:",
    "/dev/shm",
    "16 ranks",
    "200 groups",
    "1000 cycles",
    "killed under torchrun",
    "killed among 16",
    "file ",
    "duplicate rank",
    "silent process",
    "RLIMIT_NOFILE",
)


def over_nodes(cases: list[Case]) -> list[Case]:
    """The cases of ``cases`` that run on several nodes, with their multi-node promises, and the multi-node cases."""
    both = [_promised(case) for case in cases if case.where == "both" and not case.name.startswith(LEFT_OUT)]
    return both + [case for case in cases if case.where == "nodes"]


def _promised(case: Case) -> Case:
    promise = case.promise
    if promise.sees == ("SymmPeerError",):
        # The leader of a node may notice a death before a call does, and its report names no call.
        says = tuple(what for what in promise.says if what not in (r"#\d+", "all_reduce", "barrier"))
        target = f"< {DEATH_S:g} s on all, rank and pid named; a new group < 1 s"
        return replace(case, promise=replace(promise, within=DEATH_S, says=says), target=target)
    if case.name == "stopped, short timeout":
        return replace(case, promise=replace(promise, says=("stopped",)))
    if case.name.startswith("mismatch:"):
        target = case.target.replace("50 ms", f"{DISAGREEMENT_S * 1e3:g} ms")
        return replace(case, promise=replace(promise, within=DISAGREEMENT_S, same=False, quiet=False), target=target)
    if case.name.startswith("argument:"):
        target = case.target.replace("within 100 ms", f"within {DEATH_S * 1e3:g} ms")
        return replace(case, promise=replace(promise, within=max(DEATH_S, promise.within or 0)), target=target)
    return case


def _node_lost(stage: Stage, rank: int, stopped: bool) -> Saw:
    """Both ranks of the second node exit, or are stopped, at once, while the others wait for them."""
    dist.barrier()
    if rank >= stage.world // 2:
        if rank == stage.world - 1:
            stage.now_it_happens()
        stage.meet("lost", rank, range(stage.world // 2, stage.world))
        os.kill(os.getpid(), signal.SIGSTOP if stopped else signal.SIGKILL)
    return stage.observe(lambda: dist.all_reduce(torch.ones(1000)))


def _message_refused(stage: Stage, rank: int) -> Saw:
    """Rank 3 waits for a message of rank 0 that rank 0 cannot send; the others do nothing."""
    dist.barrier()
    if rank == 0:
        time.sleep(0.1)
        stage.now_it_happens()
        freed = torch.ones(64)
        freed.untyped_storage().resize_(0)
        saw = stage.observe(lambda: dist.send(freed, stage.world - 1))
    elif rank == stage.world - 1:
        saw = stage.observe(lambda: dist.recv(torch.ones(64), 0) is None)
    else:
        saw = stage.observe(lambda: None)
    stage.meet("seen", rank, range(stage.world), stage.timeout + 1)
    return saw


def _new_group_after_a_death(stage: Stage, rank: int) -> Saw:
    """Rank 0 is killed, and the others make a group with it once the default group has noticed that."""
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    while not stage.observe(dist.barrier).raised:
        pass
    saw = stage.observe(lambda: dist.new_group(timeout=timedelta(seconds=30)) is None)
    stage.meet("seen", rank, range(1, stage.world))
    return saw


OTHERS = (WORLD // 2, WORLD - 1)
LAYOUT = (WORLD // 2, WORLD // 2)

for _end, _timeout, _promise in (
    ("killed", TIMEOUT_S, Promise(("SymmPeerError",), says=(rf"{KILLED}|gone", 'node "b"'), within=DEATH_S)),
    (
        "stopped",
        20.0,
        Promise(
            ("SymmPeerError",),
            says=(r'node "b" \(ranks 2 and 3\) of group ".*" has not answered for 5\.\d s',),
            not_before=4.5,
            within=7.0,
            nothing_left=False,
        ),
    ),
):
    scene(
        f"all ranks of a node {_end}",
        "all ranks of a node killed, or stopped, at once",
        f"killed: < {DEATH_S:g} s, the node or its ranks named; stopped: 5 to 6 s, the node named",
        _promise,
        "the group's timeout is 6 and 20 s; Gloo's threads stay until then where a node is stopped",
        layout=LAYOUT,
        timeout=_timeout,
        limit=40,
        victims=OTHERS,
    )(partial(_node_lost, stopped=_end == "stopped"))
for _layout, _where in (((2, 1, 1), "with a survivor on its node"), ((1, 1, 2), "the only one on its node")):
    scene(
        f"new group with a dead rank, {_where}",
        "new_group with a rank of several nodes that is known to be dead",
        "< 1 s on all nodes",
        Promise(sees=("SymmPeerError",), says=(r'rank 0 \(node "a", pid \d+\)',), within=1.0),
        layout=_layout,
        timeout=40,
        limit=60,
        victims=(0,),
    )(_new_group_after_a_death)
scene(
    "refused message between nodes",
    "a send that is refused, to a rank of another node that waits for it",
    f"the receiver hears why within {DEATH_S * 1e3:g} ms",
    Promise(sees=("ValueError", "RuntimeError", "SymmMismatchError", "right"), within=DEATH_S),
    layout=LAYOUT,
    timeout=2,
    limit=10,
)(_message_refused)
scene(
    "100 cycles over nodes",
    "100 × new_group, use, destroy",
    "no descriptor or thread per cycle, and no keys but those that Gloo leaves",
    Promise(at_most={"keys_per_cycle": WORLD, "fds_and_threads": 0.0}),
    "over torch's TCPStore",
    layout=LAYOUT,
    timeout=60,
    limit=80,
    over_tcp=True,
)(partial(churn, cycles=100))

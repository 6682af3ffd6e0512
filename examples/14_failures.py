"""Three failures on 4 ranks, each an exception that explains the cause; the program catches it and continues.

    torchrun --standalone --nproc-per-node 4 examples/14_failures.py

1. Ranks disagree on the size of a tensor. 2. A rank is late. 3. A rank is killed: the others create a group of the
survivors, and training continues from the parameters that each of them has.

torchrun ends all ranks when one of its processes fails. The rank that is killed here is a child of such a process,
which exits normally.
"""

import argparse
import os
import re
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch_symm

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--backend", default="symm", choices=["symm"], help="the exceptions are symm's")
parser.parse_args()

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STEPS, KILLED_AT = 20, 10


def say(text: object) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def ranks_disagree() -> None:
    group = dist.new_group()
    try:
        dist.all_reduce(torch.ones(3 if dist.get_rank() == 1 else 4), group=group)
    except torch_symm.SymmMismatchError as error:
        say(f"1. ranks disagree: {error}")
    # A failed group cannot be used again; other groups are not affected.
    dist.destroy_process_group(group)


def a_rank_is_late() -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    if dist.get_rank() == 1:
        time.sleep(2)
    try:
        dist.all_reduce(torch.ones(4), group=group)
    except torch_symm.SymmTimeoutError as error:
        say(f"2. a rank is late: {error}")
    dist.destroy_process_group(group)


def step(parameter: torch.Tensor) -> None:
    """One step towards 1, by the mean of all ranks' gradients."""
    gradient = parameter - 1
    dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
    parameter.sub_(gradient, alpha=0.2)


def survivors_of(error: torch_symm.SymmPeerError) -> None:
    """Joins a default group of all ranks except the one that the message names first."""
    named = re.search(r"rank (\d+)", str(error))
    assert named is not None, error
    dead, rank = int(named[1]), dist.get_rank()
    dist.destroy_process_group()
    # torchrun's own store still exists; the new group has its own keys in it.
    agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(f"survivors of {dead}", agent)
    dist.init_process_group("symm", store=store, rank=rank - (rank > dead), world_size=WORLD - 1)


def train() -> None:
    parameter = torch.full((8,), float(dist.get_rank()))
    dist.broadcast(parameter, 0)
    done = 0
    while done < STEPS:
        if done == KILLED_AT and RANK == WORLD - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.perf_counter()
        try:
            step(parameter)
        except torch_symm.SymmPeerError as error:
            say(f"3. a rank is killed, told after {time.perf_counter() - start:.3f} s: {error}")
            survivors_of(error)
            say(f"   {dist.get_world_size()} ranks go on at step {done}")
            continue
        done += 1
        if done % 5 == 0:
            say(f"   step {done} of {STEPS}: {1 - parameter[0]:.4f} to go")
    everyone = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, parameter)
    assert all(torch.equal(one, parameter) for one in everyone) and abs(1 - parameter[0]) < 0.02


def main() -> None:
    dist.init_process_group("symm")
    ranks_disagree()
    a_rank_is_late()
    train()
    assert dist.get_world_size() == WORLD - 1
    say(f"ok: three failures, each named; {WORLD - 1} of {WORLD} ranks ended with the same parameters")
    dist.destroy_process_group()


if RANK == WORLD - 1 and (child := os.fork()):
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
else:
    main()

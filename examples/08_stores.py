"""Distributes work among the ranks through a store with a secret.

    torchrun --nproc-per-node 4 examples/08_stores.py

Rank 0 serves the store; only processes that know the secret in ``JOB_SECRET`` can use it. The tasks are in a queue, so
fast ranks take more of them.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist

TASKS = 40


def main() -> None:
    """Queues tasks, works on them, and adds up the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default=os.environ.get("BACKEND", "symm"))
    given = parser.parse_args()
    os.environ.setdefault("JOB_SECRET", "in earnest, whatever starts the job hands out a random one")
    dist.init_process_group(given.backend, init_method="symm://?secret_env=JOB_SECRET")
    rank, world = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()

    if rank == 0:
        for task in range(TASKS):
            store.queue_push("tasks", str(task))
    dist.barrier()
    done = torch.zeros(2, dtype=torch.int64)
    while store.queue_len("tasks") > 0:
        try:
            task = store.queue_pop("tasks", block=False)
        except dist.QueueEmptyError:  # another rank was faster
            break
        store.add("taken", 1)
        done += torch.tensor([1, int(task)])
    dist.all_reduce(done)
    if done.tolist() != [TASKS, TASKS * (TASKS - 1) // 2]:
        raise RuntimeError(f"rank {rank}: {done.tolist()} tasks and their sum")
    if rank == 0:
        print(f"{world} ranks took {int(store.get('taken'))} tasks from the queue")
        print("ok: a store with a secret")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""An argument that is rejected on some ranks: ranks of other nodes that wait for them soon get the reason."""

from __future__ import annotations

import time
from itertools import product

import pytest
import ranks
import test_coalescing
import torch
import torch.distributed as dist
from faults.rejections import freed, overlapping
from launch import on_nodes, run_nodes


def test_an_exception_ends_a_block() -> None:
    """Between nodes, the behaviour is the same as within one."""
    run_nodes(test_coalescing.after_exceptions, (1, 1), "symm")


@pytest.mark.timed
def test_one_limit_for_all_parts_of_a_block() -> None:
    run_nodes(test_coalescing.one_limit, (1, 1))


@on_nodes(2, 1)
def test_a_refused_message_does_not_count_once_its_rank_has_made_another_call(rank: int, world_size: int) -> None:
    """Rank 0 rejects a message of rank 2, which is notified, and makes another call before the right one."""
    for peer in (0, 2):
        dist.send(torch.ones(1), 2 - peer) if rank == peer else dist.recv(torch.ones(1), peer) if rank != 1 else None
    for turn, (refused, between) in enumerate(product(("send", "recv", "any"), ("barrier", "message", "receive"))):
        dist.barrier()
        if rank == 0:
            with pytest.raises((ValueError, RuntimeError)):
                if refused == "send":
                    dist.send(freed(), 2, tag=turn)
                else:
                    dist.recv(overlapping(), 2 if refused == "recv" else None, tag=turn)
            time.sleep(0.2)
        if between == "barrier":
            dist.barrier()
        elif between == "receive":
            # A receive with a different tag: rank 2 is not notified that rank 0 has started it.
            if rank == 0:
                work = dist.irecv(torch.ones(1), 2, tag=100 + turn)
            ranks.meet(f"begun-{turn}", rank, world_size)
        elif rank < 2:
            dist.send(torch.ones(1), 1) if rank == 0 else dist.recv(torch.ones(1), 0)
        # Via rank 1, so that rank 2 arrives after the call.
        if rank == 1:
            dist.send(torch.ones(1), 2)
        elif rank == 2:
            dist.recv(torch.ones(1), 1)
        # Rank 2 waits in a message of more than a chunk, because only such a send needs its receive.
        long = torch.full((1 << 20,), float(rank))
        if rank == 0:
            time.sleep(0.2)
            if refused == "send":
                dist.send(long, 2, tag=turn)
            else:
                dist.recv(long, 2 if refused == "recv" else None, tag=turn)
                assert bool((long == 2).all())
        elif rank == 2:
            dist.recv(long, 0, tag=turn) if refused == "send" else dist.send(long, 0, tag=turn)
            assert refused != "send" or bool((long == 0).all())
        if between == "receive" and rank != 1:
            dist.send(torch.ones(1), 0, tag=100 + turn) if rank == 2 else work.wait()

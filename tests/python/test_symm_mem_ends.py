"""torch's symmetric memory on the CPU after the end of its group, of a peer or of a forked child."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch_symm
from ranks import Results, meet, run_ranks
from test_symm_mem_engine import cpu, handle_of


@pytest.mark.timed
def test_after_the_end_of_its_group() -> None:
    """What is mapped stays so; signals fail at once."""

    def body(rank: int, world: int) -> None:
        tensor = cpu(4).fill_(rank)
        handle = handle_of(tensor)
        handle.barrier()
        dist.barrier()
        dist.destroy_process_group()
        meet("destroyed", rank, world)
        start = time.monotonic()
        with pytest.raises(dist.DistBackendError):
            handle.barrier()
        assert time.monotonic() - start < 5
        assert bool((handle.get_buffer(1 - rank, (4,), torch.float32) == 1 - rank).all())
        with pytest.raises(ValueError, match='there is no process group "0"'):
            symm_mem.rendezvous(tensor, "0")
        meet("read", rank, world)

    run_ranks(body, 2)


def killed(wait: str) -> Results:
    def body(rank: int, world: int) -> str:
        handle = handle_of(cpu(4))
        handle.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(torch_symm.SymmPeerError) as caught:
            if wait == "barrier":
                handle.barrier()
            else:
                handle.wait_signal(1, 0)
        assert time.monotonic() - start < 10
        return str(caught.value)

    return run_ranks(body, 2 if wait == "signal" else 4, expect_killed=[1])


@pytest.mark.parametrize("wait", ["barrier", "signal"])
def test_a_killed_peer_is_named(wait: str) -> None:
    messages = killed(wait)
    for rank, message in enumerate(messages):
        assert rank == 1 or "rank 1" in message, messages


def test_a_forked_child_leaves_its_parents_memory_alone() -> None:
    def body(rank: int, world: int) -> None:
        tensor = cpu(64)
        handle = handle_of(tensor)
        tensor.fill_(rank)
        handle.barrier()
        pid = os.fork()
        if pid == 0:
            del tensor, handle
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert bool((handle.get_buffer(1 - rank, (64,), torch.float32) == 1 - rank).all())
        handle.barrier()

    results = run_ranks(body, 2)
    assert all("stays taken" not in log for log in results.logs), results.logs

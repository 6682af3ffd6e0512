"""Helper threads: bits and failures are the same as without them, and no thread is left."""

from __future__ import annotations

import ctypes
import os
import signal
import time
import zlib

import pytest
import torch
import torch.distributed as dist
import torch_symm
from faults.resource_leaks import threads
from ranks import run_ranks

#: More threads than these nodes have cores, so that helpers start late, and ranks wait for them.
THREADS = "3"
#: Numbers of elements of a rank's part: an odd number, and whole chunks.
COUNTS = (300_001, 1 << 19)


def with_threads(threads: str) -> dict[str, str]:
    """The ranks' environment."""
    return {"SYMM_CPU_THREADS": threads}


def helpers() -> int:
    """Number of helper threads in this process."""
    return sum(name == "symm-helper" for name in threads())


def come(count: int) -> None:
    """Makes a long call, and waits for this many helpers, which set their names once they have started."""
    dist.all_reduce(torch.ones(1 << 20))
    deadline = time.monotonic() + 30
    while helpers() != count:
        assert time.monotonic() < deadline, f"{helpers()} of {count} helpers"
        time.sleep(0.001)


def results(rank: int, world: int, threads: str) -> list[int]:
    """The results of every long collective on numbers that reveal the order of a sum."""
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.complex128):
        for count in COUNTS:
            generator = torch.Generator().manual_seed(7 * rank + count)
            mine = (torch.randn(count * world, generator=generator) * 30).to(dtype)
            whole, part = mine.clone(), torch.empty(count, dtype=dtype)
            dist.all_reduce(whole)
            dist.reduce_scatter_tensor(part, mine)
            gathered, exchanged, root = torch.empty_like(mine), torch.empty_like(mine), mine.clone()
            dist.all_gather_into_tensor(gathered, mine[:count])
            dist.all_to_all_single(exchanged, mine)
            dist.reduce(root, world - 1)
            sent = mine.clone()
            dist.broadcast(sent, 1)
            lists = [torch.empty(count, dtype=dtype) for _ in range(world)] if rank == 0 else None
            dist.gather(mine[:count], lists)
            scattered = torch.empty(count, dtype=dtype)
            dist.scatter(scattered, list(mine.chunk(world)) if rank == 0 else None)
            found += [whole, part, gathered, exchanged, sent, scattered, *(lists or [])]
            found += [root] if rank == world - 1 else []
    come(int(threads) - 1)
    dist.destroy_process_group()
    return [checksum(tensor) for tensor in found]


def checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))


@pytest.mark.parametrize("world", [2, 3])
def test_bits_do_not_depend_on_helpers(world: int) -> None:
    alone, helped = (
        run_ranks(results, world, threads, timeout=120, env=with_threads(threads)) for threads in ("1", THREADS)
    )
    assert list(alone) == list(helped)


def ends(rank: int, world: int) -> int:
    dist.all_reduce(torch.ones(1000))
    assert helpers() == 0
    come(int(THREADS) - 1)
    dist.destroy_process_group()
    deadline = time.monotonic() + 30
    while helpers() and time.monotonic() < deadline:
        time.sleep(0.05)
    return helpers()


def test_helpers_end_when_there_is_nothing_to_do() -> None:
    assert list(run_ranks(ends, 2, env=with_threads(THREADS))) == [0, 0]


def killed(rank: int, world: int) -> str:
    tensor = torch.ones(4 << 20)
    dist.all_reduce(tensor)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(torch_symm.SymmPeerError) as raised:
        for _ in range(1000):
            dist.all_reduce(tensor)
    return str(raised.value)


def test_a_dead_rank_is_named() -> None:
    outcome = run_ranks(killed, 3, expect_killed=(1,), env=with_threads(THREADS))
    assert all("rank 1 (pid" in outcome[rank] for rank in (0, 2))

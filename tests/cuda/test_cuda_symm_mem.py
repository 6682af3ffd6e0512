"""torch's symmetric-memory API on this package's memory: windows, signals, graphs, torch's own operators, faults.

Runs on CPU tensors too (SYMM_TEST_DEVICE=cpu), but for what needs streams.
"""

from __future__ import annotations

import gc
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch_symm
from pool import DEVICE, WORLDS, Pool, device, init, meet, needs_gpus, needs_ranks, settle
from symmetric import new_pool

pytestmark = needs_ranks

#: Seconds until a signal that never comes is given up.
SHORT_MS = 300


def group_name() -> str:
    return dist.group.WORLD.group_name


def opened(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, symm_mem._SymmetricMemory]:
    """A tensor of zeros, and its window."""
    tensor = symm_mem.empty(*shape, dtype=dtype, device=device())
    return tensor.zero_(), symm_mem.rendezvous(tensor, group_name())


def pad_is_clear(window: symm_mem._SymmetricMemory) -> bool:
    pad = window.get_signal_pad(window.rank, [symm_mem.get_signal_pad_size() // 4], torch.int32)
    return not bool(pad.any())


def windows(rank: int, world: int) -> None:
    tensor, window = opened(world, 100)
    assert (window.rank, window.world_size) == (rank, world)
    assert window.buffer_ptrs[rank] == tensor.data_ptr() and len(set(window.buffer_ptrs)) == world
    assert window.buffer_size == 4 * world * 100 and window.multicast_ptr == 0
    assert window.buffer_ptrs_dev != 0 and window.signal_pad_ptrs_dev != 0
    assert symm_mem.rendezvous(tensor, group_name()).buffer_ptrs == window.buffer_ptrs
    window.barrier()
    for peer in range(world):
        window.get_buffer(peer, (world, 100), torch.float32)[rank].fill_(10 * world + rank)
    window.barrier()
    expected = torch.arange(world, device=device()) + 10.0 * world
    assert bool((tensor == expected[:, None]).all())
    part = window.get_buffer((rank + 1) % world, (50,), torch.float32, storage_offset=50)
    assert bool((part == 10 * world).all())
    with pytest.raises(RuntimeError):
        window.get_buffer(0, (world, 101), torch.float32)
    with pytest.raises(RuntimeError):
        window.get_buffer(0, (1,), torch.float32, storage_offset=world * 100)
    window.barrier()
    settle()
    assert pad_is_clear(window)


@pytest.mark.parametrize("world", WORLDS)
def test_every_rank_reaches_every_buffer(pool: Pool, world: int) -> None:
    pool.run(windows, world)


def ring(rank: int, world: int) -> None:
    """A sum goes round, in the memory of the next rank, 100 times."""
    tensor, window = opened(1024)
    after, before = (rank + 1) % world, (rank - 1) % world
    theirs = window.get_buffer(after, (1024,), torch.float32)
    for turn in range(100):
        if rank > 0 or turn > 0:
            window.wait_signal(before, channel=turn % 7 if rank else (turn - 1) % 7)
        torch.add(tensor, 1, out=theirs)
        window.put_signal(after, channel=turn % 7)
    if rank == 0:
        window.wait_signal(before, channel=99 % 7)
        assert bool((tensor == 100 * world).all()), tensor[0]
    settle()
    dist.barrier()
    assert pad_is_clear(window)


@pytest.mark.parametrize("world", WORLDS)
def test_signals_order_what_ranks_write(pool: Pool, world: int) -> None:
    pool.run(ring, world)


def barriers(rank: int, world: int) -> None:
    """Each rank writes into all, then reads what all wrote; the barrier is all that keeps the rounds apart."""
    tensor, window = opened(world)
    peers = [window.get_buffer(peer, (world,), torch.float32) for peer in range(world)]
    seen = []
    for turn in range(200):
        for peer in peers:
            peer[rank] = turn
        window.barrier(channel=turn % 3)
        seen.append(tensor.clone())
        window.barrier(channel=3)
    assert all(bool((each == turn).all()) for turn, each in enumerate(seen))
    settle()
    assert pad_is_clear(window)


@pytest.mark.parametrize("world", WORLDS)
def test_barriers_keep_rounds_apart(pool: Pool, world: int) -> None:
    pool.run(barriers, world)


def streams(rank: int, world: int) -> None:
    """Barriers of two streams on two channels, in another order on every rank."""
    _, window = opened(16)
    two = [torch.cuda.Stream() for _ in range(2)]
    for turn in range(50):
        for channel in (0, 1) if (rank + turn) % 2 else (1, 0):
            with torch.cuda.stream(two[channel]):
                window.barrier(channel=channel)
    settle()
    assert pad_is_clear(window)


def graphs(rank: int, world: int) -> None:
    tensor, window = opened(256)
    after, before = (rank + 1) % world, (rank - 1) % world
    theirs, source = window.get_buffer(after, (256,), torch.float32), torch.zeros(256, device=device())

    def step() -> torch.Tensor:
        window.barrier(channel=0)
        theirs.copy_(source)
        window.put_signal(after, channel=1)
        window.wait_signal(before, channel=1)
        return tensor * 2

    step()
    settle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    for turn in range(30):
        source.fill_(100 * turn + rank)
        graph.replay()
        assert bool((result == 2 * (100 * turn + before)).all())
        if turn % 5 == 0:
            source.fill_(7)
            assert bool((step() == 14).all())
    assert pad_is_clear(window)


@needs_gpus
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("what", [streams, graphs])
def test_streams_and_graphs(pool: Pool, what: object, world: int) -> None:
    pool.run(what, world)


def kept(rank: int, world: int, pooled: bool) -> None:
    """Views last when tensors and handles are gone on all ranks, and nobody else gets their memory."""
    count = 1 << 20
    if pooled:
        pool = new_pool()
        with torch.cuda.use_mem_pool(pool):
            tensor = torch.full((count,), float(rank), device=device())
        window = symm_mem.rendezvous(tensor, group_name())
        del pool
    else:
        tensor, window = opened(count)
        tensor.fill_(rank)
    window.barrier()
    views = [window.get_buffer(peer, (count,), torch.float32) for peer in range(world)]
    pad = window.get_signal_pad(rank, (8,), torch.int32)
    settle()
    dist.barrier()
    del tensor, window
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
    others = [symm_mem.empty(count, device=device()).fill_(-1) for _ in range(3)]
    dist.barrier()
    assert all(bool((view == peer).all()) for peer, view in enumerate(views))
    assert not bool(pad.any())
    dist.barrier()
    views[(rank + 1) % world][count // 2 :].fill_(100 + rank)
    settle()
    dist.barrier()
    assert bool((views[rank][count // 2 :] == 100 + (rank - 1) % world).all())
    assert all(bool((other == -1).all()) for other in others)
    dist.barrier()


@pytest.mark.parametrize("world", WORLDS)
def test_a_view_keeps_the_memory(pool: Pool, world: int) -> None:
    pool.run(kept, world, False)


@needs_gpus
@pytest.mark.parametrize("world", WORLDS)
def test_a_view_keeps_the_memory_of_a_pool(pool: Pool, world: int) -> None:
    pool.run(kept, world, True)


def given_back(rank: int, world: int) -> None:
    """Memory is free again once the last of tensor, handle and view goes, whichever that is."""
    opened(4)
    settle()
    dist.barrier()
    before = torch.cuda.mem_get_info()[0]
    bytes_ = 256 << 20
    for last in range(3):
        for _ in range(4):
            tensor, window = opened(bytes_ // 4)
            held = [[tensor], [window], [window.get_buffer(rank, (8,), torch.float32)]]
            window.barrier()
            del tensor, window
            settle()
            dist.barrier()
            for step in (1, 2):
                held[(last + step) % 3].clear()
            assert before - torch.cuda.mem_get_info()[0] > bytes_ // 2
            dist.barrier()
            held[last].clear()
            dist.barrier()
        assert before - torch.cuda.mem_get_info()[0] < bytes_ // 2, f"{last} was the last"
        dist.barrier()


def recorded(rank: int, world: int) -> None:
    """What a graph has recorded stays while its group does, though nothing else shows it any more."""
    tensor, window = opened(1 << 20)
    tensor.fill_(7 + rank)
    theirs = window.get_buffer((rank + 1) % world, (1 << 20,), torch.float32)
    out = torch.zeros(1 << 20, device=device())

    def step(window: symm_mem._SymmetricMemory, theirs: torch.Tensor) -> None:
        window.barrier()
        out.copy_(theirs)
        window.barrier(channel=1)

    step(window, theirs)
    settle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(window, theirs)
    dist.barrier()
    del tensor, window, theirs
    gc.collect()
    others = [opened(1 << 20) for _ in range(3)]
    for _ in range(5):
        out.zero_()
        graph.replay()
        assert bool((out == 7 + (rank + 1) % world).all())
    assert not any(bool(other.any()) for other, _ in others)
    dist.barrier()


@needs_gpus
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("what", [given_back, recorded])
def test_memory_lasts_as_long_as_it_is_used(pool: Pool, what: object, world: int) -> None:
    pool.run(what, world)


def operators(rank: int, world: int) -> None:
    ops, name = torch.ops.symm_mem, group_name()
    for dtype in (torch.float32, torch.bfloat16):
        for count in (64, 4096 * world, 1 << 20):
            tensor, _ = opened(count, dtype=dtype)
            generator = torch.Generator().manual_seed(count)
            data = torch.randn(world, count, generator=generator).to(dtype)
            expected = data.float().sum(0).to(dtype)
            near = {"atol": 0.1, "rtol": 0.05} if dtype == torch.bfloat16 else {"atol": 1e-4, "rtol": 1e-4}
            tensor.copy_(data[rank])
            got = ops.one_shot_all_reduce(tensor, "sum", name)
            torch.testing.assert_close(got.cpu(), expected, **near)
            out = torch.empty_like(got)
            ops.one_shot_all_reduce_out(tensor, "sum", name, out)
            torch.testing.assert_close(out.cpu(), expected, **near)
            got = ops.one_shot_all_reduce_copy(tensor, data[rank].to(device()), "sum", name)
            torch.testing.assert_close(got.cpu(), expected, **near)
            tensor.copy_(data[rank])
            dist.barrier()
            ops.two_shot_all_reduce_(tensor, "sum", name)
            torch.testing.assert_close(tensor.cpu(), expected, **near)
            tensor.copy_(data[rank])
            dist.barrier()
            part = torch.empty(count // world, dtype=dtype, device=device()) if count % world == 0 else None
            if part is not None and count > 64:
                ops.reduce_scatter_out(tensor, name, False, part)
                torch.testing.assert_close(part.cpu(), expected.chunk(world)[rank], **near)
    tensor, _ = opened(64, dtype=torch.uint32)
    ops.memset32_(tensor, 3, 7, 5)
    ops.stream_write_value32_(tensor, 20, 9)
    expected = torch.zeros(64, dtype=torch.int32)
    expected[3:8], expected[20] = 7, 9
    settle()
    assert torch.equal(tensor.cpu().view(torch.int32), expected)
    dist.barrier()
    remote = ops.get_remote_tensors(tensor, name)
    assert len(remote) == world and all(torch.equal(each.cpu().view(torch.int32), expected) for each in remote)
    dist.barrier()


@pytest.mark.parametrize("world", WORLDS)
def test_torchs_operators_work_on_it(pool: Pool, world: int) -> None:
    pool.run(operators, world)


def late(rank: int, world: int, what: str) -> None:
    """Rank 0 waits for what never comes; its error names whom, and the process goes on."""
    _, window = opened(64)
    settle()
    dist.barrier()
    text = ""
    if rank == 0:
        begun = time.monotonic()
        with pytest.raises(torch_symm.SymmTimeout) as raised:
            if what == "wait":
                window.wait_signal(1, channel=2, timeout_ms=SHORT_MS)
            elif what == "put":
                window.put_signal(1, channel=2, timeout_ms=SHORT_MS)
                window.put_signal(1, channel=2, timeout_ms=SHORT_MS)
            else:
                window.barrier(channel=2, timeout_ms=SHORT_MS)
            # On a GPU a later call tells.
            settle()
            window.barrier(channel=5, timeout_ms=SHORT_MS)
        assert time.monotonic() - begun < 5
        text = str(raised.value)
        assert "rank 1" in text and "channel 2" in text and f"pid {os.getpid()}" in text, text
    meet("named", rank, world)
    # The device and the process are as good as new; so is a new group.
    assert float(torch.ones(8, device=device()).sum()) == 8
    dist.destroy_process_group()
    init(rank, world, name="again")
    _, window = opened(64)
    window.barrier()
    tensor = torch.ones(100, device=device())
    dist.all_reduce(tensor)
    assert float(tensor[0]) == world


@pytest.mark.parametrize("what", ["wait", "put", "barrier"])
@pytest.mark.parametrize("world", WORLDS)
def test_a_peer_that_never_signals_is_named(pool: Pool, world: int, what: str) -> None:
    pool.run(late, world, what)


def killed(rank: int, world: int) -> str:
    """The last rank dies; the others are in a barrier with it."""
    _, window = opened(64)
    window.barrier()
    settle()
    dist.barrier()
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(torch_symm.SymmPeerError) as raised:
        while True:
            window.barrier(timeout_ms=20_000)
            settle()
    assert time.monotonic() - begun < 10
    assert float(torch.ones(8, device=device()).sum()) == 8
    return str(raised.value)


@pytest.mark.parametrize("world", WORLDS)
def test_a_killed_peer_ends_the_barrier(pool: Pool, world: int) -> None:
    texts = pool.run(killed, world, killed=[world - 1])
    assert all(f"rank {world - 1}" in text for text in texts[:-1]), texts


def again(rank: int, world: int) -> list[int]:
    """Memory is made, shared and given back 60 times."""
    found = []
    for turn in range(60):
        tensor, window = opened(1 << 20)
        window.barrier()
        window.get_buffer((rank + 1) % world, (1 << 20,), torch.float32).fill_(turn)
        window.barrier()
        assert bool((tensor == turn).all()), turn
        window.barrier()
        settle()
        dist.barrier()
        del tensor, window
        gc.collect()
        if DEVICE == "cuda" and turn % 20 == 0:
            found.append(torch.cuda.mem_get_info()[0])
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_memory_that_is_given_back_is_given_again(pool: Pool, world: int) -> None:
    for found in pool.run(again, world):
        assert not found or max(found) - min(found) < 64 << 20, found


def persistent(rank: int, world: int) -> None:
    """An ``alloc_id`` stands for an address and for a window, however often the tensor is made anew."""

    def made(alloc_id: int, count: int = 1000) -> torch.Tensor:
        return symm_mem._SymmetricMemory.empty_strided_p2p(
            (count,), (1,), torch.float32, device(), group_name(), alloc_id
        )

    tensor = made(1)
    address = tensor.data_ptr()
    window = symm_mem.rendezvous(tensor, group_name())
    pointers = window.buffer_ptrs
    with pytest.raises(RuntimeError, match=r"alloc_id == 1"):
        made(1)
    other = made(2)
    assert other.data_ptr() != address
    for turn in range(3):
        window.barrier()
        del tensor, window
        gc.collect()
        tensor = made(1).fill_(100 * turn + rank)
        assert tensor.data_ptr() == address
        window = symm_mem.rendezvous(tensor, group_name())
        assert window.buffer_ptrs == pointers
        window.barrier()
        peer = (rank + 1) % world
        assert bool((window.get_buffer(peer, (1000,), torch.float32) == 100 * turn + peer).all())
    window.barrier()
    del tensor, window
    with pytest.raises(RuntimeError):
        made(1, count=2000)
    settle()


@pytest.mark.parametrize("world", WORLDS)
def test_an_alloc_id_is_an_address(pool: Pool, world: int) -> None:
    pool.run(persistent, world)


def mismatched(rank: int, world: int) -> None:
    tensor = symm_mem.empty(1024 if rank else 2048, device=device())
    with pytest.raises(torch_symm.SymmMismatch, match=r"8192 bytes.*4096 bytes"):
        symm_mem.rendezvous(tensor, group_name())
    # As torch says it: callers ask whether a tensor lies there.
    assert symm_mem.rendezvous(torch.zeros(64, device=device()), group_name()) is None
    _, window = opened(64)
    window.barrier()
    settle()


@pytest.mark.parametrize("world", WORLDS)
def test_what_does_not_fit_together_is_refused(pool: Pool, world: int) -> None:
    pool.run(mismatched, world)


def pools(rank: int, world: int) -> None:
    """Tensors of a pool are symmetric memory; sub-groups and two groups on one allocation are apart."""
    memory = symm_mem.get_mem_pool(device())
    with torch.cuda.use_mem_pool(memory):
        tensor = torch.full((1 << 16,), float(rank), device=device())
    window = symm_mem.rendezvous(tensor, group_name())
    window.barrier()
    peer = (rank + 1) % world
    assert bool((window.get_buffer(peer, (1 << 16,), torch.float32) == peer).all())
    second = dist.new_group(list(range(world)))
    other = symm_mem.rendezvous(tensor, second.group_name)
    other.barrier(channel=1)
    window.barrier(channel=1)
    settle()


@needs_gpus
@pytest.mark.parametrize("world", WORLDS)
def test_tensors_of_torchs_pools(pool: Pool, world: int) -> None:
    pool.run(pools, world)

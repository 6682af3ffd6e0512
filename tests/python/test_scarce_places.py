"""Groups where the machine is short of something: descriptors, room in /dev/shm, folders to write to."""

from __future__ import annotations

import ctypes
import os
import resource
import time
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
import torch_symm
from ranks import init, meet, run_ranks

CLONE_NEWNS = 0x20000
MS_RDONLY, MS_REC, MS_PRIVATE = 1, 0x4000, 0x40000

libc = ctypes.CDLL(None, use_errno=True)


def mounts_of_its_own() -> None:
    """This process sees mounts of its own from here on; raises ``OSError`` where it may not."""
    if libc.unshare(CLONE_NEWNS) != 0 or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) != 0:
        raise OSError(ctypes.get_errno(), "unshare")


def mount_tmpfs(place: str | Path, flags: int, options: str) -> None:
    if libc.mount(b"tmpfs", str(place).encode(), b"tmpfs", flags, options.encode()) != 0:
        raise OSError(ctypes.get_errno(), f"mount at {place}")


def may_mount() -> bool:
    pid = os.fork()
    if pid == 0:
        try:
            mounts_of_its_own()
            mount_tmpfs("/dev/shm", 0, "size=64k")
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


def works(rank: int, world: int) -> None:
    """Collectives and messages of every size class."""
    for count in (1, 5_000, 3_000_000):
        dist.all_reduce(tensor := torch.ones(count))
        assert bool((tensor == world).all())
    received = torch.zeros(1_000_000)
    messages = [
        dist.P2POp(dist.isend, torch.full((1_000_000,), float(rank)), (rank + 1) % world),
        dist.P2POp(dist.irecv, received, (rank - 1) % world),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    assert bool((received == (rank - 1) % world).all())


@pytest.mark.parametrize("how", ("full", "read-only"))
def test_p16_a_full_or_readonly_shared_memory_folder_does_not_matter(how: str) -> None:
    """Memory of a group has no name and takes nothing of /dev/shm."""
    if not may_mount():
        pytest.skip("this process may not mount")

    def body(rank: int, world: int) -> None:
        mounts_of_its_own()
        mount_tmpfs("/dev/shm", MS_RDONLY if how == "read-only" else 0, "size=4k")
        if how == "full":
            Path("/dev/shm/all").write_bytes(bytes(4096))
        init(rank, world)
        works(rank, world)

    run_ranks(body, 2, backend=None)


def test_p15_a_readonly_temporary_folder_does_not_matter() -> None:
    if not may_mount():
        pytest.skip("this process may not mount")

    def body(rank: int, world: int) -> None:
        mounts_of_its_own()
        place = ranks.scratch / "readonly"
        place.mkdir(exist_ok=True)
        mount_tmpfs(place, MS_RDONLY, "size=4k")
        os.environ["TMPDIR"] = str(place)
        init(rank, world)
        works(rank, world)

    run_ranks(body, 2, backend=None)


def test_p19_a_long_temporary_folder_does_not_matter_and_a_long_socket_is_refused_by_name() -> None:
    """Longer than the 107 bytes that a socket's path may have."""

    def body(rank: int, world: int) -> None:
        place = ranks.scratch / ("d" * 100) / ("e" * 100)
        place.mkdir(parents=True, exist_ok=True)
        os.environ["TMPDIR"] = str(place)
        store = torch_symm.FileStore(place / "store", world)
        dist.init_process_group("symm", store=store, rank=rank, world_size=world)
        works(rank, world)
        with pytest.raises(ValueError, match="at most 107"):
            torch_symm.TCPStore(f"unix:{place}/socket", 0, 1, is_master=True)

    run_ranks(body, 2, backend=None)


def open_descriptors() -> int:
    return max(int(name) for name in os.listdir("/proc/self/fd")) + 1


@pytest.mark.parametrize("spare", (0, 2, 4))
def test_p15_too_few_descriptors_on_one_rank_are_an_error_on_all(spare: int) -> None:
    """Rank 0 may open ``spare`` descriptors more than it has: all join, or all hear why not, soon."""

    def body(rank: int, world: int) -> str:
        dist.barrier()
        dist.destroy_process_group()
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        if rank == 0:
            # The lowest free numbers are taken first.
            gaps = open_descriptors() - len(os.listdir("/proc/self/fd")) + 1
            held = [os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC) for _ in range(max(gaps, 0))]
            resource.setrlimit(resource.RLIMIT_NOFILE, (open_descriptors() + spare, limits[1]))
        outcome = "joined"
        started = time.monotonic()
        try:
            init(rank, world, timeout=8, name="scarce")
            dist.all_reduce(tensor := torch.ones(3))
            assert bool((tensor == world).all())
        except (dist.DistBackendError, dist.DistStoreError) as error:
            outcome = str(error)
        taken = time.monotonic() - started
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        if rank == 0:
            for descriptor in held:
                os.close(descriptor)
        if dist.is_initialized():
            dist.destroy_process_group()
        meet("tried", rank, world)
        # What failed for want of descriptors leaves nothing behind that would hinder the next.
        init(rank, world, name="ample")
        works(rank, world)
        assert taken < 9, taken
        return outcome

    outcomes = run_ranks(body, 3)
    assert spare > 0 or "joined" not in outcomes
    if "joined" not in outcomes:
        assert "Too many open files" in outcomes[0] or "RLIMIT_NOFILE" in outcomes[0], outcomes[0]
        assert all("rank 0" in outcome or "open files" in outcome for outcome in outcomes[1:]), outcomes
    else:
        assert outcomes == ["joined"] * 3

"""Tensors as users have them: misaligned, strided, of another layout on each rank, parts of larger ones."""

from __future__ import annotations

import math
import mmap
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import expected
import pytest
import ranks
import torch
import torch.distributed as dist
from expected import assert_same_bits
from ranks import run_ranks


def laid_out(flat: torch.Tensor, shape: tuple[int, ...], layout: str) -> torch.Tensor:
    """A fresh tensor of ``shape`` that holds ``flat`` in logical order and lies in memory as ``layout`` says."""
    count = flat.numel()
    if layout == "transposed" and len(shape) >= 2:
        result = torch.empty(shape[::-1], dtype=flat.dtype).permute(*reversed(range(len(shape))))
    elif layout == "strided":
        result = torch.zeros((*shape, 2), dtype=flat.dtype)[..., 1]
    elif layout == "channels_last" and len(shape) == 4:
        result = torch.empty(shape, dtype=flat.dtype, memory_format=torch.channels_last)
    elif layout == "offset":
        result = torch.zeros(count + 3, dtype=flat.dtype)[3:].view(shape)
    elif layout == "misaligned" and count:
        # Filled as bytes: torch's own copy of some types needs alignment.
        buffer = bytearray(1) + bytearray(flat.contiguous().view(torch.uint8).numpy())
        return torch.frombuffer(buffer, dtype=flat.dtype, count=count, offset=1).view(shape)
    else:
        result = torch.empty(shape, dtype=flat.dtype)
    return result.copy_(flat.view(shape))


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements at an even address, for torch's own operators, some of which need alignment."""
    if tensor.data_ptr() % max(tensor.element_size(), 16) == 0 or not tensor.is_contiguous():
        return tensor.contiguous()
    return tensor.view(torch.uint8).clone().view(tensor.dtype)


def odd_places(rank: int, world: int) -> None:
    """Every collective and dtype on tensors that start at an odd address, and on every second element of others."""
    for dtype in expected.DTYPES:
        for count in (33, 70_001):
            inputs = [expected.seeded(dtype, (count,), 3 + r) for r in range(world)]
            wide = [expected.seeded(dtype, (world * count,), 30 + r) for r in range(world)]
            parts = [each.view(world, count)[rank] for each in wide]
            for layout in ("misaligned", "strided"):
                about = f"{expected.name(dtype)} x{count} {layout}"

                def same(got: torch.Tensor, wanted: torch.Tensor, what: str, about: str = about) -> None:
                    assert_same_bits(settled(got), wanted, f"{what} {about}")

                def lay(flat: torch.Tensor, layout: str = layout) -> torch.Tensor:
                    return laid_out(flat, flat.shape, layout)

                dist.all_reduce(tensor := lay(inputs[rank]))
                same(tensor, expected.reduced("SUM", inputs), "all_reduce")
                dist.reduce(tensor := lay(inputs[rank]), 1)
                wanted = expected.reduced("SUM", inputs) if rank == 1 else inputs[rank]
                same(tensor, wanted, "reduce")
                dist.broadcast(tensor := lay(inputs[rank]), 2)
                same(tensor, inputs[2], "broadcast")
                dist.all_gather(outputs := [lay(inputs[rank]) for _ in range(world)], lay(inputs[rank]))
                same(torch.cat([settled(each) for each in outputs]), torch.cat(inputs), "all_gather")
                dist.all_gather_into_tensor(output := lay(wide[0]), lay(inputs[rank]))
                same(output, torch.cat(inputs), "all_gather_into_tensor")
                dist.reduce_scatter_tensor(output := lay(inputs[0]), lay(wide[rank]))
                same(output, expected.reduced("SUM", parts), "reduce_scatter_tensor")
                dist.all_to_all_single(output := lay(wide[0]), lay(wide[rank]))
                same(output, torch.cat(parts), "all_to_all_single")
                dist.scatter(output := lay(inputs[0]), [lay(each) for each in inputs] if rank == 0 else None, 0)
                same(output, inputs[rank], "scatter")
                works = dist.batch_isend_irecv(
                    [
                        dist.P2POp(dist.isend, lay(inputs[rank]), (rank + 1) % world),
                        dist.P2POp(dist.irecv, output := lay(inputs[0]), (rank - 1) % world),
                    ]
                )
                for work in works:
                    work.wait()
                same(output, inputs[rank - 1], "batch")


def test_odd_addresses_and_strides() -> None:
    run_ranks(odd_places, 3)


def all_to_all_lists(rank: int, world: int) -> None:
    """Shapes that differ between every pair of ranks, empty ones among them; splits that are empty for some."""
    rows = [[(a + 2 * b) % 3 for b in range(world)] for a in range(world)]
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        for width in (1, 1000, 90_000):
            inputs = [torch.full((rows[rank][b], width), 10 * rank + b).to(dtype) for b in range(world)]
            outputs = [torch.zeros(rows[a][rank], width, dtype=dtype) for a in range(world)]
            wanted = [torch.full((rows[a][rank], width), 10 * a + rank).to(dtype) for a in range(world)]
            dist.all_to_all(outputs, inputs)
            for output, right in zip(outputs, wanted, strict=True):
                assert torch.equal(output, right)
            output = torch.zeros(sum(rows[a][rank] for a in range(world)), width, dtype=dtype)
            dist.all_to_all_single(output, torch.cat(inputs), [rows[a][rank] for a in range(world)], rows[rank])
            assert torch.equal(output, torch.cat(wanted))


def test_all_to_all_of_uneven_parts() -> None:
    run_ranks(all_to_all_lists, 4)


def test_splits_whose_sum_wraps_are_refused() -> None:
    """2^63 - 1, twice, and 6 are 4 in 64 bits."""

    def body(rank: int, world: int) -> None:
        wraps = [2**63 - 1, 2**63 - 1, 6]
        for sent, received in ((wraps, wraps), (wraps, None), (None, wraps)):
            given, got = (torch.zeros(4 if splits else 6) for splits in (sent, received))
            with pytest.raises(
                ValueError, match=r"Split sizes .* \[9223372036854775807, 9223372036854775807, 6\], dim 0 is 4"
            ):
                dist.all_to_all_single(got, given, received, sent)
        dist.barrier()

    run_ranks(body, 3)


def test_ranks_with_different_layouts() -> None:
    """Elements meet by position in the tensor, however each rank has laid it out."""

    def body(rank: int, world: int) -> None:
        for shape in ((2, 3, 4, 5), (4, 16, 64, 65)):
            count = math.prod(shape)
            flats = [torch.arange(count, dtype=torch.float32) + r for r in range(3)]
            mine = laid_out(flats[rank], shape, ("contiguous", "channels_last", "strided")[rank])
            dist.all_reduce(mine)
            assert_same_bits(mine, sum(flats[1:], flats[0]).view(shape), "all_reduce")
            mine = laid_out(flats[rank], shape, ("contiguous", "channels_last", "strided")[rank])
            dist.broadcast(mine, 1)
            assert_same_bits(mine, flats[1].view(shape), "broadcast")

    run_ranks(body, 3)


def test_views_leave_their_neighbours_alone() -> None:
    """Only the elements of the tensor are written."""

    def body(rank: int, world: int) -> None:
        for rows in (5, 2000):
            whole = torch.full((rows, 9), -1.0)
            part = whole[:, 2:7]
            part.fill_(rank + 1.0)
            dist.all_reduce(part)
            assert bool((part == 6).all())
            assert bool((whole[:, :2] == -1).all()) and bool((whole[:, 7:] == -1).all())
            whole = torch.full((rows, 9), -1.0)
            dist.all_gather_into_tensor(whole[:3, 1:3].t(), torch.full((2,), float(rank)))
            assert whole[:3, 1:3].t().reshape(-1).tolist() == [0, 0, 1, 1, 2, 2]
            assert float(whole.sum()) == 6 - (rows * 9 - 6)

    run_ranks(body, 3)


def test_overlapping_memory_is_refused() -> None:
    """An expanded tensor has one element in many places: writing to it would be wrong."""

    def body(rank: int, world: int) -> str:
        expanded = torch.ones(1).expand(4)
        with pytest.raises((ValueError, RuntimeError)) as info:
            dist.all_reduce(expanded)
        tensor = torch.ones(4)
        dist.all_reduce(tensor)
        assert float(tensor.sum()) == 8
        return str(info.value)

    for message in run_ranks(body, 2):
        assert "share memory" in message, message


def mapped(name: str, access: int) -> torch.Tensor:
    """Ones, in a file that is mapped."""
    path = ranks.scratch / name
    path.write_bytes(torch.ones(4096).numpy().tobytes())
    with path.open("r+b") as file, warnings.catch_warnings():
        # Torch says that writing to it would be undefined.
        warnings.simplefilter("ignore")
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, prot=access), dtype=torch.float32)


def read_only_is_for_inputs(rank: int, world: int) -> None:
    fixed, free = mapped(f"fixed-{rank}", mmap.PROT_READ), mapped(f"free-{rank}", mmap.PROT_READ | mmap.PROT_WRITE)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    outputs: dict[str, Callable[[torch.Tensor], object]] = {
        "all_reduce": dist.all_reduce,
        "columns": lambda out: dist.all_reduce(out.view(64, 64)[:, 1:3]),
        "asynchronous": lambda out: dist.all_reduce(out, async_op=True),
        "coalesced": lambda out: dist.all_reduce_coalesced([torch.ones(3), out]),
        "broadcast": lambda out: dist.broadcast(out, 1 - rank),
        "gather": lambda out: backend.allgather([[torch.ones(4096), out]], [torch.ones(4096)]),
        "pieces": lambda out: dist.all_to_all_single(out, torch.ones(4096)),
        "recv": lambda out: dist.recv(out, 1 - rank),
        "irecv": lambda out: dist.irecv(out, 1 - rank),
        "from any": lambda out: dist.recv(out),
    }
    for name, call in outputs.items():
        with pytest.raises(ValueError, match=r"memory that may not be written, .* clone"):
            call(fixed)
            pytest.fail(name)
    # The group lives, since all ranks refused, and what is only read may be anywhere.
    parts = [torch.zeros(4096) for _ in range(world)]
    dist.all_gather(parts, fixed)
    dist.broadcast(fixed if rank == 0 else parts[0], 0)
    dist.reduce(parts[1] if rank == 0 else fixed, 0)
    works = [dist.isend(fixed, 1 - rank), dist.irecv(free, 1 - rank)]
    for work in works:
        work.wait()
    for _ in range(2):
        dist.all_reduce(free)
    assert bool((free == 4).all()) and bool((fixed == 1).all()) and bool((parts[0] == 1).all())
    # A storage that takes the place of one that was looked at is looked at itself.
    del free
    for turn in range(20):
        with pytest.raises(ValueError, match="may not be written"):
            dist.all_reduce(mapped(f"fixed-{rank}-{turn}", mmap.PROT_READ))
        dist.all_reduce(mapped(f"free-{rank}-{turn}", mmap.PROT_READ | mmap.PROT_WRITE))


def test_p8_memory_that_is_mapped_read_only_is_refused_as_output() -> None:
    run_ranks(read_only_is_for_inputs, 2)


def test_more_ranks_than_cores() -> None:
    """Eight ranks take turns on the cores; nobody starves."""

    def body(rank: int, world: int) -> None:
        for count in (1, 1000, 100_000):
            for _ in range(5):
                tensor = torch.full((count,), float(rank))
                dist.all_reduce(tensor)
                assert bool((tensor == 28).all())

    run_ranks(body, 8)


def test_barrier_holds_everybody() -> None:
    """Nobody passes a barrier before the last one has reached it."""

    def body(rank: int, world: int) -> None:
        folder: Path = ranks.scratch
        for turn in range(4):
            if rank == turn % 4:
                time.sleep(0.05)
            (folder / f"came-{turn}-{rank}").touch()
            dist.barrier()
            assert len(list(folder.glob(f"came-{turn}-*"))) == 4

    run_ranks(body, 4)

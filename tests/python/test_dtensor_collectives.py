"""Moves of shards, scatters, broadcasts, padding and descriptions of shards, compared with torch's functions."""

from __future__ import annotations

import itertools
import logging
import math
from typing import Any

import expected
import pytest
import torch
import torch.distributed.tensor._collective_utils as torchs
import torch_symm
from norm_reference import same_bits
from ranks import backend_of, run_ranks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch_symm import dtensor, testing
from torch_symm.dtensor import shard_dim_alltoall

#: Meshes of four ranks.
MESHES = ((4,), (2, 2), (4, 1), (1, 4))


def numbered(shape: tuple[int, ...], rank: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape) + 1000 * rank


def cut(whole: torch.Tensor, parts: int, dim: int, index: int) -> torch.Tensor:
    """The part of rank ``index``; empty if ``chunk`` returns fewer parts than ranks."""
    found = whole.chunk(parts, dim)
    return found[index] if index < len(found) else whole.narrow(dim, 0, 0)


def shards(rank: int, world: int, mesh_shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", mesh_shape)
    for shape in ((4, 8), (8, 4), (4, 12, 8), (4, 4, 1, 4), (16,), (0, 4), (4, 0, 8)):
        mine = numbered(shape, rank)
        for mesh_dim in range(mesh.ndim):
            for gather_dim in range(len(shape)):
                for shard_dim in range(-len(shape), len(shape)):
                    if shape[shard_dim] % mesh.size(mesh_dim):
                        continue
                    where = (gather_dim, shard_dim, mesh, mesh_dim)
                    got = shard_dim_alltoall(mine, *where)
                    assert same_bits(got, torchs.shard_dim_alltoall(mine, *where)), (shape, *where)
                    assert got.is_contiguous()
                    assert same_bits(shard_dim_alltoall(mine, gather_dim - len(shape), *where[1:]), got)
    assert same_bits(mine, numbered(shape, rank))
    for shape in ((5, 7), (7, 5, 3), (2, 9), (1, 1), (6, 4), (3, 0, 5), (130, 41)):
        whole = numbered(shape, 0)
        for mesh_dim in range(mesh.ndim):
            ranks, index = mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim)
            for gather_dim in range(len(shape)):
                mine = cut(whole, ranks, gather_dim, index)
                for shard_dim in range(len(shape)):
                    got = shard_dim_alltoall(mine, gather_dim, shard_dim, mesh, mesh_dim, gather_size=shape[gather_dim])
                    wanted = mine if gather_dim == shard_dim else cut(whole, ranks, shard_dim, index)
                    assert same_bits(got, wanted), (shape, gather_dim, shard_dim, mesh_dim)
                    assert got.is_contiguous()


@pytest.mark.parametrize("mesh_shape", (*MESHES, (3,)), ids=str)
def test_even_uneven_and_empty_shards(mesh_shape: tuple[int, ...]) -> None:
    run_ranks(shards, math.prod(mesh_shape), mesh_shape)


@pytest.mark.ranks(4)
def test_every_dtype(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    for dtype in expected.DTYPES:
        whole = expected.seeded(dtype, (8, 12), 7)
        mine = cut(whole, world_size, 0, rank)
        got = shard_dim_alltoall(mine, 0, 1, mesh, 0)
        assert same_bits(got, torchs.shard_dim_alltoall(mine, 0, 1, mesh, 0)), dtype
        assert same_bits(got, cut(whole, world_size, 1, rank)), dtype
        assert same_bits(shard_dim_alltoall(got, 1, 0, mesh, 0), mine), dtype
        uneven = expected.seeded(dtype, (7, 5), 9)
        got = shard_dim_alltoall(cut(uneven, world_size, 0, rank), 0, 1, mesh, 0, gather_size=7)
        assert same_bits(got, cut(uneven, world_size, 1, rank)), dtype
    # Every bit pattern of a float, signalling NaNs included, is unchanged.
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)
    assert same_bits(
        shard_dim_alltoall(cut(patterns, world_size, 0, rank), 0, 1, mesh, 0), cut(patterns, world_size, 1, rank)
    )


@pytest.mark.ranks(4)
def test_inputs_that_are_not_contiguous(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    base = numbered((8, 6, 12), rank)
    odd: list[tuple[torch.Tensor, torch.Tensor]] = [
        (base.transpose(0, 2), base.transpose(0, 2).contiguous()),
        (base[::2, :, 1:9], base[::2, :, 1:9].contiguous()),
        (base[:4, :, :1].expand(4, 6, 8), base[:4, :, :1].expand(4, 6, 8).contiguous()),
        (torch.complex(base, -base).conj(), torch.complex(base, base)),
        (torch._neg_view(base), -base),
    ]
    for strided, plain in odd:
        for gather_dim, shard_dim in ((0, 2), (2, 0), (1, 2)):
            got = shard_dim_alltoall(strided, gather_dim, shard_dim, mesh, 0)
            assert same_bits(got, torchs.shard_dim_alltoall(plain, gather_dim, shard_dim, mesh, 0))
            uneven = shard_dim_alltoall(strided[:, :5], gather_dim, 1 if shard_dim == 2 else 2, mesh, 0)
            again = shard_dim_alltoall(plain[:, :5].contiguous(), gather_dim, 1 if shard_dim == 2 else 2, mesh, 0)
            assert same_bits(uneven, again)


def same_end(name: str, *args: Any, **options: Any) -> None:
    """The function of this name and torch's raise the same class with the same message."""
    found = []
    for module in (dtensor, torchs):
        with pytest.raises(Exception) as caught:
            getattr(module, name)(*args, **options)
        found.append((caught.type, str(caught.value)))
    assert found[0] == found[1]


@pytest.mark.ranks(4)
def test_wrong_arguments_are_refused_as_by_torch(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    mine = numbered((4, 8), rank)
    wrong: list[tuple[Any, ...]] = [(2, 0, mesh, 0), (0, 2, mesh, 0), (0, 1, mesh, 1), (0, 1, mesh, "x")]
    for arguments in wrong:
        same_end("shard_dim_alltoall", mine, *arguments)
    # torch 2.15 interprets this index as dimension 1.
    with pytest.raises(IndexError, match=r"Dimension out of range .* but got -3"):
        shard_dim_alltoall(mine, -3, 0, mesh, 0)
    with pytest.raises(IndexError, match="tensor has no dimensions"):
        shard_dim_alltoall(torch.tensor(1.0), 0, 0, mesh, 0)
    words = f"rank {rank} of 4 holds 4 elements of dimension 0, whose 9 elements are cut into 3, 3, 3, 0"
    with pytest.raises(ValueError, match=words):
        shard_dim_alltoall(mine, 0, 1, mesh, 0, gather_size=9)
    # Nothing was exchanged: the group stays usable.
    assert same_bits(shard_dim_alltoall(mine, 1, 0, mesh, 0), torchs.shard_dim_alltoall(mine, 1, 0, mesh, 0))


@pytest.mark.ranks(3)
def test_ranks_that_wait_learn_of_a_rank_with_another_part(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    mine = torch.zeros(3 if rank == 1 else 2, 6)
    kind, words = (ValueError, "holds 3 elements") if rank == 1 else (torch_symm.SymmMismatchError, "rank 1 .*rejected")
    with pytest.raises(kind, match=words):
        shard_dim_alltoall(mine, 0, 1, mesh, 0, gather_size=6)
    testing.barrier("over")  # a rank that leaves the group would be named for that


@pytest.mark.ranks(4)
def test_ranks_that_hold_other_shapes_are_named(rank: int, world_size: int) -> None:
    """Uneven shards without ``gather_size`` are rejected; on Gloo torch ends the process."""
    mesh = init_device_mesh("cpu", (world_size,))
    with pytest.raises(torch_symm.SymmMismatchError, match="rank 2"):
        shard_dim_alltoall(torch.zeros(1 if rank == 2 else 2, 8), 0, 1, mesh, 0)


@pytest.mark.ranks(2)
def test_no_warning(world_size: int) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("torch.distributed.tensor._collective_utils").addHandler(handler)
    mesh = init_device_mesh("cpu", (world_size,))
    shard_dim_alltoall(torch.zeros(4, 4), 0, 1, mesh, 0)
    assert not records
    torchs.shard_dim_alltoall(torch.zeros(4, 4), 0, 1, mesh, 0)
    assert [record for record in records if "does not support alltoall" in record.getMessage()]


@pytest.mark.ranks(4)
def test_gradients(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    for shape, size in (((8, 12), None), ((7, 5), 7), ((2, 3), 2)):
        whole = numbered(shape, 0)
        weights = torch.arange(float(whole.numel())).view(shape) ** 2
        mine = cut(whole, world_size, 0, rank).clone().requires_grad_()
        moved = shard_dim_alltoall(mine, 0, 1, mesh, 0, gather_size=size)
        (moved * moved * cut(weights, world_size, 1, rank)).sum().backward()
        assert torch.equal(mine.grad, cut(2 * whole * weights, world_size, 0, rank))
        still = shard_dim_alltoall(mine, 0, -2, mesh, 0, gather_size=size)
        assert torch.equal(torch.autograd.grad(still.sum(), mine)[0], torch.ones_like(mine))
    # Differentiated twice: the second derivative of x**3 is 6 x.
    mine = numbered((4, 8), rank).requires_grad_()
    moved = shard_dim_alltoall(mine, 1, 0, mesh, 0)
    (first,) = torch.autograd.grad((moved**3).sum(), mine, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), mine)
    assert torch.equal(second, 6 * mine.detach())


@pytest.mark.ranks(2)
def test_torchs_check_of_the_operator(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    name = mesh.get_group(0).group_name
    operator = torch.ops.torch_symm.shard_dim_alltoall.default
    torch.library.opcheck(operator, (numbered((4, 8), rank).requires_grad_(), 0, 1, None, name))
    uneven = cut(numbered((7, 5), 0), world_size, 0, rank).clone().requires_grad_()
    torch.library.opcheck(operator, (uneven, 0, 1, 7, name))


@pytest.mark.ranks(4)
def test_meta_and_fake_tensors(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    for shape, size in (((4, 8), None), ((7, 5), 7), ((2, 3), 2), ((0, 4), None)):
        for dtype in (torch.float32, torch.complex64, torch.float8_e5m2):
            real = numbered(shape, 0).to(dtype)
            mine = real if size is None else cut(real, world_size, 0, rank).contiguous()
            wanted = shard_dim_alltoall(mine, 0, 1, mesh, 0, gather_size=size)
            before = backend_of().get_sequence_number()
            meta = shard_dim_alltoall(mine.to("meta"), 0, 1, mesh, 0, gather_size=size)
            with FakeTensorMode() as mode:
                fake = shard_dim_alltoall(mode.from_tensor(mine), 0, 1, mesh, 0, gather_size=size)
            after = backend_of().get_sequence_number()
            assert before == after
            assert meta.is_meta and fake.device == mine.device
            for empty in (meta, fake):
                assert (empty.shape, empty.dtype, empty.stride()) == (wanted.shape, wanted.dtype, wanted.stride())
            if size is None:
                assert torchs.shard_dim_alltoall(mine, 0, 1, mesh, 0).shape == meta.shape


@pytest.mark.usefixtures("inductor")
@pytest.mark.ranks(2, timeout=200)
@pytest.mark.parametrize("backend", ("aot_eager", pytest.param("inductor", marks=pytest.mark.slow)))
def test_compiled_without_a_break(rank: int, world_size: int, backend: str) -> None:
    mesh = init_device_mesh("cpu", (world_size,))

    def there_and_back(mine: torch.Tensor) -> torch.Tensor:
        moved = shard_dim_alltoall(mine * 2, 0, 1, mesh, 0)
        return shard_dim_alltoall((moved * moved), 1, 0, mesh, 0) + mine

    fast = torch.compile(there_and_back, backend=backend, fullgraph=True)
    for width in (4, 8, 16, 8):  # from the second on the width is symbolic
        mine = (numbered((3, width), rank) % 7).requires_grad_()  # small integers: exact with any fusion
        other = mine.detach().clone().requires_grad_()
        fast(mine).pow(2).sum().backward()
        there_and_back(other).pow(2).sum().backward()
        assert torch.equal(fast(mine), there_and_back(other))
        assert torch.equal(mine.grad, other.grad)

    def uneven(mine: torch.Tensor) -> torch.Tensor:
        return shard_dim_alltoall(mine, 0, 1, mesh, 0, gather_size=7) + 1

    whole = numbered((7, 5), 0)
    got = torch.compile(uneven, backend=backend, fullgraph=True)(cut(whole, world_size, 0, rank))
    assert same_bits(got, cut(whole, world_size, 1, rank) + 1)


@pytest.mark.ranks(3, backend="gloo")
def test_groups_of_another_backend(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    whole = numbered((7, 5), 0)
    got = shard_dim_alltoall(cut(whole, world_size, 0, rank), 0, 1, mesh, 0, gather_size=7)
    assert same_bits(got, cut(whole, world_size, 1, rank))


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
@pytest.mark.ranks(4)
def test_scatter_and_broadcast(rank: int, mesh_shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", mesh_shape)
    shapes: tuple[tuple[int, ...], ...] = ((3, 5), (0, 4), (), (70_000,))
    for mesh_dim, shape, asynchronous in itertools.product(range(mesh.ndim), shapes, (False, True)):
        ranks = mesh.size(mesh_dim)
        parts = [numbered(shape, 10 * rank + part) for part in range(ranks)]
        for source in range(ranks):
            first = list(mesh.get_coordinate())
            mine, first[mesh_dim] = first[mesh_dim], source
            giver = mesh.mesh[tuple(first)].item()
            for name, given, wanted in (
                ("mesh_scatter", [parts], numbered(shape, 10 * giver + mine)),
                ("mesh_broadcast", [], numbered(shape, giver)),
            ):
                ours, theirs = numbered(shape, rank), numbered(shape, rank)
                work = getattr(dtensor, name)(ours, *given, mesh, mesh_dim, asynchronous, group_src=source)
                assert (work is not None) == asynchronous
                if work is not None:
                    work.wait()
                getattr(torchs, name)(theirs, *given, mesh, mesh_dim, group_src=source)
                assert same_bits(ours, wanted) and same_bits(theirs, wanted), (name, shape, source)


@pytest.mark.ranks(4)
def test_every_dtype_into_strided_tensors(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for dtype in expected.DTYPES:
        for mesh_dim in (0, 1):
            values = [expected.seeded(dtype, (4, 6), 10 * rank + part) for part in range(2)]
            ours, theirs = torch.empty(6, 4, dtype=dtype).t(), torch.empty(6, 4, dtype=dtype).t()
            dtensor.mesh_scatter(ours, values, mesh, mesh_dim)
            torchs.mesh_scatter(theirs, values, mesh, mesh_dim)
            assert same_bits(ours, theirs), dtype
            ours, theirs = values[0].clone()[:, ::2], values[0].clone()[:, ::2]
            dtensor.mesh_broadcast(ours, mesh, mesh_dim)
            torchs.mesh_broadcast(theirs, mesh, mesh_dim)
            assert same_bits(ours, theirs), dtype


@pytest.mark.ranks(2)
def test_meta_tensors_and_wrong_arguments_move_nothing(rank: int, world_size: int) -> None:
    """Wrong arguments are rejected as by torch."""
    mesh = init_device_mesh("cpu", (world_size,))
    before = backend_of().get_sequence_number()
    for asynchronous in (False, True):
        empty = torch.empty(3, device="meta")
        assert dtensor.mesh_scatter(empty, [empty] * world_size, mesh, 0, asynchronous) is None
        assert dtensor.mesh_broadcast(empty, mesh, 0, asynchronous) is None
    assert before == backend_of().get_sequence_number()
    one, nine = torch.zeros(3), numbered((3,), 9)
    for arguments in ((mesh, 1), (mesh, "x"), (mesh, -2)):
        same_end("mesh_broadcast", one, *arguments)
        same_end("mesh_scatter", one, [one] * world_size, *arguments)
    for source in (world_size, -1):
        same_end("mesh_broadcast", one, mesh, group_src=source)
    if rank == 0:
        for wrong in (None, [one], [one, torch.zeros(4)], [one, torch.zeros(3, dtype=torch.int32)], [one, 1]):
            same_end("mesh_scatter", one, wrong, mesh)
    # Nothing was exchanged, and only the list of the source is used.
    dtensor.mesh_scatter(one, [nine, nine] if rank == 0 else [], mesh)
    assert same_bits(one, nine)


@pytest.mark.parametrize("dtype", expected.DTYPES, ids=expected.name)
def test_padding(dtype: torch.dtype) -> None:
    values = expected.seeded(dtype, (3, 4, 2), 5)
    for value in (values, values.transpose(0, 2), values[:, 1:3]):
        for dim in range(3):
            for size in (0, 1, 5):
                padded = dtensor.pad_tensor(value, dim, size)
                assert same_bits(padded, torchs.pad_tensor(value, dim, size))
                assert padded.size(dim) == value.size(dim) + size
                back = dtensor.unpad_tensor(padded, dim, size)
                assert same_bits(back, value)
                assert back.data_ptr() == padded.data_ptr()
                for other in (dim - 3, dim):
                    assert same_bits(dtensor.unpad_tensor(value, other, 1), torchs.unpad_tensor(value, other, 1))
    assert dtensor.pad_tensor(values, 7, 0) is values and dtensor.unpad_tensor(values, 7, 0) is values


def test_padding_is_refused_as_by_torch() -> None:
    values = torch.zeros(2, 3)
    for dim, size in ((2, 1), (-3, 1)):
        same_end("pad_tensor", values, dim, size)
    for dim, size in ((2, 1), (0, 3), (0, -1)):
        same_end("unpad_tensor", values, dim, size)


@pytest.mark.ranks(1)
def test_padding_is_traced_and_differentiated() -> None:
    value = torch.ones(2, 3, requires_grad=True)

    def there_and_back(value: torch.Tensor) -> torch.Tensor:
        return dtensor.unpad_tensor(dtensor.pad_tensor(value, 1, 2) * 3, 1, 1)

    got = torch.compile(there_and_back, backend="aot_eager", fullgraph=True)(value)
    assert got.shape == (2, 4)
    got.sum().backward()
    assert torch.equal(value.grad, torch.full((2, 3), 3.0))
    assert dtensor.pad_tensor(torch.empty(2, 3, device="meta"), 0, 2).shape == (4, 3)


def test_empty_shards() -> None:
    for dtype in expected.DTYPES:
        for dim in (0, 1, -1):
            shards = [expected.seeded(dtype, (2, 3), seed) for seed in range(2)]
            theirs = torchs.fill_empty_tensor_to_shards(list(shards), dim, 3)
            ours = dtensor.fill_empty_tensor_to_shards(shards, dim, 3)
            assert ours is shards and len(ours) == 5
            assert all(same_bits(one, other) for one, other in zip(ours, theirs, strict=True))
    shards = [torch.zeros(2)]
    assert dtensor.fill_empty_tensor_to_shards(shards, 9, 0) is shards and len(shards) == 1
    for wrong in (([], 0, 1), ([torch.zeros(2)], 1, 1)):
        same_end("fill_empty_tensor_to_shards", *wrong)


@pytest.mark.ranks(4)
def test_bytes_of_a_spec() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for dtype in (torch.float32, torch.bfloat16, torch.complex128, torch.bool):
        for shape in ((7, 5), (0, 3), (4,)):
            for placements in ([Shard(0), Replicate()], [Replicate(), Replicate()], [Shard(0), Shard(0)]):
                spec = distribute_tensor(torch.zeros(shape, dtype=dtype), mesh, placements)._spec
                whole = torch.Size(shape).numel() * dtype.itemsize
                assert dtensor.spec_to_bytes(spec) == torchs.spec_to_bytes(spec) == whole
    unknown = DTensorSpec(mesh, (Shard(0), Replicate()))
    same_end("spec_to_bytes", unknown)


@pytest.mark.ranks(4)
def test_metadata_of_ranks(rank: int) -> None:
    odd = rank == 2
    for value, shapes, words in (
        (torch.zeros(3 + odd, 2), False, None),
        (torch.zeros(3, 2), True, None),
        (torch.zeros(3 + odd, 2), True, r"shape is torch.Size\(\[3, 2\]\) on rank 0, torch.Size\(\[4, 2\]\) on rank 2"),
        (
            torch.zeros(2, 2).t() if odd else torch.zeros(2, 2),
            True,
            r"stride is \(2, 1\) on rank 0, \(1, 2\) on rank 2",
        ),
        (
            torch.zeros(1, dtype=torch.float64 if odd else torch.float32),
            False,
            r"dtype is .*32 on .* 0, .*64 on rank 2",
        ),
        (torch.zeros(1, requires_grad=odd), False, "requires_grad is False on rank 0, True on rank 2"),
    ):
        if words is None:
            assert dtensor.check_tensor_meta(value, shapes) is None
            torchs.check_tensor_meta(value, shapes)
            continue
        with pytest.raises(ValueError, match=words) as ours:
            dtensor.check_tensor_meta(value, check_shape_stride=shapes)
        with pytest.raises(ValueError) as theirs:
            torchs.check_tensor_meta(value, check_shape_stride=shapes)
        assert str(ours.value).startswith(str(theirs.value))


def test_the_package_is_reached_by_name() -> None:
    assert torch_symm.dtensor is dtensor
    assert all(callable(getattr(dtensor, name)) for name in dtensor.__all__)
    theirs = {name for name in dtensor.__all__ if hasattr(torchs, name)}
    assert len(theirs) == 13

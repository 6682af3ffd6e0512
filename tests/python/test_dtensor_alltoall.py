"""shard_dim_alltoall compared with torch's and with cutting the whole tensor, eager, traced and differentiated."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import expected
import pytest
import torch
import torch.distributed.tensor._collective_utils as torchs
import torch_symm
from ranks import backend_of, run_ranks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch_symm.dtensor import shard_dim_alltoall

#: Meshes of four ranks.
MESHES = ((4,), (2, 2), (4, 1), (1, 4))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal shapes, dtypes and bytes; NaN equals itself."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def numbered(shape: tuple[int, ...], rank: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape) + 1000 * rank


def cut(whole: torch.Tensor, parts: int, dim: int, index: int) -> torch.Tensor:
    """The part of rank ``index``; empty if ``chunk`` returns fewer parts than ranks."""
    found = whole.chunk(parts, dim)
    return found[index] if index < len(found) else whole.narrow(dim, 0, 0)


def even_shards(rank: int, world: int, mesh_shape: tuple[int, ...]) -> None:
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


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_even_shards_are_torchs(mesh_shape: tuple[int, ...]) -> None:
    run_ranks(even_shards, 4, mesh_shape)


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


def uneven_shards(rank: int, world: int, mesh_shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", mesh_shape)
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


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_uneven_and_empty_shards(mesh_shape: tuple[int, ...]) -> None:
    run_ranks(uneven_shards, 4, mesh_shape)


def test_uneven_shards_of_three_ranks() -> None:
    run_ranks(uneven_shards, 3, (3,))


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


def raised(call: Callable[[], Any]) -> BaseException:
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


@pytest.mark.ranks(4)
def test_wrong_arguments_are_refused_as_by_torch(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    mine = numbered((4, 8), rank)
    wrong: list[tuple[Any, ...]] = [
        (2, 0, mesh, 0),
        (0, 2, mesh, 0),
        (0, 1, mesh, 1),
        (0, 1, mesh, "x"),
    ]
    for arguments in wrong:
        theirs = raised(lambda arguments=arguments: torchs.shard_dim_alltoall(mine, *arguments))
        ours = raised(lambda arguments=arguments: shard_dim_alltoall(mine, *arguments))
        assert type(ours) is type(theirs) and str(ours) == str(theirs), (ours, theirs)
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


def disagreeing(rank: int, world: int, shapes: list[tuple[int, int]]) -> str:
    mesh = init_device_mesh("cpu", (world,))
    with pytest.raises(torch_symm.SymmMismatchError) as caught:
        shard_dim_alltoall(torch.zeros(shapes[rank]), 0, 1, mesh, 0)
    return str(caught.value)


def test_ranks_that_hold_other_shapes_are_named() -> None:
    """Uneven shards without ``gather_size`` are rejected; on Gloo torch ends the process."""
    results = run_ranks(disagreeing, 4, [(2, 8), (2, 8), (1, 8), (2, 8)])
    assert all("rank 2" in message for message in results), results


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


@pytest.mark.ranks(4)
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


@pytest.mark.ranks(4, timeout=200)
@pytest.mark.parametrize("backend", ("eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)))
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

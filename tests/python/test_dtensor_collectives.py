"""mesh_scatter, mesh_broadcast, padding and the description of shards, compared with torch's functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expected
import pytest
import torch
import torch.distributed.tensor._collective_utils as torchs
import torch_symm
from ranks import backend_of, run_ranks
from test_dtensor_alltoall import MESHES, numbered, raised, same_bits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch_symm import dtensor


def same_end(ours: Callable[[], Any], theirs: Callable[[], Any]) -> None:
    """Both raise the same class with the same message."""
    first, second = raised(ours), raised(theirs)
    assert type(first) is type(second) and str(first) == str(second), (first, second)


def scattered(rank: int, world: int, mesh_shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", mesh_shape)
    for mesh_dim in range(mesh.ndim):
        ranks = mesh.size(mesh_dim)
        for source in range(ranks):
            for shape in ((3, 5), (0, 4), (), (70_000,)):
                parts = [numbered(shape, 10 * rank + part) for part in range(ranks)]
                for asynchronous in (False, True):
                    ours, theirs = torch.empty(shape), torch.empty(shape)
                    work = dtensor.mesh_scatter(ours, parts, mesh, mesh_dim, asynchronous, group_src=source)
                    assert (work is not None) == asynchronous
                    if work is not None:
                        work.wait()
                    torchs.mesh_scatter(theirs, parts, mesh, mesh_dim, group_src=source)
                    assert same_bits(ours, theirs)
                    if shape == (3, 5):
                        first = list(mesh.get_coordinate())
                        mine, first[mesh_dim] = first[mesh_dim], source
                        assert same_bits(ours, numbered(shape, 10 * mesh.mesh[tuple(first)].item() + mine))


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_scatter(mesh_shape: tuple[int, ...]) -> None:
    run_ranks(scattered, 4, mesh_shape)


def broadcast(rank: int, world: int, mesh_shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", mesh_shape)
    for mesh_dim in range(mesh.ndim):
        for source in range(mesh.size(mesh_dim)):
            for shape in ((3, 5), (0, 4), (), (70_000,)):
                for asynchronous in (False, True):
                    ours, theirs = numbered(shape, rank), numbered(shape, rank)
                    work = dtensor.mesh_broadcast(ours, mesh, mesh_dim, asynchronous, group_src=source)
                    assert (work is not None) == asynchronous
                    if work is not None:
                        work.wait()
                    torchs.mesh_broadcast(theirs, mesh, mesh_dim, group_src=source)
                    assert same_bits(ours, theirs)
                    first = list(mesh.get_coordinate())
                    first[mesh_dim] = source
                    assert same_bits(ours, numbered(shape, mesh.mesh[tuple(first)].item()))


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_broadcast(mesh_shape: tuple[int, ...]) -> None:
    run_ranks(broadcast, 4, mesh_shape)


def every_dtype_and_layout(rank: int, world: int) -> None:
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


def test_every_dtype_into_strided_tensors() -> None:
    run_ranks(every_dtype_and_layout, 4)


def on_meta(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    before = backend_of().get_sequence_number()
    for asynchronous in (False, True):
        empty = torch.empty(3, device="meta")
        assert dtensor.mesh_scatter(empty, [empty] * world, mesh, 0, asynchronous) is None
        assert dtensor.mesh_broadcast(empty, mesh, 0, asynchronous) is None
    assert before == backend_of().get_sequence_number()


def test_meta_tensors_move_nothing() -> None:
    run_ranks(on_meta, 2)


def refused(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    one, nine = torch.zeros(3), numbered((3,), 9)
    for arguments in ((mesh, 1), (mesh, "x"), (mesh, -2)):
        same_end(
            lambda arguments=arguments: dtensor.mesh_broadcast(one, *arguments),
            lambda arguments=arguments: torchs.mesh_broadcast(one, *arguments),
        )
        same_end(
            lambda arguments=arguments: dtensor.mesh_scatter(one, [one] * world, *arguments),
            lambda arguments=arguments: torchs.mesh_scatter(one, [one] * world, *arguments),
        )
    for source in (world, -1):
        same_end(
            lambda source=source: dtensor.mesh_broadcast(one, mesh, group_src=source),
            lambda source=source: torchs.mesh_broadcast(one, mesh, group_src=source),
        )
    if rank == 0:
        for wrong in (None, [one], [one, torch.zeros(4)], [one, torch.zeros(3, dtype=torch.int32)], [one, 1]):
            same_end(
                lambda wrong=wrong: dtensor.mesh_scatter(one, wrong, mesh),
                lambda wrong=wrong: torchs.mesh_scatter(one, wrong, mesh),
            )
    # Nothing was exchanged, and only the list of the source is used.
    dtensor.mesh_scatter(one, [nine, nine] if rank == 0 else [], mesh)
    assert same_bits(one, nine)


def test_wrong_arguments_are_refused_as_by_torch() -> None:
    run_ranks(refused, 2)


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
    for name, dim, size in (
        ("pad_tensor", 2, 1),
        ("pad_tensor", -3, 1),
        ("unpad_tensor", 2, 1),
        ("unpad_tensor", 0, 3),
        ("unpad_tensor", 0, -1),
    ):
        same_end(
            lambda name=name, dim=dim, size=size: getattr(dtensor, name)(values, dim, size),
            lambda name=name, dim=dim, size=size: getattr(torchs, name)(values, dim, size),
        )


def traced(rank: int, world: int) -> None:
    value = torch.ones(2, 3, requires_grad=True)

    def there_and_back(value: torch.Tensor) -> torch.Tensor:
        return dtensor.unpad_tensor(dtensor.pad_tensor(value, 1, 2) * 3, 1, 1)

    got = torch.compile(there_and_back, backend="aot_eager", fullgraph=True)(value)
    assert got.shape == (2, 4)
    got.sum().backward()
    assert torch.equal(value.grad, torch.full((2, 3), 3.0))
    assert dtensor.pad_tensor(torch.empty(2, 3, device="meta"), 0, 2).shape == (4, 3)


def test_padding_is_traced_and_differentiated() -> None:
    run_ranks(traced, 1)


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
        same_end(
            lambda wrong=wrong: dtensor.fill_empty_tensor_to_shards(*wrong),
            lambda wrong=wrong: torchs.fill_empty_tensor_to_shards(*wrong),
        )


def specs(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for dtype in (torch.float32, torch.bfloat16, torch.complex128, torch.bool):
        for shape in ((7, 5), (0, 3), (4,)):
            for placements in ([Shard(0), Replicate()], [Replicate(), Replicate()], [Shard(0), Shard(0)]):
                spec = distribute_tensor(torch.zeros(shape, dtype=dtype), mesh, placements)._spec
                whole = torch.Size(shape).numel() * dtype.itemsize
                assert dtensor.spec_to_bytes(spec) == torchs.spec_to_bytes(spec) == whole
    unknown = DTensorSpec(mesh, (Shard(0), Replicate()))
    same_end(lambda: dtensor.spec_to_bytes(unknown), lambda: torchs.spec_to_bytes(unknown))


def test_bytes_of_a_spec() -> None:
    run_ranks(specs, 4)


def compared(rank: int, world: int) -> None:
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


def test_metadata_of_ranks() -> None:
    run_ranks(compared, 4)


def test_the_package_is_reached_by_name() -> None:
    assert torch_symm.dtensor is dtensor
    assert all(callable(getattr(dtensor, name)) for name in dtensor.__all__)
    theirs = {name for name in dtensor.__all__ if hasattr(torchs, name)}
    assert len(theirs) == 13

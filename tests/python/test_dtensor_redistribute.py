"""DTensor over symm groups moves shards with our operator; results equal those of torch's implementation.

After torch's test_redistribute.py: every pair of placements, 1-D and 2-D meshes, uneven and empty shards, gradients.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from norm_reference import same_bits
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch_symm.dtensor import disable_redistribute, enable_redistribute
from torch_symm.testing import init_process_group

SHAPES = ((8, 12), (7, 5), (2, 9), (1, 1), (3, 5, 6))
MOVES = torch.ops._dtensor.shard_dim_alltoall
GATHERS = torch.ops.c10d_functional.all_gather_into_tensor


def whole(shape: Sequence[int]) -> torch.Tensor:
    """Small integers, so that sums are exact."""
    return torch.arange(float(torch.Size(shape).numel())).view(tuple(shape)) % 23


def placed(mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """The tensor of ``whole`` under these placements; for a partial placement the ranks hold addends."""
    first = [Replicate() if placement.is_partial() else placement for placement in placements]
    tensor = distribute_tensor(whole(shape), mesh, first)
    local = tensor.to_local()
    for mesh_dim, placement in enumerate(placements):
        if placement.is_partial():
            last = mesh.size(mesh_dim) - 1
            local = local - 7 * last if mesh.get_local_rank(mesh_dim) == last else torch.full_like(local, 7)
    return DTensor.from_local(local, mesh, placements, shape=tensor.shape, stride=tensor.stride(), run_check=False)


def redistributed(
    mesh: DeviceMesh, source: Sequence[Placement], target: Sequence[Placement], shape: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """The rank's part, the whole, and how often shards were moved and gathered."""
    tensor = placed(mesh, source, shape)
    with CommDebugMode() as counted:
        moved = tensor.redistribute(mesh, target)
    counts = counted.get_comm_counts()
    return moved.to_local(), moved.full_tensor(), counts.get(MOVES, 0), counts.get(GATHERS, 0)


@pytest.mark.parametrize("mesh_shape", ((4,), (2, 2)), ids=str)
@pytest.mark.ranks(4, timeout=200)
def test_every_pair_of_placements_gives_torchs_shards(mesh_shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", mesh_shape)
    saved = 0
    for shape in SHAPES:
        dims = [Shard(dim) for dim in range(len(shape))]
        sources = list(itertools.product([*dims, Replicate(), Partial()], repeat=mesh.ndim))
        targets = list(itertools.product([*dims, Replicate()], repeat=mesh.ndim))
        pairs = list(itertools.product(sources, targets))
        if mesh.ndim > 1:  # every fifth is enough
            pairs = pairs[len(shape) :: 5]
        for source, target in pairs:
            ours = redistributed(mesh, source, target, shape)
            disable_redistribute()
            theirs = redistributed(mesh, source, target, shape)
            enable_redistribute()
            where = f"{shape}: {source} to {target}"
            assert same_bits(ours[0], theirs[0]), where
            assert torch.equal(ours[1], whole(shape)), where
            # torch's implementation moves no shard on CPU: it gathers instead.
            assert theirs[2] == 0 and ours[2] + ours[3] == theirs[3], where
            saved += ours[2]
    assert saved > 10


@pytest.mark.ranks(4)
def test_shards_and_gradients_move_once_and_nothing_is_gathered(world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    for shape in ((8, 12), (7, 5), (2, 9)):
        factors = distribute_tensor(whole(shape) + 1, mesh, [Shard(1)])
        tensor = distribute_tensor(whole(shape), mesh, [Shard(0)]).requires_grad_()
        with CommDebugMode() as counted:
            moved = tensor.redistribute(mesh, [Shard(1)])
        assert dict(counted.get_comm_counts()) == {MOVES: 1}
        assert moved.to_local().is_contiguous()
        total = (moved * factors).sum()
        with CommDebugMode() as counted:
            total.backward()
        assert counted.get_comm_counts()[MOVES] == 1
        assert tensor.grad.placements == (Shard(0),)
        assert torch.equal(tensor.grad.full_tensor(), whole(shape) + 1)


@pytest.mark.usefixtures("inductor")
@pytest.mark.ranks(2, timeout=200)
@pytest.mark.slow
def test_compiled(world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))

    def step(tensor: DTensor) -> DTensor:
        return (tensor * 2).redistribute(mesh, [Shard(1)]) + 1

    for backend in ("aot_eager", "inductor"):
        # Shapes are fixed: with symbolic ones torch's own uneven DTensors get wrong strides and fail in Inductor.
        fast = torch.compile(step, backend=backend, fullgraph=True, dynamic=False)
        for shape in ((8, 12), (7, 5)):
            tensor = distribute_tensor(whole(shape), mesh, [Shard(0)]).requires_grad_()
            got = fast(tensor)
            assert same_bits(got.to_local(), step(tensor).to_local())
            (got * got).sum().backward()
            assert torch.equal(tensor.grad.full_tensor(), (whole(shape) * 2 + 1) * 4)


@pytest.mark.ranks(3, backend="gloo")
def test_meshes_of_other_backends_stay_with_torch(world_size: int) -> None:
    """An additional symm group changes nothing for a mesh of another backend."""
    dist.new_group(backend="symm")
    mesh = init_device_mesh("cpu", (world_size,))
    tensor = distribute_tensor(whole((7, 5)), mesh, [Shard(0)])
    with CommDebugMode() as counted:
        moved = tensor.redistribute(mesh, [Shard(1)])
    assert dict(counted.get_comm_counts()) == {GATHERS: 1}
    assert torch.equal(moved.full_tensor(), whole((7, 5)))


@pytest.mark.ranks(4)
def test_ranks_outside_the_mesh(rank: int) -> None:
    mesh = DeviceMesh("cpu", [0, 2, 3])
    tensor = distribute_tensor(whole((7, 5)), mesh, [Shard(0)])
    moved = tensor.redistribute(mesh, [Shard(1)])
    if rank != 1:
        assert torch.equal(moved.full_tensor(), whole((7, 5)))
    else:
        assert moved.to_local().numel() == 0


@pytest.mark.ranks(3, backend=None)
def test_under_torchs_debug_wrapper(rank: int, world_size: int) -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    init_process_group()
    mesh = init_device_mesh("cpu", (world_size,))
    local = whole((7, 5)).chunk(world_size)[rank]
    tensor = DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size((7, 5)), stride=(5, 1), run_check=False)
    assert same_bits(tensor.redistribute(mesh, [Shard(1)]).to_local(), whole((7, 5)).chunk(world_size, 1)[rank])


@pytest.mark.ranks(4)
def test_ranks_that_torch_plays_in_one_process(rank: int, world_size: int) -> None:
    from torch.distributed._local_tensor import LocalTensorMode

    mesh = init_device_mesh("cpu", (world_size,))
    if rank:
        return
    with LocalTensorMode(frozenset(range(world_size))):
        moved = distribute_tensor(whole((8, 12)), mesh, [Shard(0)]).redistribute(mesh, [Shard(1)])
        full = moved.full_tensor().reconcile()
    assert torch.equal(full, whole((8, 12)))


GROUP = """
import inspect, sys, tempfile, torch, torch.distributed as dist
def group(backend):
    dist.init_process_group(backend, store=dist.FileStore(tempfile.mktemp(), 1), rank=0, world_size=1)
def changed():
    from torch.distributed.tensor import Shard
    return Shard._to_new_shard_dim.__module__ != Shard.__module__
def watches():
    from torch_symm._dtensor import _hook
    return [finder for finder in sys.meta_path if finder is _hook]
def counted():
    from torch.distributed.tensor.debug import _comm_mode
    return any("torch_symm" in str(operator) for operator in _comm_mode.NATIVE_TO_PY_MAPPING)
"""

BEFORE_DTENSOR = {
    "imported after the group": """
group("symm")
assert "torch.distributed.tensor" not in sys.modules, "a group does not import DTensor"
assert changed() and counted()
import torch.distributed.tensor.placement_types as module
assert "class Shard" in inspect.getsource(module)
assert "exec_module" not in vars(module.__loader__)
""",
    "undone before DTensor is imported": """
group("symm")
import torch_symm.dtensor
torch_symm.dtensor.disable_redistribute()
assert not changed() and not watches()
""",
}
CASES = {
    "no symm group, no change": 'import torch_symm; group("gloo"); assert not changed() and not watches()',
    "imported before the group": 'assert not changed(); group("symm"); assert changed() and counted()',
    "undone": """
import torch_symm
group("symm")
assert changed() and counted()
torch_symm.dtensor.disable_redistribute()
assert not changed() and not counted() and not watches()
dist.destroy_process_group()
group("symm")
assert not changed(), "who said no once is not asked again"
torch_symm.dtensor.enable_redistribute()
assert changed() and counted()
""",
    "somebody else replaced the method since": """
from torch.distributed.tensor import Shard
import torch_symm.dtensor
group("symm")
ours = Shard._to_new_shard_dim
def theirs(*arguments): return ours(*arguments)
Shard._to_new_shard_dim = theirs
torch_symm.dtensor.disable_redistribute()
assert Shard._to_new_shard_dim is theirs
""",
    "torch without the method": """
import warnings
from torch.distributed.tensor import Shard
del Shard._to_new_shard_dim
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    group("symm")
assert any("does not use symm to move shards" in str(warning.message) for warning in caught)
dist.all_reduce(torch.ones(1))
""",
}


# Forks a process for each case. The parent has imported torch, and, for the cases of the second dictionary, DTensor.
EACH = """
import json, os
bad = []
for number, cases in enumerate(json.loads(sys.argv[1])):
    if number:
        import torch.distributed.tensor.debug
    for case, code in cases.items():
        if (pid := os.fork()) == 0:
            exec(code)
            if dist.is_initialized():
                dist.destroy_process_group()
            os._exit(0)
        if os.waitpid(pid, 0)[1]:
            bad.append(case)
sys.exit(f"failed: {bad}" if bad else 0)
"""


def test_when_torch_is_changed() -> None:
    command = [sys.executable, "-c", GROUP + EACH, json.dumps([BEFORE_DTENSOR, CASES])]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stderr

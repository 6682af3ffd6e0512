"""Training programs on two nodes of two ranks, with the losses that flat Gloo gives them.

Sums of floats differ in their last bits, since each node adds its ranks first: losses agree to a relative 1e-5.
Programs that sum nothing give the same bits. Ranks and runs always give the same bits.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import ranks
import torch
import torch.distributed as dist
from launch import NAMES, run_nodes
from programs import ROOT, run_program
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

STEPS, WIDTH = 6, 33

Program = Callable[[int, int], list[float]]


def network() -> nn.Sequential:
    """A network whose sizes the number of ranks does not divide, except the size that tensor parallelism cuts."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 132), nn.GELU(), nn.Linear(132, 67), nn.GELU(), nn.Linear(67, 1))


def batch(part: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one part of the batch."""
    inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * step + part))
    return inputs, inputs.sum(1, keepdim=True).tanh()


def mean(loss: torch.Tensor) -> float:
    """The mean over all ranks; Gloo has no ``ReduceOp.AVG``."""
    everywhere = loss.detach() / dist.get_world_size()
    dist.all_reduce(everywhere)
    return everywhere.item()


def train(model: nn.Module, part: int) -> list[float]:
    """The mean losses of all steps, and at the end the sum of all parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        inputs, targets = batch(part, step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(mean(loss))
    parameters = (each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters())
    return [*losses, sum(each.detach().double().sum().item() for each in parameters)]


def hybrid_sharded(rank: int, world_size: int) -> list[float]:
    """Sharded within a node, replicated between nodes."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = network()
    for layer in (*(each for each in model if isinstance(each, nn.Linear)), model):
        fully_shard(layer, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Gloo has no ReduceOp.AVG.
            module.set_force_sum_reduction_for_comms(True)
    return train(model, rank)


def tensor_parallel(rank: int, world_size: int) -> list[float]:
    """Matrices are split within a node, batches between nodes."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(network(), mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for module in (model[0], model[2], model[4]):
        fully_shard(module, mesh=mesh["data"])
        module.set_force_sum_reduction_for_comms(True)
    return train(model, rank // 2)


def tensor_parallel_between_nodes(rank: int, world_size: int) -> list[float]:
    mesh = dist.init_device_mesh("cpu", (world_size,))
    return train(parallelize_module(network(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}), 0)


def redistributed(rank: int, world_size: int) -> list[float]:
    """A tensor is cut, gathered and cut again, over both dimensions of a mesh."""
    mesh = dist.init_device_mesh("cpu", (2, 2))
    whole = torch.randn(37, 54, generator=torch.Generator().manual_seed(3))
    sums = []
    for first in (Shard(0), Shard(1), Replicate()):
        for second in (Shard(0), Shard(1), Replicate()):
            tensor = distribute_tensor(whole, mesh, [first, second])
            for to in ([Shard(1), Shard(0)], [Replicate(), Shard(1)], [Shard(0), Replicate()]):
                moved = tensor.redistribute(mesh, to)
                sums.append(moved.to_local().double().sum().item())
                assert torch.equal(moved.full_tensor(), whole)
    # Integers: any order of addition gives the same result.
    mine = DTensor.from_local(torch.full((9, 4), rank + 1), mesh, [Partial(), Partial()])
    return [*sums, float(mine.redistribute(mesh, [Shard(0), Shard(1)]).full_tensor().sum())]


def flat_gloo(program: Program) -> list[list[float]]:
    def run(rank: int, world_size: int) -> list[float]:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        ranks.init(rank, world_size, backend="gloo")
        return program(rank, world_size)

    return list(ranks.run_ranks(run, 4, backend=None))


@pytest.mark.parametrize("program", (hybrid_sharded, tensor_parallel, tensor_parallel_between_nodes))
def test_losses_are_those_of_flat_gloo(program: Program) -> None:
    there, again = (list(run_nodes(program, (2, 2))) for _ in range(2))
    assert there == again, "another run gives other bits"
    assert all(losses == there[0] for losses in there), "ranks give other bits"
    assert there[0] == pytest.approx(flat_gloo(program)[0], rel=1e-5)
    assert len(set(there[0])) == STEPS + 1, "it learns nothing"


def test_what_moves_data_alone_gives_the_bits_of_flat_gloo() -> None:
    assert list(run_nodes(redistributed, (2, 2))) == flat_gloo(redistributed)


@pytest.mark.parametrize(
    "program",
    (
        "examples/01_ddp_digits",
        "examples/02_fsdp2",
        "examples/03_tensor_parallel",
        "examples/04_pipeline",
        "examples/06_objects",
        "benches/train_transformer",
    ),
)
def test_programs_on_two_nodes(program: str) -> None:
    """These programs compare themselves with one process, and fail if they differ."""
    shorter = {"examples/01_ddp_digits": ("--epochs", "9"), "benches/train_transformer": ("--steps", "10")}
    said = run_program(f"{program}.py", *shorter.get(program, ()), nodes="aabb", env={"CUDA_VISIBLE_DEVICES": ""})
    assert said[0][-1].startswith("ok: "), said


@pytest.mark.slow
def test_a_program_by_torchrun_on_two_nodes() -> None:
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{ranks.free_port()}"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *rendezvous]
    command += ["--rdzv-id", "nodes", str(ROOT / "examples/00_hello.py")]
    own = {
        "SYMM_INTER_NODE_BACKEND": "gloo",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    nodes = [
        subprocess.Popen(
            command,
            env={**os.environ, **own, "SYMM_TEST_NODE": name},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in NAMES[:2]
    ]
    try:
        outputs = [node.communicate(timeout=120)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(outputs)
    said = [line for output in outputs for line in output.splitlines() if line.startswith("ok: ")]
    assert sorted(said) == [f"ok: rank {rank} of 2 has the sum 1" for rank in range(2)], "\n".join(outputs)

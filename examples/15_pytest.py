"""Tests of distributed code with pytest: each marked test runs on the number of processes in its mark.

    pytest examples/15_pytest.py          # or pytest -n 4 with pytest-xdist, as no test uses a port

A CI job only needs: pip install torch torch-symm pytest; pytest --junitxml report.xml. No GPU, no launcher. With
a name such as test_training.py, pytest finds the file by itself. ``python examples/15_pytest.py`` runs pytest.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save
from torch.nn.parallel import DistributedDataParallel


def mean_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """The code under test: the mean of all ranks' ``tensor``."""
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


@pytest.mark.ranks([2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mean(dtype: torch.dtype, rank: int, world_size: int) -> None:
    mean = mean_over_ranks(torch.full((3,), rank, dtype=dtype))
    assert mean.tolist() == [(world_size - 1) / 2] * 3


@pytest.mark.ranks(2, backend="gloo")
def test_mean_on_another_backend(rank: int) -> None:
    assert mean_over_ranks(torch.tensor([float(rank)])).item() == 0.5


@pytest.fixture
def model() -> torch.nn.Module:
    """Created once; every rank has a copy."""
    torch.manual_seed(0)
    return torch.nn.Linear(4, 2)


@pytest.mark.ranks(2, timeout=30)
def test_gradients_are_those_of_the_whole_batch(model: torch.nn.Module, rank: int) -> None:
    batch = torch.arange(16.0).reshape(4, 4)
    parallel = DistributedDataParallel(model)
    parallel(batch[2 * rank : 2 * rank + 2]).mean().backward()
    alone = torch.nn.Linear(4, 2)
    alone.load_state_dict(model.state_dict())
    alone(batch).mean().backward()
    torch.testing.assert_close(model.weight.grad, alone.weight.grad)


@pytest.mark.ranks(2)
def test_checkpoint_comes_back(model: torch.nn.Module, tmp_path: Path) -> None:
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    save({"model": model.state_dict()}, storage_writer=FileSystemWriter(tmp_path))
    state = {"model": {name: torch.zeros_like(value) for name, value in wanted.items()}}
    load(state, storage_reader=FileSystemReader(tmp_path))
    torch.testing.assert_close(state["model"], wanted)


def test_without_ranks() -> None:
    assert not dist.is_initialized()


def main() -> int:
    """Runs this file's tests; returns pytest's exit code."""
    code = int(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
    if code == 0:
        print("ok: all tests passed on their ranks")
    return code


if __name__ == "__main__":
    sys.exit(main())

"""The test kit on GPUs: ``@pytest.mark.ranks`` and ``WarmMultiProcessTestCase`` with CUDA tensors, and its reports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch_symm
from pool import FULL, needs_unshared_gpus
from test_testing import pytest_on
from torch_symm.testing import WarmMultiProcessTestCase

pytestmark = needs_unshared_gpus

WORLDS = sorted({2, max(2, FULL)})


def own_device(rank: int) -> torch.device:
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


@pytest.mark.ranks(WORLDS, timeout=120)
@pytest.mark.parametrize("count", [3, 100_000, 5_000_000])
def test_sums(rank: int, world_size: int, count: int) -> None:
    tensor = torch.full((count,), float(rank), device=own_device(rank))
    dist.all_reduce(tensor)
    assert (tensor == sum(range(world_size))).all()
    assert torch_symm.stats()["all_reduce"]


@pytest.mark.ranks(2, timeout=120)
def test_a_graph(rank: int) -> None:
    tensor = torch.ones(1000, device=own_device(rank))
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        dist.all_reduce(tensor)
    tensor.fill_(1.0)
    graph.replay()
    assert (tensor == 2.0).all()


@pytest.mark.ranks(2, backend="nccl", timeout=120)
def test_on_nccl(rank: int) -> None:
    tensor = torch.ones(10, device=own_device(rank))
    dist.all_reduce(tensor)
    assert (tensor == 2.0).all()


class TestWarmCase(WarmMultiProcessTestCase):
    @property
    def world_size(self) -> int:
        return 2

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def test_sum(self) -> None:
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("symm", store=store, rank=self.rank, world_size=self.world_size)
        tensor = torch.ones(10, device=own_device(self.rank))
        dist.all_reduce(tensor)
        self.assertEqual(tensor.tolist(), [2.0] * 10)
        dist.destroy_process_group()


def test_a_failure_names_rank_line_and_last_calls(tmp_path: Path) -> None:
    status, said = pytest_on(
        tmp_path,
        """
        @pytest.mark.ranks(2, timeout=120)
        def test_other_lengths(rank):
            torch.cuda.set_device(rank)
            dist.all_reduce(torch.ones(8, device="cuda"))
            tensor = torch.ones(10 + rank, device="cuda")
            dist.all_reduce(tensor)
            torch.cuda.synchronize()
        """,
    )
    assert status == 1 and "SymmMismatchError" in said and "last calls:" in said, said
    assert "of 2 failed at test_it.py:" in said, said


def test_cuda_in_the_process_that_forks_is_said(tmp_path: Path) -> None:
    status, said = pytest_on(
        tmp_path,
        """
        torch.cuda.init()

        @pytest.mark.ranks(2, timeout=120)
        def test_too_late(rank):
            torch.ones(1, device="cuda")
        """,
    )
    assert status == 1 and "has used CUDA, which they cannot use then" in said, said


@pytest.mark.ranks(2, timeout=120)
def test_types_without_kernels_of_their_own(rank: int) -> None:
    device = own_device(rank)
    scales = torch.full((1 << 20,), rank, dtype=torch.uint8, device=device).view(torch.float8_e8m0fnu)
    dist.broadcast(scales, 1)
    assert (scales.view(torch.uint8) == 1).all()
    numbers = torch.view_as_complex(torch.ones(1000, 2, dtype=torch.float16, device=device))
    dist.reduce(numbers, 0)
    assert rank or (torch.view_as_real(numbers) == 2).all()

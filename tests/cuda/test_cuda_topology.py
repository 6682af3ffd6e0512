"""The links between the GPUs of this node, in the form in which torch queries them."""

from __future__ import annotations

import pytest
import torch
import torch_symm
from pool import Pool, needs_gpus

pytestmark = needs_gpus


def links(rank: int, world: int) -> list[list[int]]:
    found = torch_symm.detect_dma_connectivity("cuda", "nvlink")
    assert (found.device_type, found.connection_type) == ("cuda", "nvlink")
    # torch's own detection, which sees all GPUs of the machine in NVML's order.
    torchs = torch._C._distributed_c10d._detect_dma_connectivity(torch._C._autograd.DeviceType.CUDA, "nvlink").matrix
    assert sorted(map(sorted, found.matrix)) == sorted(map(sorted, torchs)) or len(found.matrix) < len(torchs)
    for one, other in (("cuda", "pcie"), ("cpu", "nvlink")):
        with pytest.raises(ValueError, match=one if one != "cuda" else other):
            torch_symm.detect_dma_connectivity(one, other)
    return found.matrix


def test_links_between_gpus(pool: Pool) -> None:
    for matrix in pool.run(links, 2):
        count = len(matrix)
        assert count >= 2 and all(len(row) == count for row in matrix)
        for i in range(count):
            assert matrix[i][i] == 0
            assert all(matrix[i][j] == matrix[j][i] for j in range(count))
        if "H200" in torch_symm.topology() or "H100" in torch_symm.topology():
            assert all(matrix[i][j] > 0 for i in range(count) for j in range(count) if i != j), matrix

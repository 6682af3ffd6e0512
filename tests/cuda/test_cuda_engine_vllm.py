"""torch_symm.engines.vllm on GPUs, with duck types of vLLM's classes: eager calls, and graphs without earlier calls."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import vllm_doubles
from norm_reference import numbers, reference, same_bits
from pool import Pool, device, needs_gpus, needs_ranks, settle

pytestmark = needs_ranks

#: Numbers of rows of 4096 bfloat16 elements, one number for each algorithm of two ranks.
ROWS = (1, 40, 300, 1000)
EPS = 1e-5


def results(com: Any, own: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    rows = own.shape[0]
    first = (rows + 2) // 3
    sizes = [first, rows - first]
    part = own[: sizes[com.rank_in_group]]
    return [
        com.all_reduce(own),
        com.all_gather(own, 0),
        com.all_gather(own, -1),
        com.reduce_scatter(own, -1),
        com.reduce_scatterv(own, 0, sizes),
        com.all_gatherv(part, 0, sizes),
        *torch.ops.symm_vllm.all_reduce_add_rms_norm(own, residual, weight, EPS, com.unique_name),
    ]


def expected(world: int, rank: int, rows: int, seed: int, others: tuple[torch.Tensor, torch.Tensor]) -> list[Any]:
    all_ = [numbers(seed + each, rows, 4096, dtype=torch.bfloat16) for each in range(world)]
    total = (all_[0].float() + all_[1].float()).bfloat16()
    first = (rows + 2) // 3
    sizes = [first, rows - first]
    return [
        total,
        torch.cat(all_),
        torch.cat(all_, -1),
        total.chunk(2, -1)[rank].contiguous(),
        total.split(sizes)[rank],
        torch.cat([each[:size] for each, size in zip(all_, sizes, strict=True)]),
        *reference(all_, *others, EPS),
    ]


def communicator(rank: int, world: int, folder: Path, captured: bool) -> None:
    known = set(sys.modules)
    vllm_doubles.use(folder)
    try:
        from torch_symm.engines.vllm._communicator import SymmCommunicator

        device_group, cpu_group = vllm_doubles.groups([list(range(world))])
        given = {"cpu_group": cpu_group, "device": device(), "device_group": device_group}
        com = SymmCommunicator(**given, unique_name="tp:0")
        assert com.symm is not None
        weight = numbers(11, 4096, dtype=torch.bfloat16)
        for rows in ROWS:
            residual = numbers(10, rows, 4096, dtype=torch.bfloat16)
            own = numbers(20 + rank, rows, 4096, dtype=torch.bfloat16).to(device())
            inputs = own, residual.to(device()), weight.to(device())
            got, replay = [], lambda: None
            if captured:
                graph = torch.cuda.CUDAGraph()
                settle()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    got = results(com, *inputs)
                replay = graph.replay
            for seed in (20, 30):
                own.copy_(numbers(seed + rank, rows, 4096, dtype=torch.bfloat16))
                replay()
                got = got if captured else results(com, *inputs)
                settle()
                wanted = expected(world, rank, rows, seed, (residual, weight))
                same = [same_bits(one.cpu(), other) for one, other in zip(got, wanted, strict=True)]
                assert all(same), (rows, seed, same)
        assert com.served == []
        com.destroy()
        for group in (device_group, cpu_group):
            dist.destroy_process_group(group)
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - known:
            if name.startswith("vllm.") or name in ("vllm", "torch_symm.engines.vllm._communicator"):
                del sys.modules[name]


@pytest.mark.parametrize("captured", (False, pytest.param(True, marks=needs_gpus)))
def test_collectives_of_a_tensor_parallel_group(pool: Pool, tmp_path: Path, captured: bool) -> None:
    pool.run(communicator, 2, vllm_doubles.write(tmp_path), captured)

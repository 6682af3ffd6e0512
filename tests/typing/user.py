"""A user's program with all of the public API, for type checkers: mypy --strict and pyright. It is never run."""

from __future__ import annotations

import logging
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch_symm
from torch.distributed.device_mesh import DeviceMesh
from torch_symm import dtensor, symm_mem, testing
from typing_extensions import assert_type


def groups() -> None:
    options = torch_symm.Options(timeout=30, inter_node_backend="gloo", reduce_dtype="float32", order="tree")
    options.timeout = 12.5
    options.timeout = timedelta(minutes=1)
    assert_type(options.timeout, timedelta)
    assert_type(options.global_ranks_in_group, list[int])
    # torch requires its own class of options here, and has no public name for it.
    dist.init_process_group("symm", pg_options=options)
    store = torch_symm.MemoryStore()
    group = torch_symm.ProcessGroupSymm(store, 0, 1, timeout=timedelta(seconds=5), group_name="mine")
    group = torch_symm.ProcessGroupSymm(store, 0, 1, options)
    assert_type(group.options, torch_symm.Options)
    assert_type(group.get_sequence_number(), int)
    group.abort()
    group.shutdown()
    assert_type(torch_symm.describe(), str)
    torch_symm.describe(group)
    assert_type(torch_symm.__version__, str)
    torch_symm.replace_gloo()


def stores() -> None:
    tcp = torch_symm.TCPStore(
        "localhost", 0, 2, True, timeout=timedelta(seconds=9), secret=b"x", require_same_user=True
    )
    assert_type(tcp.port, int)
    assert_type(tcp.host, str)
    tcp.set("key", "value")
    tcp.rank_barrier("here", 0, 2, timedelta(seconds=1))
    file = torch_symm.FileStore(Path("store"), 2)
    assert_type(file.path, str)
    assert_type(file.timeout, timedelta)
    assert_type(file.num_keys(), int)


def failures() -> None:
    try:
        dist.barrier()
    except (torch_symm.SymmPeerError, torch_symm.SymmTimeoutError, torch_symm.SymmMismatchError) as error:
        raise dist.DistBackendError(str(error)) from error
    except (torch_symm.SymmConfigError, torch_symm.SymmAbortedError):
        pass


def observed() -> None:
    assert_type(torch_symm.trace(), dict[str, Any])
    assert_type(torch_symm.dump_trace("out.json"), str)
    assert_type(torch_symm.annotate_profiler_trace(Path("trace.json"), ["trace-1-rank0.json"]), int)
    print(torch_symm.stats()["all_reduce"])
    torch_symm.log_to_python()
    torch_symm.log_to_python(logging.INFO)
    torch_symm.log_to_python("debug")
    warnings.simplefilter("error", torch_symm.SymmWarning)
    warnings.simplefilter("ignore", torch_symm.SymmFallbackWarning)
    links = torch_symm.detect_dma_connectivity("cuda", "nvlink")
    assert_type(links, torch_symm.DMAConnectivity)
    assert_type(links.matrix, list[list[int]])
    assert_type(torch_symm.topology(), str)


def memory() -> None:
    tensor = symm_mem.empty(4, 4, dtype=torch.bfloat16, device="cpu")
    handle = symm_mem.rendezvous(tensor, dist.group.WORLD)  # type: ignore[arg-type]  # None if there is no group
    symm_mem.put_signal(tensor, handle, 1, channel=2, timeout_ms=100)
    symm_mem.wait_signal(handle, 1)
    assert_type(symm_mem.get_signal_pad_size(), int)
    assert_type(symm_mem.is_symm_mem_enabled_for_group("0"), bool)
    gathered, products = symm_mem.fused_all_gather_matmul(tensor, [tensor], 0, "0")
    assert_type(gathered, torch.Tensor | None)
    assert_type(products, list[torch.Tensor])
    assert_type(symm_mem.fused_matmul_reduce_scatter(tensor, tensor, "sum", 0, "0"), torch.Tensor)


def prices(mesh: DeviceMesh, shard: torch.Tensor) -> None:
    topo = dtensor.MeshTopoInfo.build_from_mesh(mesh)
    assert_type(dtensor.allreduce_cost(1e-3, topo, 0), float)
    assert_type(topo.price("all_reduce", 1e6, 0), tuple[float, str, str])
    assert_type(dtensor.shard_dim_alltoall(shard, 0, 1, mesh, 0), torch.Tensor)
    dtensor.enable_cost_model(network=(10.0, 20.0))


def on_rank(rank: int, world_size: int) -> int:
    testing.init_process_group(timeout=5.0)
    testing.barrier("here")
    return rank


def tested() -> None:
    results = testing.run_ranks(on_rank, 2)
    assert_type(results.seconds, float)
    assert_type(results.logs, list[str])
    print(torch_symm.misspelt)  # type: ignore[attr-defined]
    print(dtensor.misspelt)  # type: ignore[attr-defined]

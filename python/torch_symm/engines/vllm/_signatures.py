"""The parameters of vLLM's functions that the plug-in replaces or calls, in versions 0.25 to 0.33."""

from __future__ import annotations

from torch_symm.engines._common import Expected, problem

__all__ = ["COMMUNICATOR", "PASS", "PLATFORM", "problem"]

PLATFORM: Expected = {
    "is_cuda": (),
    "get_device_communicator_cls": (),
    "check_and_update_config": ("vllm_config",),
}
COMMUNICATOR: Expected = {
    "__init__": ("cpu_group", "device", "device_group", "unique_name"),
    "all_reduce": ("input_",),
    "all_gather": ("input_", "dim"),
    "all_gatherv": ("input_", "dim", "sizes"),
    "reduce_scatter": ("input_", "dim"),
    "reduce_scatterv": ("input_", "dim", "sizes"),
    "destroy": (),
}
PASS: Expected = {"__call__": ("graph",), "uuid": (), "is_applicable_for_range": ("compile_range",)}

"""Installs this package's cost model in place of torch's model, and restores torch's model."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _collective_utils
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from torch_symm.dtensor import _cost
from torch_symm.dtensor._cost import MeshTopoInfo
from torch_symm.dtensor._redistribute_cost import local_bytes, price_step, redistribute_cost

_PACKAGE = "torch.distributed.tensor"
_torchs_cost: Callable[[DTensorSpec, DTensorSpec], float] = _collective_utils.redistribute_cost
_torchs_step: Callable[[DTensorSpec, DTensorSpec], float] = _collective_utils.one_step_redistribute_cost


def enable_cost_model(network: Sequence[float] | None = None) -> None:
    """From now on, DTensor chooses shardings, and the order of steps, by this package's prices.

    Applies only to meshes whose groups are all symm; others keep torch's prices. May be called again;
    ``disable_cost_model`` undoes it. Call it on all ranks: they must make the same choices, and read the same profile.

    ``network``: speed of the network for meshes that span nodes: GB/s of a node (for CUDA: a GPU), µs of a trip. It
    also applies to :meth:`MeshTopoInfo.build_from_mesh`, until this function is called without it, or
    :func:`disable_cost_model` is called.

    Raises:
        ValueError: ``network`` is not a valid speed.
    """
    if network is not None and not (0 < network[0] < math.inf and 0 <= network[1] < math.inf):
        raise ValueError(f"network={network!r}: GB/s must be above 0, µs at least 0")
    _cost.default_network = None if network is None else (network[0], network[1])
    _replace({"redistribute_cost": _redistribute_cost, "one_step_redistribute_cost": _one_step_cost})


def disable_cost_model() -> None:
    """Restores torch's prices. May be called again."""
    _cost.default_network = None
    _replace({"redistribute_cost": _torchs_cost, "one_step_redistribute_cost": _torchs_step})


def _replace(functions: dict[str, Callable[..., Any]]) -> None:
    """Sets ``functions`` in every module of DTensor that has the same names, and clears earlier choices."""
    theirs_and_ours = {_torchs_cost, _torchs_step, _redistribute_cost, _one_step_cost}
    for name, module in list(sys.modules.items()):
        if name != _PACKAGE and not name.startswith(_PACKAGE + "."):
            continue
        for attribute, function in functions.items():
            if getattr(module, attribute, None) in theirs_and_ours:
                setattr(module, attribute, function)
    _cost.forget()
    _forget_choices()


def _forget_choices() -> None:
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    _redistribute._gen_transform_infos.cache_clear()


def _is_symm(mesh: DeviceMesh) -> bool:
    """Returns true if this rank's groups along all dimensions of ``mesh`` are symm."""
    try:
        groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
        return all("symm" in _backend_of(group, mesh.device_type) for group in groups)
    except (RuntimeError, ValueError):  # the mesh has no groups, or none of this rank
        return False


def _backend_of(group: dist.ProcessGroup, device_type: str) -> str:
    names = dist.get_backend_config(group)
    by_device = dict(pair.split(":", 1) for pair in names.split(",") if ":" in pair)
    return by_device.get(device_type, "" if by_device else names)


def _redistribute_cost(current_spec: DTensorSpec, target_spec: DTensorSpec) -> float:
    if not _priced(current_spec):
        return _torchs_cost(current_spec, target_spec)
    return redistribute_cost(current_spec, target_spec)


def _one_step_cost(current_spec: DTensorSpec, target_spec: DTensorSpec) -> float:
    """Replaces torch's function, for specs that differ in one placement."""
    if not _priced(current_spec) or current_spec.mesh != target_spec.mesh:
        return _torchs_step(current_spec, target_spec)
    pairs = zip(current_spec.placements, target_spec.placements, strict=True)
    changed = [(dim, before, after) for dim, (before, after) in enumerate(pairs) if before != after]
    if len(changed) != 1:
        return _torchs_step(current_spec, target_spec)
    topo = MeshTopoInfo.build_from_mesh(current_spec.mesh)
    dim, before, after = changed[0]
    return price_step(before, after, dim, local_bytes(current_spec), topo).us


def _priced(spec: DTensorSpec) -> bool:
    """Returns true if our prices apply: the mesh uses symm, and sizes are numbers, not symbols of a traced graph."""
    meta = spec.tensor_meta
    return meta is not None and all(type(size) is int for size in meta.shape) and _is_symm(spec.mesh)

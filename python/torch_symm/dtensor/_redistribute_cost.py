"""The cost of redistributing a DTensor: the steps that torch takes, each with bytes and µs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch.distributed._functional_collectives import _are_we_tracing
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._redistribute import _gen_transform_infos, _gen_transform_infos_non_cached
from torch.distributed.tensor.placement_types import _StridedShard

from torch_symm.dtensor._cost import MeshTopoInfo


@dataclass(frozen=True)
class RedistributeStep:
    """One step of a redistribution.

    ``collective``: torch's name, or ``"slice"`` if every rank keeps a part of its tensor. ``bytes``: size of the
    longest tensor that a rank passes or gets. ``us``: including local copies and the host's time if these were
    measured; infinite if the step does not exist. ``collective_us``: without them. ``price_source``: what the price is
    based on.
    """

    mesh_dim: int
    source: Placement
    target: Placement
    collective: str
    bytes: float
    us: float
    algorithm: str
    price_source: str
    collective_us: float = 0.0

    def __str__(self) -> str:
        where = f"mesh dimension {self.mesh_dim}: {self.source} → {self.target}"
        if self.collective == "slice":
            return f"{where}  slice, nothing moves" + (f", {self.us:.1f} µs" if self.us else "")
        if math.isinf(self.us):
            return f"{where}  impossible"
        shown = f"{where}  {self.collective} ({self.algorithm}), {self.bytes:,.0f} bytes, {self.us:.1f} µs"
        return shown if self.us == self.collective_us else f"{shown}, the collective {self.collective_us:.1f} of them"


@dataclass(frozen=True)
class RedistributePlan:
    """The steps of a redistribution; its text is a table. ``us``: the sum. ``note``: why there are no steps."""

    steps: tuple[RedistributeStep, ...]
    us: float
    origin: str
    note: str = ""

    def __str__(self) -> str:
        lines = [f"{number}. {step}" for number, step in enumerate(self.steps, 1)]
        total = "impossible" if math.isinf(self.us) else f"{self.us:.1f} µs"
        reason = f" ({self.note})" if self.note else ""
        return "\n".join([*lines, f"total: {total}{reason}; {self.origin}"])


def redistribute_cost(current_spec: DTensorSpec, target_spec: DTensorSpec, topo: MeshTopoInfo | None = None) -> float:
    """Returns the µs of the steps that redistribute from ``current_spec`` to ``target_spec``.

    Infinite between meshes and from ``Shard`` to ``Partial``; zero if nothing moves between ranks or this rank is
    outside the mesh. ``Shard`` to another ``Shard`` is an all-to-all. ``topo`` has prices that replace those of the
    mesh. The formula is in ``docs/design/cost-model.md``; with ``source="torch"`` it is torch's formula.

    Raises:
        ValueError: a spec lacks the tensor's shape and type.
    """
    return explain_redistribute(current_spec, target_spec, topo).us


def explain_redistribute(
    src: DTensorSpec | DTensor, dst: DTensorSpec | DTensor, topo: MeshTopoInfo | None = None
) -> RedistributePlan:
    """Returns the steps from ``src`` to ``dst`` with bytes and µs, which ``print`` shows.

    This call moves no data and waits for no rank. ``topo`` has prices that replace those of the mesh.

    Raises:
        ValueError: a spec lacks the tensor's shape and type.
    """
    source, target = _spec(src), _spec(dst)
    if source.mesh != target.mesh:
        return RedistributePlan((), math.inf, "between meshes", "the meshes differ")
    if source.is_replicated():
        note = "every rank has everything"
        steps = tuple(_slices(source, target))
        return RedistributePlan(steps, 0.0, "nothing moves", note)
    if source.shard_order is None or target.shard_order is None:
        return RedistributePlan((), math.inf, "no price", "the order of shards is not known")
    if source.placements == target.placements and source.shard_order == target.shard_order:
        return RedistributePlan((), 0.0, "nothing moves", "the placements are the same")
    if not source.mesh._is_current_rank_part_of_mesh():
        return RedistributePlan((), 0.0, "nothing moves", "this rank is outside the mesh")
    topo = topo or MeshTopoInfo.build_from_mesh(source.mesh)
    steps = tuple(_steps(source, target, topo))
    if all(step.collective == "slice" for step in steps):
        return RedistributePlan(tuple(replace(step, us=0.0) for step in steps), 0.0, "nothing moves")
    us = 0.0
    # torch adds in a loop, and `sum` is more exact than a loop since Python 3.12.
    for step in steps:
        us += step.us
    return RedistributePlan(steps, us, topo.origin)


def _spec(given: DTensorSpec | DTensor) -> DTensorSpec:
    spec = given._spec if isinstance(given, DTensor) else given
    if spec.tensor_meta is None:
        raise ValueError(f"{spec} has no tensor's shape and type, without which nothing can be priced")
    return spec


def local_bytes(spec: DTensorSpec) -> float:
    """Returns the size of a rank's part in bytes, if all parts are equal."""
    assert spec.tensor_meta is not None
    return spec.tensor_meta.dtype.itemsize * math.prod(spec.shape) / spec.num_shards


def _slices(source: DTensorSpec, target: DTensorSpec) -> Iterator[RedistributeStep]:
    for dim, (before, after) in enumerate(zip(source.placements, target.placements, strict=True)):
        if before != after:
            yield RedistributeStep(dim, before, after, "slice", 0.0, 0.0, "", "")


def _steps(source: DTensorSpec, target: DTensorSpec, topo: MeshTopoInfo) -> Iterator[RedistributeStep]:
    plan = (_gen_transform_infos_non_cached if _are_we_tracing() else _gen_transform_infos)(source, target)
    held = local_bytes(source)
    for info in plan:
        before, after = info.src_dst_placements
        step = price_step(before, after, info.mesh_dim, held, topo)
        yield step
        if math.isinf(step.us):
            return
        held = _held_after(before, after, held, topo.mesh_dim_devices[info.mesh_dim])


def _held_after(before: Placement, after: Placement, held: float, ranks: int) -> float:
    """Returns the bytes that a rank holds after a step, if it holds ``held`` bytes before the step."""
    if _cut(before) and after.is_replicate():
        return held * ranks
    if not _cut(before) and _cut(after):
        return held / ranks
    return held


def _cut(placement: Placement) -> bool:
    return placement.is_shard() or isinstance(placement, _StridedShard)


def price_step(before: Placement, after: Placement, mesh_dim: int, held: float, topo: MeshTopoInfo) -> RedistributeStep:
    """Returns the price of the step along ``mesh_dim`` for ranks that have ``held`` bytes each."""
    collective, moved = "", held
    if before == after or (before.is_replicate() and _cut(after)):
        collective, moved = "slice", 0.0
    elif _cut(before) and after.is_replicate():
        collective, moved = "all_gather", held * topo.mesh_dim_devices[mesh_dim]
    elif _cut(before) and _cut(after):
        collective = "all_to_all"
    elif before.is_partial() and after.is_replicate():
        collective = "all_reduce"
    elif before.is_partial() and _cut(after):
        collective = "reduce_scatter"
    elif before.is_replicate() and after.is_partial():
        # No data move: for a sum every rank divides its tensor, for most other reductions it keeps the tensor.
        collective, moved = "slice", 0.0
    if not collective:
        return RedistributeStep(mesh_dim, before, after, "", moved, math.inf, "", "")
    alone, algorithm, source = (0.0, "", "") if collective == "slice" else topo.price(collective, moved, mesh_dim)
    local = topo.local_us(_copied(before, after, held, topo.mesh_dim_devices[mesh_dim]), collective != "slice")
    us = 0.0 if before == after else alone + local
    return RedistributeStep(mesh_dim, before, after, collective, moved, us, algorithm, source, alone)


def _copied(before: Placement, after: Placement, held: float, ranks: int) -> float:
    """Returns the bytes that a rank with ``held`` bytes copies for a step, in addition to the collective.

    Like the code of torch 2.11: parts of a dimension other than the first are reordered before or after the
    collective, an all-reduce runs on a copy, a part is sliced as a copy; an all-to-all is packed and unpacked.
    """
    if before.is_replicate():
        return held / ranks if _cut(after) else held
    if _cut(before) and _cut(after):
        return 2 * held
    if _cut(before):
        return 0.0 if _is_first(before) else held * ranks
    return 0.0 if _cut(after) and _is_first(after) else held


def _is_first(placement: Placement) -> bool:
    return getattr(placement, "dim", 0) == 0

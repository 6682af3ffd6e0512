"""The cost of a collective along a dimension of a mesh, in microseconds.

The functions are named as in ``torch.distributed.tensor._collective_utils``. ``bytes`` is the size of the longest
tensor that a rank passes or gets, like ``bytes_gb``, but in bytes instead of GiB. The formulas are in Rust;
``docs/design/cost-model.md`` documents them with their sources.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources

from torch_symm._native import load

if TYPE_CHECKING:
    from torch_symm._C import _CostModel

#: The source of prices; ``auto``: ``measured`` if a profile of this hardware exists, otherwise ``links``.
PriceSource: TypeAlias = Literal["auto", "measured", "links", "torch"]


@dataclass
class MeshTopoInfo:
    """The dimensions of a mesh: ranks, a rank's sending rate in GB/s, and the latency of a trip in µs.

    Made by :meth:`build_from_mesh`, or from the user's own figures. With these, ``source`` says which formula gives the
    prices: ``links`` (bytes and trips of the algorithm that would run) or ``torch`` (torch's formula for a ring).
    """

    mesh: DeviceMesh
    mesh_dim_devices: list[int]
    mesh_dim_bandwidth: list[float]
    mesh_dim_latency: list[float]
    source: PriceSource = "links"
    _prices: _CostModel = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.source not in ("links", "torch"):
            raise ValueError(f"links of one's own are priced by 'links' or 'torch', not by {self.source!r}")
        self._prices = cast(
            "_CostModel",
            load()._open_cost_model(
                _device_of(self.mesh),
                self.mesh_dim_devices,
                job_ranks(),
                devices_per_node(self.mesh.device_type),
                self.source,
                self.mesh_dim_bandwidth,
                self.mesh_dim_latency,
            ),
        )

    @staticmethod
    def build_from_mesh(
        mesh: DeviceMesh, source: PriceSource = "auto", network: Sequence[float] | None = None
    ) -> MeshTopoInfo:
        """Returns the dimensions of ``mesh`` on this hardware: NVLinks, PCIe, shared memory, and the network.

        ``source="torch"`` has torch's constants and returns torch's numbers, to the last digit. Queries no other rank.
        ``network``: the network for mesh dimensions that span nodes: the GB/s that a node sends (for CUDA: a GPU), and
        the µs of a trip. ``None``: as passed to :func:`enable_cost_model`, otherwise 1.25 GB/s and 135 µs for CPU
        tensors, and torch's constants for CUDA. ``torch`` uses only its constants.

        Raises:
            SymmConfigError: ``SYMM_COST_PROFILE`` names a faulty file or a profile of other hardware; ``source`` is
                ``measured`` and there is no profile of this hardware; the file of ``SYMM_TOPOLOGY_FILE`` is faulty.
            ValueError: ``source`` is not one of the four, or ``network`` is not a valid speed.
        """
        pair = default_network if network is None else (network[0], network[1])  # A list could not be a key
        return _build(mesh, source, job_ranks(), pair)

    @property
    def origin(self) -> str:
        """The source of the figures, for human readers."""
        return self._prices.origin

    def price(self, op: str, bytes: float, mesh_dim: int) -> tuple[float, str, str]:
        """Returns the µs of the collective ``op``, its algorithm, and the source of the price.

        ``op`` is torch's name, ``bytes`` the size of the longest tensor of a rank; the ranks of ``mesh_dim`` take part.

        Raises:
            ValueError: ``op`` has no price, ``bytes`` cannot be moved, or the mesh has no such dimension.
        """
        return self._prices.price(op, bytes, self._dim(mesh_dim))

    def local_us(self, copied: float, collective: bool) -> float:
        """Returns the µs of a redistribution step outside its collective: host's time, and ``copied`` bytes.

        ``collective``: whether the step has a collective. Returns 0, like torch's model, if the time was not measured.
        """
        local = self._prices.local
        if local is None:
            return 0.0
        step_us, slice_us, copy_gb_per_s = local
        return (step_us if collective else slice_us) + copied / copy_gb_per_s / 1e3

    def _dim(self, mesh_dim: int) -> int:
        dims = len(self.mesh_dim_devices)
        if not -dims <= mesh_dim < dims:
            raise ValueError(f"mesh dimension {mesh_dim} of {dims}")
        return mesh_dim % dims


#: The network speed passed to :func:`enable_cost_model`.
default_network: tuple[float, float] | None = None


@lru_cache(maxsize=256)
def _build(mesh: DeviceMesh, source: PriceSource, job: int, network: tuple[float, float] | None) -> MeshTopoInfo:
    if source not in ("auto", "measured", "links", "torch"):
        raise ValueError(f"{source!r} is no source of prices: there are auto, measured, links and torch")
    sizes = [mesh.size(dim) for dim in range(mesh.ndim)]
    per_node = _mesh_resources.num_devices_per_host(mesh.device_type) if source == "torch" else None
    info = from_prices(mesh, sizes, "measured" if source == "auto" else source, job, per_node, network=network)
    if info is None and source == "auto":
        info = from_prices(mesh, sizes, "links", job, network=network)
    if info is None:
        _native = load()
        raise _native.SymmConfigError(
            f"there is no profile for {job} ranks on {mesh.device_type} of this node: measure with "
            "`python -m torch_symm tune`"
        )
    return info


def from_prices(
    mesh: DeviceMesh,
    sizes: list[int],
    source: PriceSource,
    job: int,
    per_node: int | None = None,
    profile: os.PathLike[str] | None = None,
    network: tuple[float, float] | None = None,
) -> MeshTopoInfo | None:
    """Prices the dimensions ``sizes`` of ``mesh`` by ``source``; ``None`` for ``measured`` without measurements.

    ``job``: ranks of the job on this node. ``profile``: a file to use instead of the one that is found.

    Raises:
        SymmConfigError: see :meth:`MeshTopoInfo.build_from_mesh`.
    """

    def opened(gb_per_s: Sequence[float] = (), us: Sequence[float] = ()) -> _CostModel | None:
        device, room = _device_of(mesh), per_node or devices_per_node(mesh.device_type)
        file = os.fsencode(profile) if profile else b""
        answer: _CostModel | None = load()._open_cost_model(
            device, sizes, job, room, source, gb_per_s, us, profile=file
        )
        return answer

    prices = opened()
    if prices is not None and network is not None and source != "torch":
        between = [prices.price("all_reduce", 0, dim)[1] == "two_level" for dim in range(len(sizes))]
        if any(between):
            links = zip(between, prices.gb_per_s, prices.us, strict=True)
            rates, trips = zip(*(network if far else (gb_per_s, us) for far, gb_per_s, us in links), strict=True)
            prices = opened(rates, trips)
    if prices is None:
        return None
    info = object.__new__(MeshTopoInfo)
    info.mesh, info.source, info._prices = mesh, source, prices
    info.mesh_dim_devices, info.mesh_dim_bandwidth, info.mesh_dim_latency = sizes, prices.gb_per_s, prices.us
    return info


def forget() -> None:
    """Forgets all meshes, so that each is built again on its next use."""
    _build.cache_clear()


def _device_of(mesh: DeviceMesh) -> str:
    return "cuda" if mesh.device_type == "cuda" else "cpu"


def job_ranks() -> int:
    """Returns the number of this job's ranks on this node: torchrun's number, or all ranks without torchrun."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return min(world, int(local)) if local.isdecimal() and int(local) > 0 else world


def devices_per_node(device_type: str) -> int:
    """Returns the maximum number of ranks on a node: the job's ranks, or for CUDA the GPUs if there are more."""
    if device_type == "cuda":
        import torch

        return max(1, torch.cuda.device_count(), job_ranks())
    return max(1, job_ranks())


#: The unit of ``bytes_gb``, in bytes.
GIB = 1 << 30


def allgather_cost(bytes_gb: float, mesh_topo: MeshTopoInfo, mesh_dim: int) -> float:
    """Returns the µs of an all-gather that returns ``bytes_gb`` GiB on every rank.

    The formulas of all collectives are in ``docs/design/cost-model.md``; with ``source="torch"`` they are torch's
    formulas.

    Args:
        bytes_gb: the whole tensor, in units of 2^30 bytes, as in ``torch.distributed.tensor._collective_utils``.
        mesh_topo: prices of the mesh.
        mesh_dim: the dimension of the mesh whose ranks form the group.

    Raises:
        ValueError: ``bytes_gb`` cannot be moved, or the mesh has no such dimension. The functions of the other
        collectives raise the same.
    """
    return mesh_topo.price("all_gather", bytes_gb * GIB, mesh_dim)[0]


def allreduce_cost(bytes_gb: float, mesh_topo: MeshTopoInfo, mesh_dim: int) -> float:
    """Returns the µs of an all-reduce of ``bytes_gb`` GiB on every rank along ``mesh_dim`` of ``mesh_topo``.

    Formula and errors are as in :func:`allgather_cost` (``docs/design/cost-model.md``).
    """
    return mesh_topo.price("all_reduce", bytes_gb * GIB, mesh_dim)[0]


def reduce_scatter_cost(bytes_gb: float, mesh_topo: MeshTopoInfo, mesh_dim: int) -> float:
    """Returns the µs of a reduce-scatter of ``bytes_gb`` GiB on every rank along ``mesh_dim`` of ``mesh_topo``.

    Formula and errors are as in :func:`allgather_cost` (``docs/design/cost-model.md``).
    """
    return mesh_topo.price("reduce_scatter", bytes_gb * GIB, mesh_dim)[0]


def all_to_all_cost(bytes_gb: float, mesh_topo: MeshTopoInfo, mesh_dim: int) -> float:
    """Returns the µs of an all-to-all of ``bytes_gb`` GiB on every rank along ``mesh_dim`` of ``mesh_topo``.

    torch has no price for an all-to-all. With torch's constants, this is the price that torch uses instead: an
    all-gather of the same size and 1 µs (``docs/design/cost-model.md``).
    """
    return mesh_topo.price("all_to_all", bytes_gb * GIB, mesh_dim)[0]


def broadcast_cost(bytes_gb: float, mesh_topo: MeshTopoInfo, mesh_dim: int) -> float:
    """Returns the µs of a broadcast of ``bytes_gb`` GiB to all ranks along ``mesh_dim`` of ``mesh_topo``.

    torch has no price for a broadcast. With torch's constants, this is the price of a pipeline along the ring
    (``docs/design/cost-model.md``).
    """
    return mesh_topo.price("broadcast", bytes_gb * GIB, mesh_dim)[0]

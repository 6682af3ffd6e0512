"""How the GPUs of this node are connected."""

from __future__ import annotations

from dataclasses import dataclass

from torch_symm._native import load


@dataclass(frozen=True)
class DMAConnectivity:
    """The links between devices, in the shape of torch's ``_DMAConnectivity``.

    ``matrix[i][j]`` is the number of links between the devices ``i`` and ``j``, 0 if they have none or ``i == j``.
    """

    device_type: str
    connection_type: str
    matrix: list[list[int]]


def detect_dma_connectivity(device_type: str, connection_type: str) -> DMAConnectivity:
    """Counts the NVLinks between this process's CUDA devices, in torch's order (``CUDA_VISIBLE_DEVICES``).

    Gets the devices from torch, which initialises CUDA, and the links from NVML or ``SYMM_TOPOLOGY_FILE``. For two GPUs
    on switches, it counts the links of the GPU that has fewer. Without a CUDA device, the matrix is empty.

    Args:
        device_type: ``"cuda"``.
        connection_type: ``"nvlink"``.

    Returns:
        The matrix, in torch's order of devices.

    Raises:
        ValueError: any other type.
        SymmConfigError: NVML is missing or does not show one of the devices, or the topology file is faulty.
    """
    if (device_type, connection_type) != ("cuda", "nvlink"):
        raise ValueError(
            f"the connectivity of {device_type!r} devices by {connection_type!r} is not known here: "
            "there is 'cuda' by 'nvlink'"
        )
    import torch

    devices = range(torch.cuda.device_count())
    uuids = [str(torch.cuda.get_device_properties(device).uuid) for device in devices]
    return DMAConnectivity(device_type, connection_type, load()._nvlink_matrix(uuids))


def topology() -> str:
    """Returns a table of this node's GPUs and their connections, like ``nvidia-smi topo -m``.

    Shows all GPUs that NVML or ``SYMM_TOPOLOGY_FILE`` names, by PCI address. Without NVML it says why.

    Raises:
        SymmConfigError: the topology file is faulty.
    """
    report: str = load()._topology_report()
    return report

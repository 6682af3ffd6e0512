"""Every difference between the versions of torch that the package's Python code goes by.

``torch_backend/compat.hpp`` has those of C++; ``_version.py`` names the versions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed._functional_collectives as funcol

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def group_name(mesh: DeviceMesh, mesh_dim: int) -> Any:
    """The name of the group of one mesh dimension, also where Dynamo traces.

    ``funcol._resolve_group_name`` says the same, but in 2.12 and later makes a ``GroupName`` of it, which Dynamo does
    not follow.
    """
    if hasattr(funcol, "_resolve_group"):
        group = funcol._resolve_group((mesh, mesh_dim))
        return group if isinstance(group, str) else group.group_name
    return funcol._resolve_group_name((mesh, mesh_dim))

"""Optimizes the collectives of symm groups in Inductor's graphs.

After :func:`enable`, ``torch.compile`` uses ``torch.ops.symm.all_reduce_add_rms_norm`` for an all-reduce whose result
is added to a residual and normed, and ``torch.ops.symm.all_reduce`` for other all-reduces whose input is needed
afterwards.
"""

from __future__ import annotations

from torch_symm.compile._pass import disable, enable

__all__ = ["disable", "enable"]

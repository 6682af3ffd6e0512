"""What Inductor does with the collectives of symm groups.

After :func:`enable`, ``torch.compile`` puts ``torch.ops.symm.all_reduce_add_rms_norm`` in the place of an all-reduce
whose result is added to a residual and normed, and ``torch.ops.symm.all_reduce`` in that of others whose input is
needed afterwards.
"""

from __future__ import annotations

from torch_symm.compile._pass import disable, enable

__all__ = ["disable", "enable"]

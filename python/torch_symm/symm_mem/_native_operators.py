"""The parts of the fused operators that are written in C++."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_symm.symm_mem._memory import BACKEND, get_backend

#: The types that the C++ operators multiply; sums are in fp32.
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def native(name: str, A: torch.Tensor) -> Callable[..., Any] | None:
    """Returns ``torch.ops.symm.<name>`` if it exists, supports ``A``, and ``BACKEND`` serves its device."""
    if A.dtype not in _DTYPES or get_backend(A.device) != BACKEND:
        return None
    found: Callable[..., Any] | None = getattr(torch.ops.symm, name, None)
    return found

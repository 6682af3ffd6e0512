"""The maximum size of a group, as in `src/mem/layout.rs` and `src/coll/cuda/workspace/layout.rs`."""

from __future__ import annotations

#: Maximum number of ranks, without tensors on GPUs and with them.
CPU_RANKS, GPU_RANKS = 128, 16

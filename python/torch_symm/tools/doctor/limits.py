"""How many ranks a group may have, as `src/mem/layout.rs` and `src/coll/cuda/workspace/layout.rs` have it."""

from __future__ import annotations

#: Without tensors on GPUs, and with them.
CPU_RANKS, GPU_RANKS = 128, 16

// Loops over the ranks of the group, and masks of them.
#pragma once
#include "device.cuh"

// Returns the mask of all other ranks, a bit each.
DEVICE u32 all_peers() {
  return ((1u << WORLD) - 1) & ~(1u << RANK);
}

// Calls `body(r)` for every other rank r, starting from the next rank: no two ranks start with the
// same peer. The loop is unrolled.
template <typename Body>
DEVICE void for_each_peer(Body body) {
#pragma unroll
  for (u32 k = 1; k < WORLD; ++k) {
    body((RANK + k) % WORLD);
  }
}

// Calls `body(r)` for every rank r, in rank order. The loop is unrolled.
template <typename Body>
DEVICE void for_each_rank(Body body) {
#pragma unroll
  for (u32 r = 0; r < WORLD; ++r) {
    body(r);
  }
}

// Calls `body(r)` for every rank r, starting from the next rank and ending with this one. The loop
// is unrolled.
template <typename Body>
DEVICE void for_each_peer_and_self(Body body) {
#pragma unroll
  for (u32 k = 1; k <= WORLD; ++k) {
    body((RANK + k) % WORLD);
  }
}

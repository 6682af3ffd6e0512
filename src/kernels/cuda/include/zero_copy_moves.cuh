// Copies between tensors in symmetric memory: all blocks of the grid stride over the message
// together, without roles and without waiting. Peers' tensors are aligned to 16 bytes. This rank's
// own tensor may have any alignment where a function says so.
#pragma once
#include "zero_copy.cuh"
#include "staging.cuh"

// The first unit of a thread, and the step from one of its units to the next.
struct Stride {
  u64 first;
  u64 step;
};

DEVICE Stride stride_of_grid() {
  return {(u64)block() * threads() + thread(), (u64)blocks() * threads()};
}

// Returns true if this thread moves the remainder of less than a unit; one thread of the grid does.
DEVICE bool moves_the_rest(u64 bytes) {
  return bytes % 16 != 0 && block() == 0 && thread() == 0;
}

// Stores `bytes` of a unit (16 or more: all of it) to a tensor that is aligned to 16 bytes.
DEVICE void store_aligned(u8* to, Unit unit, u64 bytes) {
  if (bytes >= 16) {
    *(Unit*)to = unit;
  } else {
    store_unit(to, unit, bytes);
  }
}

// Copies `from`, at any alignment, to all ranks in `targets` (a bit each).
DEVICE void put_same(const u8* from, u8* const (&to)[WORLD], u32 targets, u64 bytes) {
  const u64 units = bytes / 16;
  const u64 first = stride_of_grid().first, step = stride_of_grid().step;
  // step 1: load some units, then store each at every target
  for (u64 i = first; i < units; i += step * ALONE_AT_ONCE) {
    Unit v[ALONE_AT_ONCE];
    for_each_unit(i, units, step, [&](u32 u, u64 at) { v[u] = load_unit(from + at * 16, 16); });
    for_each_peer_and_self([&](u32 r) {
      for_each_unit(i, units, step, [&](u32 u, u64 at) {
        if (targets >> r & 1) {
          ((Unit*)to[r])[at] = v[u];
        }
      });
    });
  }
  // step 2: one thread copies the remainder
  if (moves_the_rest(bytes)) {
    const Unit v = load_unit(from + units * 16, bytes % 16);
    for_each_rank([&](u32 r) {
      if (targets >> r & 1) {
        store_unit(to[r] + units * 16, v, bytes % 16);
      }
    });
  }
}

// Copies `from[r]`, at any alignment, to each rank r in `targets` (a bit each).
DEVICE void put_each(
    const u8* const* from, u8* const (&to)[WORLD], u32 targets, const u64 (&bytes)[WORLD]) {
  u64 units[WORLD];
  u64 longest = 0;
  for_each_peer_and_self([&](u32 r) {
    units[r] = targets >> r & 1 ? bytes[r] / 16 : 0;
    longest = larger(longest, units[r]);
  });
  const u64 first = stride_of_grid().first, step = stride_of_grid().step;
  // step 1: load some units of every message, then store them at their targets
  for (u64 i = first; i < longest; i += step * AT_ONCE) {
    Unit v[AT_ONCE][WORLD];
#pragma unroll
    for (u32 u = 0; u < AT_ONCE; ++u) {
      const u64 at = i + u * step;
      for_each_peer_and_self([&](u32 r) {
        if (at < units[r]) {
          v[u][r] = load_unit(from[r] + at * 16, 16);
        }
      });
    }
#pragma unroll
    for (u32 u = 0; u < AT_ONCE; ++u) {
      const u64 at = i + u * step;
      for_each_peer_and_self([&](u32 r) {
        if (at < units[r]) {
          ((Unit*)to[r])[at] = v[u][r];
        }
      });
    }
  }
  // step 2: one thread copies the remainders
  for_each_peer_and_self([&](u32 r) {
    if ((targets >> r & 1) && moves_the_rest(bytes[r])) {
      store_unit(
          to[r] + units[r] * 16, load_unit(from[r] + units[r] * 16, bytes[r] % 16), bytes[r] % 16);
    }
  });
}

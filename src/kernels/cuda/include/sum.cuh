// Sums of one unit of every rank, read from slots or directly from the ranks' tensors.
#pragma once
#include "zero_copy_moves.cuh"
#include "reduction.cuh"

// Returns the sum of this rank's `own` unit, times `factor`, and unit `unit` in every peer's slot.
DEVICE Unit sum_of(const Unit* const (&slot)[WORLD], u32 unit, Unit own, double factor) {
  Unit v[WORLD];
  for_each_peer([&](u32 r) { v[r] = slot[r][unit]; });
  v[RANK] = lift(own, factor);
  return sum_in_order(v);
}

// Exchanges the factors of PREMUL_SUM within a handshake, because the rank that adds also
// multiplies each input by its sender's factor. Returns false if a rank did not arrive.
DEVICE bool exchange_factors(HandshakeSession& session, double own, double (&factor)[WORLD]) {
  if constexpr (static_cast<Op>(SYMM_OP) == Op::PREMUL_SUM) {
    u64 bits[WORLD];
    const bool all = session.exchange_further(bits_of(own), bits);
    for_each_rank([&](u32 r) { factor[r] = double_of(bits[r]); });
    return all;
  } else {
    for_each_rank([&](u32 r) { factor[r] = own; });
    return true;
  }
}

// Returns the sum of one unit of each rank, each times its rank's factor.
DEVICE Unit sum_of(const Unit (&v)[WORLD], const double (&factor)[WORLD]) {
  return sum_over_ranks([&](u32 r) { return lift(v[r], factor[r]); });
}

// Adds the `bytes` at `from[r]` of all ranks; `keep(offset, unit, bytes)` stores the sum. The sum
// may replace an input, because only one thread loads and stores a unit.
template <typename Keep>
DEVICE void sum_in_place(
    const u8* const (&from)[WORLD], const double (&factor)[WORLD], u64 bytes, Keep keep) {
  const u64 units = bytes / 16;
  const u64 first = stride_of_grid().first, step = stride_of_grid().step;
  // step 1: load several units of every rank, then add and store each; if AT_ONCE is 1, the loop
  // has checked the bound
  for (u64 i = first; i < units; i += step * AT_ONCE) {
    Unit v[AT_ONCE][WORLD];
#pragma unroll
    for (u32 u = 0; u < AT_ONCE; ++u) {
      const u64 at = i + u * step;
      if (AT_ONCE == 1 || at < units) {
        for_each_peer_and_self([&](u32 r) { v[u][r] = ((const Unit*)from[r])[at]; });
      }
    }
#pragma unroll
    for (u32 u = 0; u < AT_ONCE; ++u) {
      const u64 at = i + u * step;
      if (AT_ONCE == 1 || at < units) {
        keep(at * 16, sum_of(v[u], factor), (u64)16);
      }
    }
  }
  // step 2: one thread adds the remainder
  if (moves_the_rest(bytes)) {
    Unit v[WORLD];
    for_each_rank([&](u32 r) { v[r] = load_unit(from[r] + units * 16, bytes % 16); });
    keep(units * 16, sum_of(v, factor), bytes % 16);
  }
}

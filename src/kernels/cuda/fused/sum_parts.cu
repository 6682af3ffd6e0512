// The sum over all ranks of one part of a matrix product, in rank order: each rank's part lies in this rank's memory or in a peer's, and
// is loaded from there. Nothing waits here: the parts were complete before this kernel began.
// Aligned to 16 bytes: every part, and the result.
#include "sum.cuh"

struct SumPartsArgs {
  const u8* from[MAX_WORLD];
  u8* to;
  u64 bytes;
};
// src/fused/sum_parts.rs lays it out too.
static_assert(sizeof(SumPartsArgs) == 144, "");

LANE_KERNEL(sum_parts, SumPartsArgs) {
  const u8* from[WORLD];
  double factor[WORLD];
#pragma unroll
  for (u32 r = 0; r < WORLD; ++r) {
    from[r] = args.from[r];
    factor[r] = 1;
  }
  sum_in_place(from, factor, args.bytes, [&](u64 offset, Unit sum, u64 bytes) { store_aligned(args.to + offset, sum, bytes); });
}

// Sum over all ranks of one part of a matrix product, in rank order. Each rank's part is in this
// rank's memory or in a peer's, and is loaded from there. The kernel never waits, because the parts
// were complete before it started. Every part, and the result, is aligned to 16 bytes.
#include "sum.cuh"

struct SumPartsArgs {
  const u8* from[MAX_WORLD];
  u8* to;
  u64 bytes;
};
// src/fused/sum_parts.rs declares the same layout.
static_assert(sizeof(SumPartsArgs) == 144, "");

LANE_KERNEL(sum_parts, SumPartsArgs) {
  // step 1: take the address of every rank's part, with the factor 1
  const u8* from[WORLD];
  double factor[WORLD];
  for_each_rank([&](u32 r) {
    from[r] = args.from[r];
    factor[r] = 1;
  });
  // step 2: load each unit of all parts, add the units in rank order, store the sum
  sum_in_place(from, factor, args.bytes, [&](u64 offset, Unit sum, u64 bytes) {
    store_aligned(args.to + offset, sum, bytes);
  });
}

// Sum over all ranks of one chunk or of one whole message. The kernel never waits: all bytes have
// arrived before it starts.
#include "units.cuh"
#include "wait.cuh"
#include "reduction.cuh"

struct CopySumArgs {
  Common common;
  // Each rank's bytes: tensors, or slots of this rank's workspace.
  const u8* from[MAX_WORLD];
  u8* to;
  u64 bytes;
};
static_assert(sizeof(CopySumArgs) == 304, "");

// Number of units of each rank that a thread loads at once; registers are scarce with many ranks.
#define CHUNK_AT_ONCE (WORLD > 4 ? 1u : 2u)

KERNEL(copy_sum, CopySumArgs) {
  after_predecessor();
  // After a timeout the bytes may be missing, and nothing is stored.
  if (Wait(args.common).over) {
    return;
  }
  const u64 units = units_of(args.bytes);
  const u64 step = (u64)blocks() * threads();
  for (u64 i = (u64)block() * threads() + thread(); i < units; i += step * CHUNK_AT_ONCE) {
    Unit v[CHUNK_AT_ONCE][WORLD];
#pragma unroll
    for (u32 u = 0; u < CHUNK_AT_ONCE; ++u) {
      const u64 at = i + u * step;
      if (at < units) {
        for (u32 r = 0; r < WORLD; ++r) {
          v[u][r] = load_unit(args.from[r] + at * 16, args.bytes - at * 16);
        }
      }
    }
#pragma unroll
    for (u32 u = 0; u < CHUNK_AT_ONCE; ++u) {
      const u64 at = i + u * step;
      if (at < units) {
        store_unit(args.to + at * 16, sum_in_order(v[u]), args.bytes - at * 16);
      }
    }
  }
}

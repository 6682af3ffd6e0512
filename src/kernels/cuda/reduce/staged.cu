// Reduce-scatter of long messages: every rank sends each piece to the rank that needs it, which adds it up in rank order.
#include "pieces.cuh"
#include "sum.cuh"

struct ReduceStagedArgs {
  Common common;
  Staging staging;
  // What this rank gives to each rank; of 0 bytes: nothing.
  Outgoing out;
  // Where its own result goes; null: it gets none.
  u8* to;
  u64 bytes;
  double factor;
};
static_assert(sizeof(ReduceStagedArgs) == 480, "");

// Blocks: a lane's sender and receiver side by side.
LANE_KERNEL(reduce_staged, ReduceStagedArgs) {
  after_predecessor();
  const auto [lane, role] = place_of(block(), 2);
  const u32 everybody = ((1u << WORLD) - 1) & ~(1u << RANK);
  if (role == 0) {
    Stage stage(args.common, args.staging, lane);
    const double factor = args.factor;
    send_pieces(stage, args.out, everybody, [factor](Unit v) { return lift(v, factor); });
    return;
  }
  if (args.to == nullptr) {
    return;
  }
  Stage stage(args.common, args.staging, lane);
  u64 bytes[WORLD];
#pragma unroll
  for (u32 r = 0; r < WORLD; ++r) {
    bytes[r] = args.bytes;
  }
  const u8* own = args.out.from[RANK];
  take_pieces(stage, bytes, everybody, [&](u64 start, const u32(&units)[WORLD], const Unit* const(&slot)[WORLD]) {
    const u32 count = units[(RANK + 1) % WORLD];
    for (u32 i = thread(); i < count; i += threads()) {
      const u64 offset = start + (u64)i * 16;
      store_unit(args.to + offset, sum_of(slot, i, load_unit(own + offset, args.bytes - offset), args.factor), args.bytes - offset);
    }
  });
}

// Broadcast of long messages: the root gives each other rank a piece, which passes it on to the others. No rank sends more than S.
#include "two_stage.cuh"

// Blocks: a lane's three roles side by side.
LANE_KERNEL(broadcast_staged, TwoStageArgs) {
  after_predecessor();
  const auto [lane, role] = place_of(block(), 3);
  const u32 root = args.root;
  const u32 others = ((1u << WORLD) - 1) & ~(1u << RANK) & ~(1u << root);
  if (role == 0) {
    if (root == RANK) {
      scatter(args, lane, [](Unit v) { return v; });
    }
  } else if (role == 1) {
    if (root != RANK) {
      spread(args, lane, 1u << root, others, [&](const Unit* const(&slot)[WORLD], u32 unit, u64) {
        // By masks: an index that is no constant would put the table into memory.
        u64 from = 0;
#pragma unroll
        for (u32 r = 0; r < WORLD; ++r) {
          from |= (u64)slot[r] & (0 - (u64)(r == root));
        }
        return ((const Unit*)from)[unit];
      });
    }
  } else if (root != RANK) {
    gather(args, lane);
  }
}

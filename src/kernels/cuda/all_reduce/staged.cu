// All-reduce and reduce of long messages: each rank adds up one piece in rank order while chunks of it are still arriving.
// Sent per rank: 2 (n - 1) / n S; of a reduce: S.
#include "sum.cuh"
#include "two_stage.cuh"

// Blocks: a lane's three roles side by side.
LANE_KERNEL(all_reduce_staged, TwoStageArgs) {
  after_predecessor();
  const auto [lane, role] = place_of(block(), 3);
  const u32 everybody = ((1u << WORLD) - 1) & ~(1u << RANK);
  if (role == 0) {
    const double factor = args.factor;
    scatter(args, lane, [factor](Unit v) { return lift(v, factor); });
  } else if (role == 1) {
    spread(args, lane, everybody, args.targets & everybody, [&](const Unit* const(&slot)[WORLD], u32 unit, u64 offset) {
      return sum_of(slot, unit, load_unit(args.from + offset, args.bytes - offset), args.factor);
    });
  } else if (args.targets >> RANK & 1) {
    gather(args, lane);
  }
}

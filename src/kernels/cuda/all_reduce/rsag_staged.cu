// All-reduce and reduce of long messages: each rank adds up one piece in rank order while chunks of it are still arriving.
// Sent per rank: 2 (n - 1) / n S; of a reduce: S.
// In a zero-copy call sums go straight into the tensors of those ranks whose results are symmetric memory. Inputs are pushed all the same:
// loads over NVLink are slower than stores (docs/measurements/gpu-h200.md).
#include "sum.cuh"
#include "rsag_staged.cuh"

// Blocks: a lane's three roles side by side.
LANE_KERNEL(rsag_staged, RsagStagedArgs) {
  after_predecessor();
  const auto [lane, role] = role_of(block(), 3);
  const u32 everybody = ((1u << WORLD) - 1) & ~(1u << RANK);
  if (role == 0) {
    const double factor = args.factor;
    scatter(args, lane, [factor](Unit v) { return lift(v, factor); });
  } else if (role == 1) {
    const auto make = [&](const Unit* const(&slot)[WORLD], u32 unit, u64 offset) {
      return sum_of(slot, unit, load_unit(args.from + offset, args.bytes - offset), args.factor);
    };
#ifdef SYMM_ZERO_COPY
    gather_zero_copy(args, lane, everybody, args.targets & everybody, EVERYBODY, make);
  } else if (args.handshake.take != 0) {
    // Peers store here themselves.
#else
    gather(args, lane, everybody, args.targets & everybody, make);
#endif
  } else if (args.targets >> RANK & 1) {
    gather(args, lane);
  }
}

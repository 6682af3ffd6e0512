// All-reduce and reduce of long messages: reduce-scatter and all-gather through staging. Each rank
// adds one piece in rank order while later chunks of it still arrive. For a tensor of S bytes each
// rank sends 2 (n - 1) / n S bytes, or S bytes in a reduce. In a zero-copy call sums are stored
// directly to result tensors in symmetric memory. Inputs are still pushed, because loads over
// NVLink are slower than stores (docs/measurements/gpu-h200.md).
#include "sum.cuh"
#include "rsag_staged.cuh"

// Blocks of the kernel: the three roles of a lane are adjacent.
LANE_KERNEL(rsag_staged, RsagStagedArgs) {
  after_predecessor();
  announce_arrival(args.common, args.scatter.arrivals);
  const auto [lane, role] = role_of(block(), 3);
  if (role == 0) {
    // step 1 (role 0): send each peer its piece of this rank's input, chunk by chunk
    const double factor = args.factor;
    scatter(args, lane, [factor](Unit v) { return lift(v, factor); });
  } else if (role == 1) {
    // step 2 (role 1): add each arrived chunk of this rank's piece in rank order, send the sum to
    // every target
    const auto make = [&](const Unit* const(&slot)[WORLD], u32 unit, u64 offset) {
      return sum_of(slot, unit, load_unit(args.from + offset, args.bytes - offset), args.factor);
    };
#ifdef SYMM_ZERO_COPY
    gather_zero_copy(args, lane, all_peers(), args.targets & all_peers(), EVERYBODY, make);
  } else if (args.handshake.take != 0) {
    // step 3 (role 2), zero-copy: nothing to do, since peers store the sums to this rank's tensor
#else
    gather(args, lane, all_peers(), args.targets & all_peers(), make);
#endif
  } else if (args.targets >> RANK & 1) {
    // step 3 (role 2): copy the sums of the other pieces from the slots to the result
    gather(args, lane);
  }
}

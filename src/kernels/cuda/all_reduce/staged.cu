// All-reduce and reduce of long messages: each rank adds up one piece in rank order while chunks of it are still arriving.
// Sent per rank: 2 (n - 1) / n S; of a reduce: S.
// In a gated call sums go straight into the tensors of those ranks whose results are symmetric memory. Inputs are pushed all the same:
// loads over NVLink are slower than stores (docs/kernels.md).
#include "sum.cuh"
#include "two_stage.cuh"

#ifdef SYMM_GATED
// Who adds up learns from the same block of each peer where its result goes.
template <typename Make>
DEVICE void spread_gated(const TwoStageArgs& args, u32 lane, u32 sources, u32 targets, Make make) {
  const Gate& gate = args.gate;
  const Round round = begin_round(args.common, lines_of(gate));
  const auto tell = [&](u32 r) -> Line { return {told(gate, gate.take >> r & 1, args.to), 0}; };
  Line said[WORLD];
  if (!open_gate(args.common, round, EVERYBODY, tell, said)) {
    return;
  }
  Places places{};
#pragma unroll
  for (u32 r = 0; r < WORLD; ++r) {
    places.at[r] = heard(gate, r, said[r].first);
    places.ranks |= said[r].first != 0 ? targets & 1u << r : 0;
  }
  spread_to<true>(args, lane, sources, targets, places, make);
  if (places.ranks != 0 || gate.take != 0) {
    count_direct(args.common, gate, lane == 0);
  }
  close_gate(args.common, gate, round, EVERYBODY);
}
#endif

// Blocks: a lane's three roles side by side.
LANE_KERNEL(all_reduce_staged, TwoStageArgs) {
  after_predecessor();
  const auto [lane, role] = place_of(block(), 3);
  const u32 everybody = ((1u << WORLD) - 1) & ~(1u << RANK);
  if (role == 0) {
    const double factor = args.factor;
    scatter(args, lane, [factor](Unit v) { return lift(v, factor); });
  } else if (role == 1) {
    const auto make = [&](const Unit* const(&slot)[WORLD], u32 unit, u64 offset) {
      return sum_of(slot, unit, load_unit(args.from + offset, args.bytes - offset), args.factor);
    };
#ifdef SYMM_GATED
    spread_gated(args, lane, everybody, args.targets & everybody, make);
  } else if (args.gate.take != 0) {
    // Peers store here themselves.
#else
    spread(args, lane, everybody, args.targets & everybody, make);
#endif
  } else if (args.targets >> RANK & 1) {
    gather(args, lane);
  }
}

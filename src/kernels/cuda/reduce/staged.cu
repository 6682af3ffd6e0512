// Reduce-scatter of long messages: every rank sends each piece to the rank that needs it, which adds it up in rank order.
// Where all inputs are symmetric memory, the rank that needs a piece loads it instead.
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
  // Of zero-copy calls.
  Handshake handshake;
};
static_assert(sizeof(ReduceStagedArgs) == 648, "");

#ifdef SYMM_ZERO_COPY
// Opens the handshake; adds up what this rank needs, loaded from all inputs, if they are symmetric memory: `direct`. False: some rank did not
// come, and nothing was loaded.
DEVICE bool sum_direct(const ReduceStagedArgs& args, const Round& round, bool& direct) {
  const Handshake& handshake = args.handshake;
  Line words[WORLD];
  double factor[WORLD];
  const auto word_for = [&](u32 r) -> Line { return {handshake_word(handshake, handshake.give >> r & 1, args.out.from[r]), 0}; };
  if (!begin_handshake(args.common, round, EVERYBODY, word_for, words) || !hear_factors(args.common, round, args.factor, factor)) {
    return false;
  }
  bool lacking = false;
  const u8* from[WORLD];
#pragma unroll
  for (u32 r = 0; r < WORLD; ++r) {
    // Who lacks one piece for somebody says so to everybody: all decide alike.
    lacking |= words[r].first == 0;
    from[r] = tensor_of(handshake, r, words[r].first);
  }
  direct = !lacking;
  if (direct) {
    sum_in_place(from, factor, args.bytes, [&](u64 offset, Unit sum, u64 bytes) { store_unit(args.to + offset, sum, bytes); });
    count_direct(args.common, handshake, block() == 0);
  }
  return true;
}
#endif

// Blocks: a lane's sender and receiver side by side.
LANE_KERNEL(reduce_staged, ReduceStagedArgs) {
  after_predecessor();
#ifdef SYMM_ZERO_COPY
  const Round round = begin_round(args.common, lines_of(args.handshake));
  bool direct;
  if (!sum_direct(args, round, direct)) {
    return;
  }
  const Closing closing{args.common, args.handshake, round};
  if (direct) {
    return;
  }
#endif
  const auto [lane, role] = role_of(block(), 2);
  const u32 everybody = ((1u << WORLD) - 1) & ~(1u << RANK);
  if (role == 0) {
    Stage stage(args.common, args.staging, lane);
    const double factor = args.factor;
    send_pieces(stage, args.out, everybody, ChunkOfCall{args.staging.chunk_bytes}, [factor](Unit v) { return lift(v, factor); });
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
  const ChunkOfCall chunk_of{args.staging.chunk_bytes};
  take_pieces(stage, bytes, everybody, chunk_of, [&](const u64(&start)[WORLD], const u32(&units)[WORLD], const Unit* const(&slot)[WORLD]) {
    const u32 count = units[(RANK + 1) % WORLD];
    for (u32 i = thread(); i < count; i += threads()) {
      const u64 offset = ChunkOfCall::offset(start[(RANK + 1) % WORLD], i);
      store_unit(args.to + offset, sum_of(slot, i, load_unit(own + offset, args.bytes - offset), args.factor), args.bytes - offset);
    }
  });
}

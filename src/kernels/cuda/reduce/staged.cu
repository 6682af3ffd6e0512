// Reduce-scatter of long messages through staging: every rank sends each piece to the rank that
// needs it, and that rank adds all pieces in rank order. In a zero-copy call with all inputs in
// symmetric memory, that rank loads the pieces instead.
#include "staged_roles.cuh"
#include "sum.cuh"

struct ReduceStagedArgs {
  Common common;
  Staging staging;
  // Messages of this rank to each rank; one of 0 bytes is not sent.
  Outgoing out;
  // Result of this rank; null if it gets none.
  u8* to;
  u64 bytes;
  double factor;
  // Handshake of zero-copy calls.
  Handshake handshake;
};
static_assert(sizeof(ReduceStagedArgs) == 648, "");

#ifdef SYMM_ZERO_COPY
// Exchanges handshake words. Sets `direct` to true if all inputs are in symmetric memory; in this
// case it also loads this rank's piece from all inputs and adds the pieces. Returns false if a rank
// did not arrive; then nothing was loaded.
DEVICE bool sum_direct(const ReduceStagedArgs& args, HandshakeSession& session, bool& direct) {
  const Handshake& handshake = args.handshake;
  Line words[WORLD];
  double factor[WORLD];
  // step 1: send each peer the address of its piece of this rank's input, and receive the peers'
  // addresses
  const auto word_for = [&](u32 r) -> Line {
    return {session.word(handshake.give >> r & 1, args.out.from[r]), 0};
  };
  if (!session.exchange(word_for, words) || !exchange_factors(session, args.factor, factor)) {
    return false;
  }
  // step 2: check that all inputs are in symmetric memory
  bool lacking = false;
  const u8* from[WORLD];
  for_each_rank([&](u32 r) {
    // If one piece for one peer is not in symmetric memory, the rank reports this to all peers, so
    // all make the same decision.
    lacking |= words[r].first == 0;
    from[r] = session.tensor(r, words[r].first);
  });
  direct = !lacking;
  // step 3: load this rank's piece from all inputs, add the pieces in rank order, store the sum
  if (direct) {
    sum_in_place(from, factor, args.bytes, [&](u64 offset, Unit sum, u64 bytes) {
      store_unit(args.to + offset, sum, bytes);
    });
    session.count_direct(block() == 0);
  }
  return true;
}
#endif

// Blocks of the kernel: a lane's sender and receiver are adjacent.
LANE_KERNEL(reduce_staged, ReduceStagedArgs) {
  after_predecessor();
  announce_arrival(args.common, args.staging.arrivals);
#ifdef SYMM_ZERO_COPY
  // step 1, zero-copy: start the handshake; if all inputs are in symmetric memory, the sum is
  // computed here and the call ends
  HandshakeSession session(args.common, args.handshake, EVERYBODY);
  session.begin();
  bool direct;
  if (!sum_direct(args, session, direct)) {
    return;
  }
  const EndOfHandshake end{session};
  if (direct) {
    return;
  }
#endif
  const auto [lane, role] = role_of(block(), 2);
  // step 2 (role 0): send each peer its piece of this rank's input, chunk by chunk
  if (role == 0) {
    SendSession sender(args.common, args.staging, lane);
    const double factor = args.factor;
    send_pieces(
        sender, args.out, all_peers(), ChunkOfCall{args.staging.chunk_bytes},
        [factor](Unit v) { return lift(v, factor); });
    return;
  }
  if (args.to == nullptr) {
    return;
  }
  ReceiveSession receiver(args.common, args.staging, lane);
  u64 bytes[WORLD];
  for_each_rank([&](u32 r) { bytes[r] = args.bytes; });
  // step 3 (role 1): add each arrived chunk in rank order and store the sum
  const u8* own = args.out.from[RANK];
  const ChunkOfCall chunk_of{args.staging.chunk_bytes};
  const auto add_up = [&](const u64(&start)[WORLD], const u32(&units)[WORLD],
                          const Unit* const(&slot)[WORLD]) {
    const u32 count = units[(RANK + 1) % WORLD];
    for (u32 i = thread(); i < count; i += threads()) {
      const u64 offset = ChunkOfCall::offset(start[(RANK + 1) % WORLD], i);
      store_unit(
          args.to + offset,
          sum_of(slot, i, load_unit(own + offset, args.bytes - offset), args.factor),
          args.bytes - offset);
    }
  };
  receive_pieces(receiver, bytes, all_peers(), chunk_of, add_up);
}
